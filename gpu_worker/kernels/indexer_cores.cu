// Scores of the lightning indexer (indexer.cu) over an f16 cache, on tensor cores. A query is the sum of two f16 numbers,
// which together have as many bits as it has but two, so that lists are those of f32 arithmetic.
#include "halves.cuh"

constexpr int KEYS = 128;  // group rows of a block, sixteen a warp
constexpr int THREADS = 256;
constexpr int MOST_HEADS = 128;

// Grid (walkers, rows); dynamic shared memory (KEYS + 2 * heads up to a multiple of 16) * WIDTH * 2.
template <int WIDTH>
DEVICE void score_cores(const int* slots, const int* positions, const float* q, word q_row, word q_head, const float* weights,
                       word weights_row, const void* keys, word slot_stride, word row_stride, word heads, word ratio,
                       double scale, float* scores, word scores_row) {
    DYNAMIC_SHARED(uint8_t, memory);
    __shared__ float factors[MOST_HEADS];
    constexpr int ACROSS = WIDTH / 8;
    begin();
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, row = blockIdx.y, batches = (int(heads) + 15) / 16;
    const int visible = (positions[row] + 1) / int(ratio);
    uint8_t *tile = memory, *upper = tile + KEYS * WIDTH * 2, *lower = upper + batches * 16 * WIDTH * 2;
    const __half* held = static_cast<const __half*>(keys) + slots[row] * slot_stride;
    if (int(blockIdx.x) * KEYS >= visible) return;
    q += row * q_row;
    for (int i = threadIdx.x; i < batches * 16 * WIDTH / 2; i += THREADS) {
        const int head = i / (WIDTH / 2), pair = i % (WIDTH / 2);
        float x = 0.0f, y = 0.0f;
        if (head < heads) x = q[head * q_head + 2 * pair], y = q[head * q_head + 2 * pair + 1];
        const int place = half_place<WIDTH>(head, pair / 4) + (pair & 3) * 4;
        const float near_x = to_float(from_float<__half>(x)), near_y = to_float(from_float<__half>(y));
        *reinterpret_cast<uint32_t*>(upper + place) = two_halves(x, y);
        *reinterpret_cast<uint32_t*>(lower + place) = two_halves(x - near_x, y - near_y);
    }
    for (int head = threadIdx.x; head < batches * 16; head += THREADS)
        factors[head] = head < heads ? weights[row * weights_row + head] * float(scale) : 0.0f;
    for (int first = blockIdx.x * KEYS; first < visible; first += gridDim.x * KEYS) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KEYS * ACROSS / THREADS; ++i) {
            const int at = threadIdx.x + THREADS * i, key = at / ACROSS, chunk = at % ACROSS;
            const bool there = first + key < visible;
            copy_async(tile + half_place<WIDTH>(key, chunk), held + (there ? first + key : first) * row_stride + 8 * chunk, there);
        }
        commit_copies();
        await_copies<0>();
        __syncthreads();
        float totals[2][2] = {};
        for (int batch = 0; batch < batches; ++batch) {
            float sums[2][4] = {};
#pragma unroll
            for (int k = 0; k < WIDTH / 16; ++k) {
                uint32_t a[2][4], b[4];
                const int place = half_place<WIDTH>(16 * batch + (lane & 15), 2 * k + (lane >> 4));
                load_matrices<false>(a[0], upper + place), load_matrices<false>(a[1], lower + place);
                load_matrices<false>(b, tile + half_place<WIDTH>(16 * warp + (lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)));
#pragma unroll
                for (int part = 1; part >= 0; --part)
#pragma unroll
                    for (int n = 0; n < 2; ++n) multiply_f16(sums[n], a[part], b[2 * n], b[2 * n + 1]);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float factor = factors[16 * batch + lane / 4 + 8 * h];
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float dot = sums[n][2 * h + e];
                        if (16 * batch + lane / 4 + 8 * h < heads) totals[n][e] = fmaf(factor, dot < 0.0f ? 0.0f : dot, totals[n][e]);
                    }
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2)
                    totals[n][e] += __shfl_xor_sync(~0u, totals[n][e], distance);
                const int number = first + 16 * warp + 8 * n + 2 * lane + e;
                if (lane < 4 && number < visible) scores[row * scores_row + number] = totals[n][e];
            }
    }
}
#define SCORE_CORES(WIDTH)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                  \
        score_cores_##WIDTH(const int* slots, const int* positions, const float* q, word q_row, word q_head,                \
                           const float* weights, word weights_row, const void* keys, word slot_stride, word row_stride,    \
                           word heads, word ratio, double scale, float* scores, word scores_row) {                         \
        score_cores<WIDTH>(slots, positions, q, q_row, q_head, weights, weights_row, keys, slot_stride, row_stride, heads,  \
                          ratio, scale, scores, scores_row);                                                               \
    }
SCORE_CORES(64)
SCORE_CORES(128)
