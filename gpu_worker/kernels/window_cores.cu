// Attention over a window and group rows (window.cu) for the rows of a decode step, over an f16 cache on tensor cores. Queries
// and weights are sums of two f16 numbers, so that results are those of f32 arithmetic but for its order.
//
// As in window.cu team t takes the splits t, t + TEAMS, ..., and join_window joins the teams.
#include "windows.cuh"

constexpr int KEYS = 32;
constexpr int HEADS = 16;
constexpr int TEAMS = 16;
constexpr int THREADS = 256;
constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float rest(float x) { return x - to_float(from_float<__half>(x)); }

// Grid (TEAMS, head batches, rows); dynamic shared memory (2 HEADS + KEYS) * WIDTH * 2 + 2 * HEADS * KEYS * 2 + 2 * HEADS *
// KEYS * 4. For scores a warp has a quarter of the keys and half of the elements, for weights two heads, for sums an eighth
// of the columns.
template <int WIDTH>
DEVICE void attend_cores(const int* slots, const int* positions, const float* q, word q_row, word q_head, const Ring& window,
                         const Groups& groups, word heads, double scale, float* parts, float2* extremes) {
    DYNAMIC_SHARED(uint8_t, memory);
    __shared__ float less[HEADS];
    constexpr int COLUMNS = WIDTH / 64, QUERIES = HEADS * WIDTH * 2, CHANCES = HEADS * KEYS * 2;
    begin();
    uint8_t *queries = memory, *tile = queries + 2 * QUERIES, *chances = tile + KEYS * WIDTH * 2;
    float* scores = reinterpret_cast<float*>(chances + 2 * CHANCES);  // [half of the elements][head][key]
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, quarter = warp & 3, half = warp / 4;
    const int row = blockIdx.z, team = blockIdx.x, first_head = blockIdx.y * HEADS;
    const RowKeys keys = keys_of(window, groups, row, slots[row], positions[row]);
    const int splits = (keys.count + KEYS - 1) / KEYS;
    if (team < splits) fetch_keys<WIDTH, KEYS>(tile, keys, team * KEYS);

    q += row * q_row;
    for (int i = threadIdx.x; i < HEADS * WIDTH / 2; i += THREADS) {
        const int head = i / (WIDTH / 2), pair = i % (WIDTH / 2);
        float x = 0.0f, y = 0.0f;
        if (first_head + head < heads) {
            const float* from = q + (first_head + head) * q_head + 2 * pair;
            x = from[0], y = from[1];
        }
        const int place = half_place<WIDTH>(head, pair / 4) + (pair & 3) * 4;
        *reinterpret_cast<uint32_t*>(queries + place) = two_halves(x, y);
        *reinterpret_cast<uint32_t*>(queries + QUERIES + place) = two_halves(rest(x), rest(y));
    }
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {}, sums[COLUMNS][4] = {};
    const float by = float(scale) * LOG2_E;
    for (int split = team; split < splits; split += TEAMS) {
        if (split != team) {
            __syncthreads();
            fetch_keys<WIDTH, KEYS>(tile, keys, split * KEYS);
        }
        await_copies<0>();
        __syncthreads();
        float chains[4][4] = {};
#pragma unroll 4
        for (int k = half * WIDTH / 64; k < (half + 1) * WIDTH / 64; ++k) {
            uint32_t b[4];
            load_matrices<false>(b, tile + half_place<WIDTH>(8 * quarter + (lane & 7), 4 * k + (lane >> 3)));
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    uint32_t a[4];
                    load_matrices<false>(a, queries + p * QUERIES + half_place<WIDTH>(lane & 15, 4 * k + 2 * j + (lane >> 4)));
                    multiply_f16(chains[2 * j + p], a, b[2 * j], b[2 * j + 1]);
                }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
            scores[(half * HEADS + lane / 4 + 8 * (e / 2)) * KEYS + 8 * quarter + 2 * (lane & 3) + (e & 1)] =
                (chains[0][e] + chains[2][e]) + (chains[1][e] + chains[3][e]);
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head = 2 * warp + h;
            const float sum = scores[head * KEYS + lane] + scores[(HEADS + head) * KEYS + lane];
            const float score = split * KEYS + lane < keys.count ? sum * by : -INFINITY;
            float greatest = fmaxf(score, top[h]);
#pragma unroll
            for (int distance = 16; distance; distance >>= 1)
                greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, distance));
            const float weight = exp2f(score - greatest), before = exp2f(top[h] - greatest);
            float all = weight;
#pragma unroll
            for (int distance = 16; distance; distance >>= 1) all += __shfl_xor_sync(~0u, all, distance);
            total[h] = total[h] * before + all, top[h] = greatest;
            if (lane == 0) less[head] = before;
            const int place = short_place(head, lane / 8) + (lane & 7) * 2;
            *reinterpret_cast<__half*>(chances + place) = from_float<__half>(weight);
            *reinterpret_cast<__half*>(chances + CHANCES + place) = from_float<__half>(rest(weight));
        }
        __syncthreads();
        uint32_t a[2][2][4];
#pragma unroll
        for (int p = 0; p < 2; ++p)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                load_matrices<false>(a[p][k], chances + p * CHANCES + short_place(lane & 15, 2 * k + (lane >> 4)));
        const float scaled[2] = {less[lane / 4], less[lane / 4 + 8]};
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            uint32_t b[4];
            load_matrices<true>(b, tile + half_place<WIDTH>(lane, warp * COLUMNS + n));
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[n][e] *= scaled[e / 2];
#pragma unroll
            for (int p = 1; p >= 0; --p) multiply_f16(sums[n], a[p][0], b[0], b[1]), multiply_f16(sums[n], a[p][1], b[2], b[3]);
        }
    }
    const word place = (row * heads + first_head) * TEAMS + team;
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (lane == 0 && first_head + 2 * warp + h < heads)
            extremes[place + (2 * warp + h) * TEAMS] = make_float2(top[h] / LOG2_E, total[h]);
    if (team >= splits) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = lane / 4 + 8 * h;
        if (first_head + head >= heads) continue;
        float* to = parts + (place + head * TEAMS) * WIDTH + warp * COLUMNS * 8 + 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) to[8 * n] = sums[n][2 * h], to[8 * n + 1] = sums[n][2 * h + 1];
    }
}
#define WINDOW_CORES(WIDTH)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                \
        window_cores_##WIDTH(const int* slots, const int* positions, const float* q, word q_row, word q_head, Ring window, \
                             Groups groups, word heads, double scale, float* parts, float2* extremes) {                  \
        attend_cores<WIDTH>(slots, positions, q, q_row, q_head, window, groups, heads, scale, parts, extremes);          \
    }
WINDOW_CORES(128)
WINDOW_CORES(256)
WINDOW_CORES(512)
