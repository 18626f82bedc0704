// Activations in the form that a product wants, rounded bit for bit as the host executor rounds them (docs/numerics.md),
// optionally after silu(x) * up. A quantised row is int8 values and, for each 32 of them, {float d, sums}: see products.cuh.
#include "q8_k.cuh"
#include <cuda_bf16.h>

struct Input {
    const float* x;
    const float* up;  // may be null; strides as x
    word row_stride, head_stride, width;
    double limit;

    // Where an element of a row lies; a head's elements follow it.
    DEVICE word place(int row, int element) const {
        const int w = int(width);
        return row * row_stride + element / w * head_stride + element % w;
    }
    DEVICE float read(word place) const { return up ? silu_times(x[place], up[place], float(limit)) : x[place]; }
    DEVICE float at(int row, int element) const { return read(place(row, element)); }
};

// Grid (elements / 1024, rows), 128 threads: a warp takes 256 elements, a lane 8.
extern "C" __global__ void quantise_Q8_K(Input in, word elements, uint8_t* values, uint8_t* scales, word stride) {
    begin();
    const int lane = threadIdx.x & 31, row = blockIdx.y;
    const word first = (word(blockIdx.x) * 4 + threadIdx.x / 32) * 256;
    if (first >= elements) return;
    float x[8];
    const word place = in.place(row, int(first) + 8 * lane);  // heads are multiples of 256 wide
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = in.read(place + i);
    write_q8_k(x, values + row * stride + first, scales + row * stride + first / 32 * 8);
}

// Grid (elements / 128, rows), 128 threads: a warp takes 32 elements. `weighted`: keep s of Q8_1 instead of the sums.
extern "C" __global__ void quantise_Q8_0(Input in, word elements, uint8_t* values, uint8_t* scales, word stride,
                                         word weighted) {
    begin();
    const int lane = threadIdx.x & 31, row = blockIdx.y;
    const word first = (word(blockIdx.x) * 4 + threadIdx.x / 32) * 32;
    if (first >= elements) return;
    const float x = in.at(row, int(first) + lane);
    float largest = fabsf(x);
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    const float scale = largest / 127.0f, inverse = largest == 0.0f ? 0.0f : 127.0f / largest;
    const int q = __float2int_rn(x * inverse);
    int sum = q;
#pragma unroll
    for (int distance = 8; distance; distance >>= 1) sum += __shfl_xor_sync(~0u, sum, distance);
    const int last = __shfl_sync(~0u, sum, 16);
    values[row * stride + first + lane] = uint8_t(q);
    if (lane == 0) {
        const float d = __half2float(__float2half_rn(scale)), s = __half2float(__float2half_rn(scale * float(sum + last)));
        *reinterpret_cast<int2*>(scales + row * stride + first / 32 * 8) =
            make_int2(__float_as_int(d), weighted ? __float_as_int(s) : (sum & 0xffff) | last << 16);
    }
}

// Grid (elements / 256, rows), 256 threads: floats, rounded to f16 (kind 1), bf16 (kind 2) or as they are (kind 0).
extern "C" __global__ void round_floats(Input in, word elements, float* values, word stride, word kind) {
    begin();
    const word i = word(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    const float x = in.at(blockIdx.y, int(i));
    values[blockIdx.y * stride + i] =
        kind == 1 ? __half2float(__float2half_rn(x)) : kind == 2 ? __bfloat162float(__float2bfloat16_rn(x)) : x;
}
