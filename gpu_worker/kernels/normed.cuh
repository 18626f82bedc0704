// A norm inside the kernel that takes its result: every block norms the row for itself, as add_rms_norm does, bit for bit.
#pragma once
#include "q8_k.cuh"

constexpr int NORM_THREADS = 512;  // the order of the sum of squares depends on it

struct Normed {
    const float* x;
    word x_row;
    const float* weight;
    word width;
    double epsilon;
    float* out;  // the normed row for those who come later
    word out_row;
    uint8_t *values, *scales;  // the same as Q8_K
    word q_stride;             // 0: not wanted
};

// The normed row into shared memory `kept`; NORM_THREADS threads. Weights are loaded before `ready`, the row after it; a
// block barrier must follow.
struct NormedRow {
    static constexpr int AT_ONCE = 4;
    float weight[AT_ONCE], value[AT_ONCE];

    template <class Ready>
    DEVICE void load(const Normed& norm, int row, Ready ready) {
        const float* x = norm.x + row * norm.x_row;
        const int n = int(norm.width), tid = threadIdx.x;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            weight[j] = tid + NORM_THREADS * j < n ? norm.weight[tid + NORM_THREADS * j] : 0.0f;
        ready();
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) value[j] = tid + NORM_THREADS * j < n ? x[tid + NORM_THREADS * j] : 0.0f;
    }
    DEVICE void finish(const Normed& norm, int row, float* kept) {
        const float* x = norm.x + row * norm.x_row;
        const int n = int(norm.width), tid = threadIdx.x;
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) squares = fmaf(value[j], value[j], squares);
        for (int i = tid + NORM_THREADS * AT_ONCE; i < n; i += NORM_THREADS) {
            kept[i] = x[i];
            squares = fmaf(kept[i], kept[i], squares);
        }
        const float root = 1.0f / sqrtf(block_sum(squares) / float(n) + float(norm.epsilon));
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (tid + NORM_THREADS * j < n) kept[tid + NORM_THREADS * j] = value[j] * root * weight[j];
        for (int i = tid + NORM_THREADS * AT_ONCE; i < n; i += NORM_THREADS) kept[i] = kept[i] * root * norm.weight[i];
    }
};

// A row of `width` floats in shared memory as Q8_K, 256 elements a warp, from warp `begin` on.
template <bool SWIZZLED = false>
DEVICE void round_row(const float* kept, int width, uint8_t* values, uint8_t* scales, int begin = 0) {
    constexpr int ALL = NORM_THREADS / 32;
    for (int first = (int(threadIdx.x / 32) + ALL - begin) % ALL * 256; first < width; first += NORM_THREADS * 8) {
        const float4* source = reinterpret_cast<const float4*>(kept + first + 8 * (threadIdx.x & 31));
        const float4 a = source[0], b = source[1];
        const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        write_q8_k<SWIZZLED>(v, values + first, scales + first / 32 * 8, first / 256);
    }
}
