// Causal attention over an f16 cache by tensor cores; see attention.cu for splits and how they are joined.
#pragma once
#include "q8_k.cuh"

constexpr int SPLIT = 64;
constexpr int HEADS = 8;  // query heads of one key head that a block takes together

struct Cache {
    const void* rows;
    word slot_stride, row_stride;  // in elements
};

// Keys and values are WIDTH wide. A row's splits are cut into runs of consecutive ones, as evenly as they go: how many
// depends on how far the row sees, never on the grid, so a row's result does not depend on what is computed beside it.
// Each warp walks through a quarter of every split by itself (positions by heads for scores, elements by heads for sums),
// relative to the greatest score that it has met; a run's four quarters are joined at its end. Weights are two halves
// each, their rounded value and what is left, so that nothing is lost that a sum in f32 would keep. CORES threads; dynamic
// shared memory: two stages of a split's keys and values, and the quarters' sums.
constexpr int CORES = 128;
constexpr int STEP_ROWS = 8;  // positions that kernels before this one may still be writing

template <int WIDTH>
DEVICE uint8_t* place_of(uint8_t* tile, int row, int chunk) { return tile + row * (2 * WIDTH) + (chunk ^ (row & 7)) * 16; }

constexpr int QUARTER = SPLIT / (CORES / 32);  // positions of a split that a warp takes

// A warp's quarter of a split. `seen` positions of the split are there; the others are zeros.
template <int WIDTH>
DEVICE void fetch_quarter(uint8_t* tile, const __half* rows, word row_stride, int seen) {
    constexpr int ACROSS = WIDTH / 8;
    const int lane = threadIdx.x & 31, first = threadIdx.x / 32 * QUARTER;
#pragma unroll
    for (int i = 0; i < QUARTER * ACROSS / 32; ++i) {
        const int at = lane + i * 32, row = first + at / ACROSS, chunk = at % ACROSS;
        copy_async(place_of<WIDTH>(tile, row, chunk), rows + min(row, seen - 1) * row_stride + 8 * chunk, row < seen);
    }
    commit_copies();
}

// Where a run begins: `splits` of them are cut into `runs`.
DEVICE int run_begin(int run, int splits, int runs) { return int(word(run) * splits / runs); }

DEVICE float round_to_half(float x) { return __half2float(__float2half_rn(x)); }

DEVICE uint32_t as_halves(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    uint32_t bits;
    memcpy(&bits, &both, 4);
    return bits;
}

// What one row's queries, key and value still want, as prepare_heads does it, bit for bit: norms (null: none), rotation,
// the cache. Rows of the caches wrap around after so many.
struct Fresh {
    const float *q_weight, *k_weight;
    double q_epsilon, k_epsilon;
    const float* key;
    word key_head;
    const float* value;
    word value_head;
    const float2* table;
    word pairs, halves, key_rows, value_rows;
};

// Queries of `count` heads and the step's key, from their projections to what the scores take. CORES threads.
template <int WIDTH>
struct Preparation {
    float x[HEADS + 1], q_weight, k_weight;

    DEVICE void load(const Fresh& fresh, const float* q, word q_head, int count, const float* key) {
        const int tid = threadIdx.x;
        const bool inside = tid < WIDTH;
#pragma unroll
        for (int h = 0; h < HEADS; ++h) x[h] = inside && h < count ? q[h * q_head + tid] : 0.0f;
        x[HEADS] = inside ? key[tid] : 0.0f;
        q_weight = fresh.q_weight && inside ? fresh.q_weight[tid] : 0.0f;
        k_weight = fresh.k_weight && inside ? fresh.k_weight[tid] : 0.0f;
    }
    // made[h], the key as made[HEADS].
    DEVICE void finish(const Fresh& fresh, float (*made)[WIDTH + 4]) {
        constexpr int WARPS = CORES / 32;
        __shared__ float squares[HEADS + 1][WARPS], roots[HEADS + 1];
        const int tid = threadIdx.x, lane = tid & 31;
        float square[HEADS + 1];
#pragma unroll
        for (int h = 0; h <= HEADS; ++h) square[h] = fmaf(x[h], x[h], 0.0f);
#pragma unroll
        for (int distance = 16; distance; distance >>= 1)
#pragma unroll
            for (int h = 0; h <= HEADS; ++h) square[h] += __shfl_xor_sync(~0u, square[h], distance);
        if (lane == 0)
#pragma unroll
            for (int h = 0; h <= HEADS; ++h) squares[h][tid / 32] = square[h];
        __syncthreads();
        if (tid <= HEADS) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total += squares[tid][w];
            roots[tid] = 1.0f / sqrtf(total / float(WIDTH) + float(tid < HEADS ? fresh.q_epsilon : fresh.k_epsilon));
        }
        __syncthreads();
        if (tid < WIDTH)
#pragma unroll
            for (int h = 0; h <= HEADS; ++h) {
                const bool normed = h < HEADS ? fresh.q_weight : fresh.k_weight;
                made[h][tid] = normed ? x[h] * roots[h] * (h < HEADS ? q_weight : k_weight) : x[h];
            }
        __syncthreads();
        // a thread has the same pair of every `each`-th head
        const int pairs = int(fresh.pairs), each = CORES / pairs, i = tid % pairs;
        const int first = fresh.halves ? i : 2 * i, second = fresh.halves ? i + pairs : 2 * i + 1;
        if (tid < each * pairs) {
            const float2 turn = fresh.table[i];
#pragma unroll 5
            for (int h = tid / pairs; h <= HEADS; h += each) turn_pair(made[h][first], made[h][second], turn);
        }
        __syncthreads();
    }
};

template <int WIDTH, bool FRESH>
DEVICE void attend_by_cores(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys,
                            Cache values, word heads, word kv_heads, double scale, word most_runs, float* parts,
                            float2* extremes, const Fresh* fresh) {
    DYNAMIC_SHARED(uint8_t, memory);
    constexpr int TILE = SPLIT * WIDTH * 2, WARPS = CORES / 32, ACROSS = WIDTH / 8, TOTALS = WIDTH + 4;
    __shared__ float tops[WARPS][HEADS], sums[WARPS][HEADS];
    float* totals = reinterpret_cast<float*>(memory + 4 * TILE);  // [WARPS][HEADS][TOTALS]
    let_next_begin();
    const int row = blockIdx.z, position = positions[row], lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int splits = position / SPLIT + 1, runs = min(splits, int(most_runs));
    if (int(blockIdx.x) >= runs) return await_previous();
    const int shared_by = int(heads / kv_heads), batches = (shared_by + HEADS - 1) / HEADS;
    const int group = blockIdx.y / batches, first = group * shared_by + blockIdx.y % batches * HEADS;
    const int count = min(HEADS, (group + 1) * shared_by - first);
    const __half* key = static_cast<const __half*>(keys.rows) + slots[row] * keys.slot_stride + group * WIDTH;
    const __half* value = static_cast<const __half*>(values.rows) + slots[row] * values.slot_stride + group * WIDTH;
    auto fetch = [&](int split, int stage) {
        const int start = split * SPLIT, seen = min(SPLIT, position + 1 - start);
        uint8_t* tile = memory + stage * 2 * TILE;
        fetch_quarter<WIDTH>(tile, key + start * keys.row_stride, keys.row_stride, seen);
        fetch_quarter<WIDTH>(tile + TILE, value + start * values.row_stride, values.row_stride, seen);
    };
    int run = blockIdx.x, split = run_begin(run, splits, runs), end = run_begin(run + 1, splits, runs);
    const bool early = (split + 1) * SPLIT + STEP_ROWS <= position + 1;
    if (early) fetch(split, 0);
    await_previous();
    Preparation<WIDTH> preparation;  // asks for its rows before the cache's, which take longer
    if (FRESH) preparation.load(*fresh, q + first * q_head, q_head, count, fresh->key + group * fresh->key_head);
    if (!early) fetch(split, 0);

    const int mine = lane / 4, pair = 2 * (lane & 3);  // row and column of a lane's part of a matrix
    uint32_t queries[WIDTH / 16][2] = {};
    const float* head = q + row * q_row + (first + mine) * q_head + pair;
    // the step's own key and value, as the cache has them; whose block has their run and is the group's first writes them
    const bool adds = FRESH && (runs - 1) % int(gridDim.x) == int(blockIdx.x);
    const int slot = position % SPLIT;  // `chunk` of the row there is what this thread copies of it
    const int chunk = FRESH && slot / QUARTER == warp ? (lane - slot % QUARTER * ACROSS) & 31 : ACROSS;
    uint4 own[2] = {};
    if constexpr (FRESH) {
        __shared__ __align__(16) float made[HEADS + 1][WIDTH + 4];
        const float* fresh_value = fresh->value + group * fresh->value_head;
        const bool has = adds && chunk < ACROSS;
        float4 low = {}, high = {};
        if (has) low = *reinterpret_cast<const float4*>(fresh_value + 8 * chunk);
        if (has) high = *reinterpret_cast<const float4*>(fresh_value + 8 * chunk + 4);
        preparation.finish(*fresh, made);
        head = made[mine] + pair;
        if (has) {
            const float* x = made[HEADS] + 8 * chunk;
            own[0] = make_uint4(as_halves(x[0], x[1]), as_halves(x[2], x[3]), as_halves(x[4], x[5]), as_halves(x[6], x[7]));
            own[1] = make_uint4(as_halves(low.x, low.y), as_halves(low.z, low.w), as_halves(high.x, high.y),
                                as_halves(high.z, high.w));
            if (blockIdx.y % batches == 0) {
                __half* key_row = const_cast<__half*>(key) + position % int(fresh->key_rows) * keys.row_stride;
                __half* value_row = const_cast<__half*>(value) + position % int(fresh->value_rows) * values.row_stride;
                *reinterpret_cast<uint4*>(key_row + 8 * chunk) = own[0];
                *reinterpret_cast<uint4*>(value_row + 8 * chunk) = own[1];
            }
        }
    }
    // Over what was copied of the step's own row: by the thread that copied it, once its copies are there.
    auto put_own = [&](uint8_t* tile, int of, int which) {
        if (FRESH && of == splits - 1 && chunk < ACROSS)
            *reinterpret_cast<uint4*>(place_of<WIDTH>(tile, slot, chunk)) = own[which];
    };
    if (mine < count) {
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k) {
            queries[k][0] = as_halves(head[16 * k], head[16 * k + 1]);
            queries[k][1] = as_halves(head[16 * k + 8], head[16 * k + 9]);
        }
    }

    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, out[WIDTH / 16][4] = {};  // of heads `pair` and the next
    for (int stage = 0; run < runs; stage ^= 1) {
        int next = split + 1, next_run = run, next_end = end;
        if (next == end) {
            next_run = run + int(gridDim.x);
            next = run_begin(next_run, splits, runs), next_end = run_begin(next_run + 1, splits, runs);
        }
        if (next_run < runs)
            fetch(next, stage ^ 1);
        else
            commit_copies(), commit_copies();
        const int seen = min(SPLIT, position + 1 - split * SPLIT);
        uint8_t* tile = memory + stage * 2 * TILE;
        await_copies<3>();
        put_own(tile, split, 0);
        __syncwarp();
        float part[2][4] = {};  // positions `mine` and eight more of the warp's, heads `pair` and the next
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k) {
            uint32_t a[4];
            load_matrices<false>(a, place_of<WIDTH>(tile, QUARTER * warp + (lane & 15), 2 * k + (lane >> 4)));
            multiply_f16(part[k & 1], a, queries[k][0], queries[k][1]);
        }
        uint32_t weights[2][2];  // rounded, left; positions `mine` and eight more
        float score[4], kept[2];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            score[e] = QUARTER * warp + mine + 8 * (e / 2) < seen ? (part[0][e] + part[1][e]) * float(scale) : -INFINITY;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float greatest = fmaxf(score[h], score[h + 2]);
#pragma unroll
            for (int distance = 16; distance > 2; distance >>= 1)
                greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, distance));
            greatest = fmaxf(greatest, top[h]);
            const float relative = greatest == -INFINITY ? 0.0f : greatest;  // a warp may have seen nothing yet
            kept[h] = expf(top[h] - relative), top[h] = greatest;
            score[h] = expf(score[h] - relative), score[h + 2] = expf(score[h + 2] - relative);
            sum[h] = fmaf(sum[h], kept[h], score[h] + score[h + 2]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = score[2 * i], y = score[2 * i + 1];
            weights[0][i] = transpose_matrix(as_halves(x, y));
            weights[1][i] = transpose_matrix(as_halves(x - round_to_half(x), y - round_to_half(y)));
        }
        if (__any_sync(~0u, kept[0] != 1.0f || kept[1] != 1.0f)) {
#pragma unroll
            for (int t = 0; t < WIDTH / 16; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[t][e] *= kept[e & 1];
        }
        await_copies<2>();
        put_own(tile + TILE, split, 1);
        __syncwarp();
#pragma unroll
        for (int t = 0; t < WIDTH / 16; ++t) {
            uint32_t a[4];
            const int position_row = QUARTER * warp + (lane >> 4) * 8 + (lane & 7);
            load_matrices<true>(a, place_of<WIDTH>(tile + TILE, position_row, 2 * t + (lane >> 3 & 1)));
            multiply_f16(out[t], a, weights[0][0], weights[0][1]);
            multiply_f16(out[t], a, weights[1][0], weights[1][1]);
        }
        __syncwarp();  // before the next copies to this stage
        if (next_run != run) {
            // the run's end: quarters relative to the greatest of their scores, summed in order
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int distance = 16; distance > 2; distance >>= 1) sum[h] += __shfl_xor_sync(~0u, sum[h], distance);
                if (mine == 0) tops[warp][pair + h] = top[h], sums[warp][pair + h] = sum[h];
            }
            float* total = totals + warp * HEADS * TOTALS;
#pragma unroll
            for (int t = 0; t < WIDTH / 16; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    total[(pair + (e & 1)) * TOTALS + 16 * t + mine + 8 * (e / 2)] = out[t][e], out[t][e] = 0.0f;
            __syncthreads();
#pragma unroll
            for (int h = 0; h < 2; ++h) top[h] = -INFINITY, sum[h] = 0.0f;
            for (int at = threadIdx.x; at < count * WIDTH; at += CORES) {
                const int h = at / WIDTH, v = at % WIDTH;
                float greatest = -INFINITY, whole = 0.0f, all = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) greatest = fmaxf(greatest, tops[w][h]);
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float share = expf(tops[w][h] - greatest);
                    whole = fmaf(share, totals[(w * HEADS + h) * TOTALS + v], whole);
                    all = fmaf(share, sums[w][h], all);
                }
                const word place = (row * heads + first + h) * most_runs + run;
                parts[place * WIDTH + v] = whole;
                if (v == 0) extremes[place] = make_float2(greatest, all);
            }
            __syncthreads();
        }
        run = next_run, split = next, end = next_end;
    }
    await_copies<0>();
}
