// A router's scores, of rows that are normed for them, and a choice by them. A part of matmul.cu, which has what it is made of
// (Quant).
#pragma once
#include "normed.cuh"
#include "products.cuh"
#include "softplus.cuh"

// A router's scores of a norm's rows, each summed as float_products does. Grid (outputs / WARPS, rows), NORM_THREADS threads, of
// which WARPS warps form products; dynamic shared memory: the normed row, WARPS weight rows. By all threads.
template <class Quant>
DEVICE void scores_of_norm(const uint8_t* weights, word row_bytes, word outputs, const Normed& norm, float* logits,
                           word logits_row, float* kept) {
    if constexpr (Quant::FORM == FORM_FLOAT) {
        typedef typename Quant::Element Element;
        constexpr int EACH = 16 / Quant::BYTES;
        const int lane = threadIdx.x & 31, output = blockIdx.x * WARPS + threadIdx.x / 32, row = blockIdx.y;
        const int width = int(norm.width), pieces = width / EACH;
        const bool mine = threadIdx.x < 32 * WARPS && output < outputs;
        uint4* held = reinterpret_cast<uint4*>(kept + width) + threadIdx.x / 32 * pieces;
        if (mine)  // a lane reads what it copied itself
            for (int i = lane; i < pieces; i += 32) copy_async(held + i, weights + output * row_bytes + 16 * i);
        commit_copies();
        NormedRow normed;
        normed.load(norm, row, await_previous);
        normed.finish(norm, row, kept);
        await_copies<0>();
        __syncthreads();
        if (mine) {
            float total = 0.0f;
#pragma unroll 4
            for (int i = lane; i < pieces; i += 32) {
                union {
                    uint4 raw;
                    Element element[EACH];
                } w;
                w.raw = held[i];
#pragma unroll
                for (int e = 0; e < EACH; e += 4) {
                    const float4 v = reinterpret_cast<const float4*>(kept)[i * (EACH / 4) + e / 4];
                    total = __fmaf_rn(Quant::value(w.element[e]), Quant::rounded(v.x), total);
                    total = __fmaf_rn(Quant::value(w.element[e + 1]), Quant::rounded(v.y), total);
                    total = __fmaf_rn(Quant::value(w.element[e + 2]), Quant::rounded(v.z), total);
                    total = __fmaf_rn(Quant::value(w.element[e + 3]), Quant::rounded(v.w), total);
                }
            }
            total = warp_sum(total);
            if (lane == 0) logits[row * logits_row + output] = total;
        }
        if (blockIdx.x == 0 && norm.q_stride)
            round_row(kept, width, norm.values + row * norm.q_stride, norm.scales + row * norm.q_stride);
        if (blockIdx.x == gridDim.x - 1)
            for (int i = threadIdx.x; i < width; i += NORM_THREADS) norm.out[row * norm.out_row + i] = kept[i];
    }
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS, 2)
    normed_scores(const uint8_t* weights, word row_bytes, word outputs, Normed norm, float* logits, word logits_row) {
    DYNAMIC_SHARED(float, kept);
    let_next_begin();
    scores_of_norm<Quant>(weights, row_bytes, outputs, norm, logits, logits_row, kept);
}

// The same, and the choice by the block that is the last to end; 8 * outputs bytes of shared memory at least. `ended`: a counter
// for each row, 0 before and after.
extern "C" __global__ void __launch_bounds__(NORM_THREADS, 2)
    normed_choice(const uint8_t* weights, word row_bytes, word outputs, Normed norm, float* logits, word logits_row,
                  SoftplusChoice how, unsigned* ended) {
    DYNAMIC_SHARED(float, kept);
    __shared__ bool last;
    let_next_begin();
    scores_of_norm<Quant>(weights, row_bytes, outputs, norm, logits, logits_row, kept);
    __threadfence();
    __syncthreads();
    const int row = blockIdx.y;
    if (threadIdx.x == 0) {
        last = atomicAdd(ended + row, 1u) == gridDim.x - 1;
        if (last) ended[row] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    softplus_row(logits + row * logits_row, row, how, int(outputs), kept);
}
