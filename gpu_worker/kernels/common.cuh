// What the kernels of several families share: the 8-byte parameter word and sums over a block of threads.
#pragma once
#include "machine.cuh"
#include <cuda_fp16.h>
#include <stdint.h>

typedef long long word;  // every parameter of a kernel is 8 bytes wide: a pointer, a word or a double

DEVICE float silu_times(float gate, float up, float limit) {
    if (limit > 0.0f) gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
    return gate * (1.0f / (1.0f + expf(-gate))) * up;
}

// A pair of elements turned by (cosine, sine).
DEVICE void turn_pair(float& first, float& second, float2 turn) {
    const float a = first, b = second;
    first = __fmaf_rn(a, turn.x, -__fmul_rn(b, turn.y));
    second = __fmaf_rn(a, turn.y, __fmul_rn(b, turn.x));
}

// Sum over all threads of a block (a multiple of 32, at most 1024), the same for any of them.
DEVICE float block_sum(float x) {
    __shared__ float sums[32];
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) x += __shfl_xor_sync(~0u, x, distance);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < int(blockDim.x / 32); ++i) total += sums[i];
    return total;
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(__half x) { return __half2float(x); }
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) { return x; }
template <>
DEVICE __half from_float<__half>(float x) { return __float2half_rn(x); }
