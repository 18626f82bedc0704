// The choice of a router that scores by sqrt(ln(1 + e^x)), or looks experts up by token. Ties go to the higher id; a NaN loses.
#pragma once
#include "router.cuh"

// See op SoftplusRouter. With a `table` (used ids a token) row r's token is tokens[out_rows[r]], or tokens[r] without out_rows.
struct SoftplusChoice {
    int* ids;
    word ids_row;
    float* mix;
    word mix_row;
    const float* bias;
    const int *table, *tokens, *out_rows;
    word used, normalise;
    double scale;
};

// One row, by all threads of a block; `scores` is shared memory of 8 * experts bytes.
DEVICE void softplus_row(const float* logits, int row, const SoftplusChoice& how, int experts, float* scores) {
    uint32_t* ranks = reinterpret_cast<uint32_t*>(scores + experts);  // in descending order of id
    int* ids = how.ids + row * how.ids_row;
    float* mix = how.mix + row * how.mix_row;
    for (int i = threadIdx.x; i < experts; i += blockDim.x) {
        const double x = __ldcg(logits + i);
        scores[i] = float(sqrt(x > 20.0 ? x : log1p(exp(x))));
        ranks[experts - 1 - i] = rank_of(how.bias ? __fadd_rn(scores[i], how.bias[i]) : scores[i]);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    const int* listed = how.table ? how.table + word(how.tokens[how.out_rows ? how.out_rows[row] : row]) * how.used : nullptr;
    float total = 0.0f;
    for (int k = 0; k < how.used; ++k) {
        const int best = listed ? listed[k] : experts - 1 - take_best(ranks, experts);
        if (lane == 0) ids[k] = best;
        total = __fadd_rn(total, scores[best]);
    }
    __syncwarp();
    for (int k = lane; k < how.used; k += 32) {
        const float score = scores[ids[k]];
        mix[k] = __fmul_rn(how.normalise ? score / __fadd_rn(total, 1e-20f) : score, float(how.scale));
    }
}
