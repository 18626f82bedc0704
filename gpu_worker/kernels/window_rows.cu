// Attention over a window and group rows (window.cu) for rows of a prompt block, over an f16 cache on tensor cores: all heads
// meet the same keys, which are values, too. 32 heads of a row a block, 32 keys at a time, the softmax carried along. Sums
// are f32; queries and weights are rounded to f16. A row's result depends on its keys only.
#include "windows.cuh"

constexpr int KEYS = 32;
constexpr int HEADS = 32;
constexpr int THREADS = 256;
constexpr int QUARTERS = 4;  // of the keys, eight each
constexpr float LOG2_E = 1.4426950408889634f;

// Grid (head batches, rows); dynamic shared memory (HEADS + 2 KEYS) * WIDTH * 2 + HEADS * KEYS * 2 + QUARTERS * HEADS * 4.
// For scores a warp has 16 heads and a quarter of the keys; for sums all heads and an eighth of the columns.
template <int WIDTH>
DEVICE void attend_rows(const int* slots, const int* positions, const float* q, word q_row, word q_head, const Ring& window,
                        const Groups& groups, const float* sinks, word heads, double scale, float* out, word out_row,
                        word out_head) {
    DYNAMIC_SHARED(uint8_t, memory);
    constexpr int COLUMNS = WIDTH / 64, STAGE = KEYS * WIDTH * 2;
    begin();
    uint8_t *queries = memory, *stages = queries + HEADS * WIDTH * 2, *chances = stages + 2 * STAGE;
    float* shared = reinterpret_cast<float*>(chances + HEADS * KEYS * 2);  // [quarter][head]
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, half = warp & 1, quarter = warp / 2;
    const int row = blockIdx.y, first_head = blockIdx.x * HEADS;
    const RowKeys keys = keys_of(window, groups, row, slots[row], positions[row]);
    const int count = keys.count, splits = (count + KEYS - 1) / KEYS;
    auto fetch = [&](int split) { fetch_keys<WIDTH, KEYS>(stages + (split & 1) * STAGE, keys, split * KEYS); };
    fetch(0);

    q += row * q_row;
    for (int i = threadIdx.x; i < HEADS * WIDTH / 2; i += THREADS) {
        const int head = i / (WIDTH / 2), pair = i % (WIDTH / 2);
        const float* from = q + (first_head + head) * q_head + 2 * pair;
        const uint32_t both = first_head + head < heads ? two_halves(from[0], from[1]) : 0;
        *reinterpret_cast<uint32_t*>(queries + half_place<WIDTH>(head, pair / 4) + (pair & 3) * 4) = both;
    }
    // of the heads 16 i + lane / 4 + 8 h: greatest score so far, the sink's first
    float top[2][2], total[2] = {}, sums[2][COLUMNS][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head = first_head + 16 * i + lane / 4 + 8 * h;
            top[i][h] = head < heads ? sinks[head] * LOG2_E : 0.0f;
        }
    if (quarter == 0 && (lane & 3) == 0) total[0] = total[1] = 1.0f;  // the sink's weight, counted once
    const float by = float(scale) * LOG2_E;

    for (int split = 0; split < splits; ++split) {
        await_copies<0>();
        __syncthreads();
        if (split + 1 < splits) fetch(split + 1);
        const uint8_t* stage = stages + (split & 1) * STAGE;
        float chains[4][4] = {};
#pragma unroll 4
        for (int k = 0; k < WIDTH / 32; ++k) {
            uint32_t a[2][4], b[4];
            load_matrices<false>(b, stage + half_place<WIDTH>(8 * quarter + (lane & 7), 4 * k + (lane >> 3)));
#pragma unroll
            for (int j = 0; j < 2; ++j)
                load_matrices<false>(a[j], queries + half_place<WIDTH>(16 * half + (lane & 15), 4 * k + 2 * j + (lane >> 4)));
            multiply_f16(chains[2 * (k & 1)], a[0], b[0], b[1]);
            multiply_f16(chains[2 * (k & 1) + 1], a[1], b[2], b[3]);
        }
        float scores[4], above[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int number = split * KEYS + 8 * quarter + 2 * (lane & 3) + (e & 1);
            const float score = (chains[0][e] + chains[1][e]) + (chains[2][e] + chains[3][e]);
            scores[e] = number < count ? score * by : -INFINITY;
            above[e / 2] = fmaxf(above[e / 2], scores[e]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 1));
            above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 2));
            if ((lane & 3) == 0) shared[quarter * HEADS + 16 * half + lane / 4 + 8 * h] = above[h];
        }
        __syncthreads();
        float less[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float greatest = top[i][h];
#pragma unroll
                for (int n = 0; n < QUARTERS; ++n) greatest = fmaxf(greatest, shared[n * HEADS + 16 * i + lane / 4 + 8 * h]);
                less[i][h] = exp2f(top[i][h] - greatest), top[i][h] = greatest;
            }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float greatest = half ? top[1][h] : top[0][h];
            const float x = exp2f(scores[2 * h] - greatest), y = exp2f(scores[2 * h + 1] - greatest);
            total[h] = total[h] * (half ? less[1][h] : less[0][h]) + (x + y);
            *reinterpret_cast<uint32_t*>(chances + short_place(16 * half + lane / 4 + 8 * h, quarter) + (lane & 3) * 4) =
                two_halves(x, y);
        }
        __syncthreads();
        uint32_t a[2][2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                load_matrices<false>(a[i][k], chances + short_place(16 * i + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            uint32_t b[4];
            load_matrices<true>(b, stage + half_place<WIDTH>(lane, warp * COLUMNS + n));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][n][e] *= less[i][e / 2];
                multiply_f16(sums[i][n], a[i][0], b[0], b[1]);
                multiply_f16(sums[i][n], a[i][1], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        if ((lane & 3) == 0) shared[quarter * HEADS + 16 * half + lane / 4 + 8 * h] = total[h];
    }
    __syncthreads();
    out += row * out_row + (warp * COLUMNS) * 8 + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = 16 * i + lane / 4 + 8 * h;
            if (first_head + at >= heads) continue;
            float whole = 0.0f;
#pragma unroll
            for (int n = 0; n < QUARTERS; ++n) whole += shared[n * HEADS + at];
            const float inverse = 1.0f / whole;
            float* to = out + (first_head + at) * out_head;
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) to[8 * n] = sums[i][n][2 * h] * inverse, to[8 * n + 1] = sums[i][n][2 * h + 1] * inverse;
        }
}
#define ATTEND_ROWS(WIDTH)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                              \
        attend_rows_##WIDTH(const int* slots, const int* positions, const float* q, word q_row, word q_head, Ring window, \
                            Groups groups, const float* sinks, word heads, double scale, float* out, word out_row,        \
                            word out_head) {                                                                              \
        attend_rows<WIDTH>(slots, positions, q, q_row, q_head, window, groups, sinks, heads, scale, out, out_row,         \
                           out_head);                                                                                     \
    }
ATTEND_ROWS(128)
ATTEND_ROWS(256)
ATTEND_ROWS(512)
