// Attention over a window of positions and over group rows, each of which is its own value: all heads meet the same keys.
//
// The keys of a row, window first, are cut into splits of SPLIT. Team t takes the splits t, t + TEAMS, ..., keeping a
// running greatest score; the teams are joined in ascending order with the head's sink. So a row's result depends on its
// keys only, not on the grid. Queries and weights stay f32 whatever the cache.
#include "q8_k.cuh"
#include "windows.cuh"

constexpr int SPLIT = 32;  // keys: a lane each
constexpr int HEADS = 8;   // heads of a block: a warp each
constexpr int TEAMS = 16;
constexpr int THREADS = 32 * HEADS;

template <class T>
DEVICE float4 four(const T* at) {
    return make_float4(to_float(at[0]), to_float(at[1]), to_float(at[2]), to_float(at[3]));
}

// Grid (TEAMS, head batches, rows), THREADS threads; dynamic shared memory SPLIT rows of width elements and 16 bytes, and
// HEADS rows of width floats; the width is a multiple of 4, at most EACH * THREADS. parts: (row, head, team) of width floats; extremes likewise:
// greatest score and sum of weights, a sum of 0 for a team without keys.
template <class T, int EACH>
DEVICE void attend_window(const int* slots, const int* positions, const float* q, word q_row, word q_head, Ring window,
                          Groups groups, word heads, word width, double scale, float* parts, float2* extremes) {
    DYNAMIC_SHARED(uint8_t, memory);
    __shared__ __align__(16) float weights[SPLIT][HEADS];
    __shared__ float rescale[HEADS];
    begin();
    const int row = blockIdx.z, team = blockIdx.x, w = int(width), lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int position = positions[row], first_head = blockIdx.y * HEADS, head = first_head + warp;
    const int stride = w + 16 / int(sizeof(T));
    T* tile = reinterpret_cast<T*>(memory);
    float* queries = reinterpret_cast<float*>(memory + SPLIT * stride * sizeof(T));
    const int start = max(0, position + 1 - int(window.span)), in_window = position + 1 - start;
    int in_groups = groups.rows ? int((position + 1) / groups.ratio) : 0;
    const int* chosen = groups.chosen ? groups.chosen + row * groups.chosen_row : nullptr;
    if (groups.rows && chosen) in_groups = listed(chosen, int(groups.most));
    const int count = in_window + in_groups, splits = (count + SPLIT - 1) / SPLIT;
    const T* of_window = static_cast<const T*>(window.rows) + slots[row] * window.slot_stride;
    const T* of_groups = static_cast<const T*>(groups.rows) + slots[row] * groups.slot_stride;

    q += row * q_row;
    for (int i = threadIdx.x; i < HEADS * w; i += THREADS) {
        const int h = i / w;
        queries[i] = first_head + h < heads ? q[(first_head + h) * q_head + i % w] : 0.0f;
    }
    float top = -INFINITY, total = 0.0f;  // of this warp's head
    float sums[EACH][HEADS] = {};
    for (int split = team; split < splits; split += TEAMS) {
        __syncthreads();
        // a warp brings the keys warp, warp + HEADS, ...
        for (int k = warp; k < SPLIT; k += HEADS) {
            const int number = split * SPLIT + k;
            const T* source = nullptr;
            if (number < in_window)
                source = of_window + (start + number) % window.count * window.row_stride;
            else if (number < count)
                source = of_groups + word(chosen ? chosen[number - in_window] : number - in_window) * groups.row_stride;
            for (int i = lane; i < w; i += 32) tile[k * stride + i] = source ? source[i] : from_float<T>(0.0f);
        }
        __syncthreads();
        float score = 0.0f;
        const T* key = tile + lane * stride;
        const float* query = queries + warp * w;
#pragma unroll 4
        for (int i = 0; i < w; i += 4) {
            const float4 x = four(key + i), y = *reinterpret_cast<const float4*>(query + i);
            score = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, score))));
        }
        score = split * SPLIT + lane < count ? score * float(scale) : -INFINITY;
        float greatest = score;
#pragma unroll
        for (int distance = 16; distance; distance >>= 1)
            greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, distance));
        greatest = fmaxf(greatest, top);
        const float weight = score == -INFINITY ? 0.0f : expf(score - greatest);
        const float before = top == -INFINITY ? 0.0f : expf(top - greatest);
        float sum = weight;
#pragma unroll
        for (int distance = 16; distance; distance >>= 1) sum += __shfl_xor_sync(~0u, sum, distance);
        total = total * before + sum, top = greatest;
        weights[lane][warp] = weight;
        if (lane == 0) rescale[warp] = before;
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float by = rescale[h];
#pragma unroll
            for (int e = 0; e < EACH; ++e) sums[e][h] *= by;
        }
#pragma unroll 2
        for (int k = 0; k < SPLIT; ++k) {
            const float4 a = *reinterpret_cast<const float4*>(weights[k]), b = *reinterpret_cast<const float4*>(weights[k] + 4);
            const float each[HEADS] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const int i = threadIdx.x + e * THREADS;
                const float value = i < w ? to_float(tile[k * stride + i]) : 0.0f;
#pragma unroll
                for (int h = 0; h < HEADS; ++h) sums[e][h] = fmaf(each[h], value, sums[e][h]);
            }
        }
    }
    const word place = (row * heads + first_head) * TEAMS + team;
    if (lane == 0 && head < heads) extremes[place + warp * TEAMS] = make_float2(top, total);
    if (team >= splits) return;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = threadIdx.x + e * THREADS;
#pragma unroll
        for (int h = 0; h < HEADS; ++h)
            if (i < w && first_head + h < heads) parts[(place + h * TEAMS) * w + i] = sums[e][h];
    }
}
#define ATTEND_WINDOW(NAME, TYPE, EACH)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attend_window_##NAME(const int* slots, const int* positions, const float* q, word q_row, word q_head,         \
                             Ring window, Groups groups, word heads, word width, double scale, float* parts,          \
                             float2* extremes) {                                                                      \
        attend_window<TYPE, EACH>(slots, positions, q, q_row, q_head, window, groups, heads, width, scale, parts,     \
                                  extremes);                                                                          \
    }
ATTEND_WINDOW(f32, float, 2)
ATTEND_WINDOW(f16, __half, 2)
ATTEND_WINDOW(f32_wide, float, 4)
ATTEND_WINDOW(f16_wide, __half, 4)

// What follows a head's result at once: pairs of neighbours from element `first` on turned by their row's angles (no table: none),
// and the head as Q8_K where products take it so (no stride: none). Strides of Q8_K count bytes.
struct Ending {
    const float2* table;
    word pairs, first;
    uint8_t *values, *scales;
    word q_stride;
};

// Grid (heads, rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    join_window(const float* parts, const float2* extremes, const float* sinks, word heads, word width, float* out,
                word out_row, word out_head, Ending ending) {
    __shared__ __align__(16) float kept[4 * THREADS];
    begin();
    const int head = blockIdx.x, row = blockIdx.y;
    const word place = (row * heads + head) * TEAMS;
    float factors[TEAMS], top = sinks[head], total = 0.0f;
    float2 angle = make_float2(1.0f, 0.0f);
    if (ending.table && threadIdx.x < ending.pairs) angle = ending.table[row * ending.pairs + threadIdx.x];
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) top = fmaxf(top, extremes[place + t].x);
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) {
        const float2 of_team = extremes[place + t];
        factors[t] = of_team.y > 0.0f ? expf(of_team.x - top) : 0.0f;
        total += of_team.y * factors[t];
    }
    total += expf(sinks[head] - top);
    out += row * out_row + head * out_head;
    for (int i = threadIdx.x; i < width; i += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < TEAMS; ++t)
            if (factors[t] > 0.0f) sum = fmaf(parts[(place + t) * width + i], factors[t], sum);
        kept[i] = sum / total;
    }
    __syncthreads();
    if (ending.table) {
        if (threadIdx.x < ending.pairs) {
            float* pair = kept + ending.first + 2 * threadIdx.x;
            turn_pair(pair[0], pair[1], angle);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < width; i += 256) out[i] = kept[i];
    if (!ending.q_stride) return;
    const word from = row * ending.q_stride + head * width;
    for (int first = int(threadIdx.x / 32) * 256; first < width; first += 8 * 256) {
        const float4* source = reinterpret_cast<const float4*>(kept + first + 8 * (threadIdx.x & 31));
        const float4 a = source[0], b = source[1];
        const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        uint8_t* scales = ending.scales + row * ending.q_stride + (head * width + first) / 32 * 8;
        write_q8_k(v, ending.values + from + first, scales);
    }
}
