// The router that scores by sqrt(ln(1 + e^x)), or looks experts up by token. Ties go to the higher id; a NaN loses.
#include "router.cuh"

// Grid rows, 32 threads; dynamic shared memory 8 * experts bytes. See op SoftplusRouter. With a `table` (used ids a token)
// row r's token is tokens[out_rows[r]], or tokens[r] without out_rows.
extern "C" __global__ void __launch_bounds__(32)
    softplus_router(const float* logits, word logits_row, int* ids, word ids_row, float* mix, word mix_row,
                    const float* bias, const int* table, const int* tokens, const int* out_rows, word experts, word used,
                    word normalise, double scale) {
    begin();
    DYNAMIC_SHARED(float, scores);
    uint32_t* ranks = reinterpret_cast<uint32_t*>(scores + experts);  // in descending order of id
    const int lane = threadIdx.x, row = blockIdx.x, n = int(experts);
    logits += row * logits_row, ids += row * ids_row, mix += row * mix_row;
    for (int i = lane; i < n; i += 32) {
        const double x = logits[i];
        scores[i] = float(sqrt(x > 20.0 ? x : log1p(exp(x))));
        ranks[n - 1 - i] = rank_of(bias ? __fadd_rn(scores[i], bias[i]) : scores[i]);
    }
    __syncwarp();
    const int* listed = table ? table + word(tokens[out_rows ? out_rows[row] : row]) * used : nullptr;
    float total = 0.0f;
    for (int k = 0; k < used; ++k) {
        const int best = listed ? listed[k] : n - 1 - take_best(ranks, n);
        if (lane == 0) ids[k] = best;
        total = __fadd_rn(total, scores[best]);
    }
    __syncwarp();
    for (int k = lane; k < used; k += 32) {
        const float score = scores[ids[k]];
        mix[k] = __fmul_rn(normalise ? score / __fadd_rn(total, 1e-20f) : score, float(scale));
    }
}
