// Activations of a warp as Q8_K: one block of 256, a lane its elements 8 * lane to 8 * lane + 7.
#pragma once
#include "common.cuh"

DEVICE uint32_t pack(const int* q) {
    return (q[0] & 255) | (q[1] & 255) << 8 | (q[2] & 255) << 16 | uint32_t(q[3] & 255) << 24;
}

// Where piece c (16 values) of an activation row lies. SWIZZLED: in shared memory, so that lanes that read every fourth
// piece meet different banks.
template <bool SWIZZLED>
DEVICE int place_of_piece(int c) { return 16 * (SWIZZLED ? c ^ ((c >> 3) & 3) : c); }

// `values` and `scales` are those of the block, `block` its number in the row; 256 and 64 bytes are written. As ggml's quantize_row_q8_K_ref rounds.
template <bool SWIZZLED = false>
DEVICE void write_q8_k(const float (&x)[8], uint8_t* values, uint8_t* scales, int block = 0) {
    const int lane = threadIdx.x & 31;
    float extreme = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (fabsf(x[i]) > fabsf(extreme)) extreme = x[i];
    // the first of the elements of greatest magnitude: lanes are in order, so the lowest lane wins a tie
    const uint32_t magnitude = __float_as_uint(fabsf(extreme));
    const unsigned greatest = __ballot_sync(~0u, magnitude == __reduce_max_sync(~0u, magnitude));
    extreme = __shfl_sync(~0u, extreme, __ffs(int(greatest)) - 1);
    const float inverse = extreme == 0.0f ? 0.0f : -127.0f / extreme, d = extreme == 0.0f ? 0.0f : 1.0f / inverse;
    int q[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        q[i] = min(127, __float2int_rn(inverse * x[i]));
        sum += q[i];
    }
    sum += __shfl_xor_sync(~0u, sum, 1);                      // of 16 elements
    const int last = __shfl_sync(~0u, sum, (lane & ~3) + 2);  // of the second half of 32
    const int at = place_of_piece<SWIZZLED>(16 * block + lane / 2) - 256 * block + 8 * (lane & 1);
    *reinterpret_cast<uint2*>(values + at) = make_uint2(pack(q), pack(q + 4));
    if ((lane & 3) == 0)
        *reinterpret_cast<int2*>(scales + lane / 4 * 8) = make_int2(__float_as_int(d), (sum & 0xffff) | last << 16);
}
