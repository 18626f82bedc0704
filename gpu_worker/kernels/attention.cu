// Causal attention over a slot's cache, split over the context.
//
// A split is SPLIT consecutive positions whatever the step; its softmax is relative to its own greatest score, and the
// splits are joined in a fixed order. So a row's result depends on its position only, not on the grid.
#include "q8_k.cuh"

constexpr int SPLIT = 64;
constexpr int HEADS = 8;     // query heads of one key head that a block takes together
constexpr int DEPTH = 64;    // elements of keys or values staged at a time
constexpr int STRIDE = DEPTH + 4;
constexpr int THREADS = 256;
constexpr int EACH = HEADS * SPLIT / THREADS;  // heads that a thread takes at one position or element
constexpr int RESIDENT = 512 / THREADS;  // blocks that a multiprocessor must have room for

struct Cache {
    const void* rows;
    word slot_stride, row_stride;  // in elements
};

// A part of SPLIT rows by DEPTH elements on its way from the cache to shared memory, 16 bytes at a time.
template <class T, bool EVEN>
struct Part {
    static constexpr int N = 16 / sizeof(T), ACROSS = DEPTH / N, COUNT = SPLIT * ACROSS / THREADS;
    union {
        uint4 raw;
        T element[N];
    } piece[COUNT];

    // Rows from `seen` on and elements from `width` on are 0. EVEN: all widths and strides are multiples of 8.
    DEVICE void load(const T* rows, word row_stride, int seen, int from, int width) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int at = threadIdx.x + i * THREADS, row = at / ACROSS, k = from + at % ACROSS * N;
            piece[i].raw = make_uint4(0, 0, 0, 0);
            if (row >= seen) continue;
            const T* source = rows + row * row_stride + k;
            if constexpr (EVEN) {
                if (k < width) piece[i].raw = *reinterpret_cast<const uint4*>(source);
            } else {
                for (int n = 0; n < N; ++n)
                    if (k + n < width) piece[i].element[n] = source[n];
            }
        }
    }
    DEVICE void store(float (*tile)[STRIDE]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int at = threadIdx.x + i * THREADS;
            float* to = &tile[at / ACROSS][at % ACROSS * N];
#pragma unroll
            for (int n = 0; n < N; n += 4)
                *reinterpret_cast<float4*>(to + n) =
                    make_float4(to_float(piece[i].element[n]), to_float(piece[i].element[n + 1]),
                                to_float(piece[i].element[n + 2]), to_float(piece[i].element[n + 3]));
        }
    }
};

DEVICE float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Grid (walkers, key heads * head batches, rows); dynamic shared memory HEADS * key_width (up to whole DEPTHs) floats.
// parts: (row, head, split) of value_width floats; extremes likewise: greatest score and sum of weights.
template <class T, bool EVEN>
DEVICE void attend(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys,
                   Cache values, word heads, word kv_heads, word key_width, word value_width, double scale, word splits,
                   float* parts, float2* extremes) {
    DYNAMIC_SHARED(float, queries);
    __shared__ __align__(16) float tile[SPLIT][STRIDE];
    __shared__ __align__(16) float weights[HEADS][SPLIT];
    begin();
    const int row = blockIdx.z, position = positions[row], tid = threadIdx.x;
    if (blockIdx.x * SPLIT > position) return;
    const int shared_by = int(heads / kv_heads), batches = (shared_by + HEADS - 1) / HEADS;
    const int group = blockIdx.y / batches, first = group * shared_by + blockIdx.y % batches * HEADS;
    const int count = min(HEADS, (group + 1) * shared_by - first);
    const T* key = static_cast<const T*>(keys.rows) + slots[row] * keys.slot_stride + group * key_width;
    const T* value = static_cast<const T*>(values.rows) + slots[row] * values.slot_stride + group * value_width;
    q += row * q_row + first * q_head;
    const int key_parts = int(key_width + DEPTH - 1) / DEPTH, value_parts = int(value_width + DEPTH - 1) / DEPTH;
    const int padded = key_parts * DEPTH;
    const int mine = tid % SPLIT, half = tid / SPLIT * EACH;

    Part<T, EVEN> part;
    auto fetch = [&](int split, int index) {
        const int start = split * SPLIT, seen = min(SPLIT, position + 1 - start);
        if (index < key_parts)
            part.load(key + start * keys.row_stride, keys.row_stride, seen, index * DEPTH, int(key_width));
        else
            part.load(value + start * values.row_stride, values.row_stride, seen, (index - key_parts) * DEPTH,
                      int(value_width));
    };
    fetch(blockIdx.x, 0);
    for (int i = tid; i < HEADS * padded; i += THREADS) {
        const int h = i / padded, k = i % padded;
        queries[i] = h < count && k < key_width ? to_float(from_float<T>(q[h * q_head + k])) : 0.0f;
    }

    for (int split = blockIdx.x; split * SPLIT <= position; split += gridDim.x) {
        const int seen = min(SPLIT, position + 1 - split * SPLIT);
        float score[EACH] = {};
        for (int index = 0; index < key_parts + value_parts; ++index) {
            __syncthreads();
            part.store(tile);
            if (index + 1 < key_parts + value_parts)
                fetch(split, index + 1);
            else if ((split + int(gridDim.x)) * SPLIT <= position)
                fetch(split + gridDim.x, 0);
            __syncthreads();
            if (index < key_parts) {
                const float* queried = queries + half * padded + index * DEPTH;
#pragma unroll 4
                for (int k = 0; k < DEPTH; k += 4) {
                    const float4 x = *reinterpret_cast<const float4*>(&tile[mine][k]);
#pragma unroll
                    for (int h = 0; h < EACH; ++h)
                        score[h] = dot4(x, *reinterpret_cast<const float4*>(queried + h * padded + k), score[h]);
                }
                if (index + 1 < key_parts) continue;
#pragma unroll
                for (int h = 0; h < EACH; ++h)
                    weights[half + h][mine] = mine < seen ? score[h] * float(scale) : -INFINITY;
                __syncthreads();
                for (int h = tid / 32; h < HEADS; h += THREADS / 32) {
                    const int lane = tid & 31;
                    const float a = weights[h][lane], b = weights[h][lane + 32];
                    float top = fmaxf(a, b);
#pragma unroll
                    for (int distance = 16; distance; distance >>= 1)
                        top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
                    const float x = expf(a - top), y = expf(b - top);
                    weights[h][lane] = x, weights[h][lane + 32] = y;
                    float sum = x + y;
#pragma unroll
                    for (int distance = 16; distance; distance >>= 1) sum += __shfl_xor_sync(~0u, sum, distance);
                    if (lane == 0 && h < count)
                        extremes[(row * heads + first + h) * splits + split] = make_float2(top, sum);
                }
            } else {  // the weights of positions beyond `seen` are 0
                float sum[EACH] = {};
#pragma unroll 4
                for (int p = 0; p < SPLIT; p += 4) {
                    const float4 x = make_float4(tile[p][mine], tile[p + 1][mine], tile[p + 2][mine], tile[p + 3][mine]);
#pragma unroll
                    for (int h = 0; h < EACH; ++h)
                        sum[h] = dot4(x, *reinterpret_cast<const float4*>(&weights[half + h][p]), sum[h]);
                }
                const int v = (index - key_parts) * DEPTH + mine;
#pragma unroll
                for (int h = 0; h < EACH; ++h)
                    if (half + h < count && v < value_width)
                        parts[((row * heads + first + half + h) * splits + split) * value_width + v] = sum[h];
            }
        }
    }
}

#define ATTEND(NAME, T, EVEN)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)                                                    \
        attend_##NAME(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys,     \
                      Cache values, word heads, word kv_heads, word key_width, word value_width, double scale,         \
                      word splits, float* parts, float2* extremes) {                                                   \
        attend<T, EVEN>(slots, positions, q, q_row, q_head, keys, values, heads, kv_heads, key_width, value_width,     \
                        scale, splits, parts, extremes);                                                               \
    }
ATTEND(f32, float, true)
ATTEND(f16, __half, true)
ATTEND(f32_odd, float, false)
ATTEND(f16_odd, __half, false)

// The same over an f16 cache whose keys and values are WIDTH wide, by tensor cores: positions by heads for scores, elements
// by heads for sums. Weights are two halves each, their rounded value and what is left, so that nothing is lost that a
// sum in f32 would keep. CORES threads; dynamic shared memory: two stages of a split's keys and values.
constexpr int CORES = 128;
constexpr int STEP_ROWS = 8;  // positions that kernels before this one may still be writing

template <int WIDTH>
DEVICE uint8_t* place_of(uint8_t* tile, int row, int chunk) { return tile + row * (2 * WIDTH) + (chunk ^ (row & 7)) * 16; }

template <int WIDTH>
DEVICE void fetch_split(uint8_t* tile, const __half* rows, word row_stride, int seen) {
    constexpr int ACROSS = WIDTH / 8;
#pragma unroll
    for (int i = 0; i < SPLIT * ACROSS / CORES; ++i) {
        const int at = threadIdx.x + i * CORES, row = at / ACROSS, chunk = at % ACROSS;
        copy_async(place_of<WIDTH>(tile, row, chunk), rows + min(row, seen - 1) * row_stride + 8 * chunk, row < seen);
    }
    commit_copies();
}

DEVICE uint32_t as_halves(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    uint32_t bits;
    memcpy(&bits, &both, 4);
    return bits;
}

template <int WIDTH>
DEVICE void attend_by_cores(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys,
                            Cache values, word heads, word kv_heads, double scale, word splits, float* parts,
                            float2* extremes) {
    DYNAMIC_SHARED(uint8_t, memory);
    constexpr int TILE = SPLIT * WIDTH * 2, PARTS = CORES / 32, ELEMENTS = WIDTH / PARTS;
    __shared__ float tops[PARTS][HEADS], sums[PARTS][HEADS];
    __shared__ __align__(16) __half high[HEADS][SPLIT + 8], low[HEADS][SPLIT + 8];
    let_next_begin();
    const int row = blockIdx.z, position = positions[row], lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    if (blockIdx.x * SPLIT > position) return await_previous();
    const int shared_by = int(heads / kv_heads), batches = (shared_by + HEADS - 1) / HEADS;
    const int group = blockIdx.y / batches, first = group * shared_by + blockIdx.y % batches * HEADS;
    const int count = min(HEADS, (group + 1) * shared_by - first);
    const __half* key = static_cast<const __half*>(keys.rows) + slots[row] * keys.slot_stride + group * WIDTH;
    const __half* value = static_cast<const __half*>(values.rows) + slots[row] * values.slot_stride + group * WIDTH;
    auto fetch = [&](int split, int stage) {
        const int start = split * SPLIT, seen = min(SPLIT, position + 1 - start);
        uint8_t* tile = memory + stage * 2 * TILE;
        fetch_split<WIDTH>(tile, key + start * keys.row_stride, keys.row_stride, seen);
        fetch_split<WIDTH>(tile + TILE, value + start * values.row_stride, values.row_stride, seen);
    };
    const bool early = (int(blockIdx.x) + 1) * SPLIT + STEP_ROWS <= position + 1;
    if (early) fetch(blockIdx.x, 0);
    await_previous();
    if (!early) fetch(blockIdx.x, 0);

    const int mine = lane / 4, pair = 2 * (lane & 3);  // row and column of a lane's part of a matrix
    uint32_t queries[WIDTH / 16][2] = {};
    if (mine < count) {
        const float* head = q + row * q_row + (first + mine) * q_head + pair;
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k) {
            queries[k][0] = as_halves(head[16 * k], head[16 * k + 1]);
            queries[k][1] = as_halves(head[16 * k + 8], head[16 * k + 9]);
        }
    }

    int stage = 0;
    for (int split = blockIdx.x; split * SPLIT <= position; split += gridDim.x, stage ^= 1) {
        const int seen = min(SPLIT, position + 1 - split * SPLIT), next = split + int(gridDim.x);
        if (next * SPLIT <= position)
            fetch(next, stage ^ 1);
        else
            commit_copies(), commit_copies();
        uint8_t* tile = memory + stage * 2 * TILE;
        await_copies<3>();
        __syncthreads();
        float score[4] = {};  // positions `mine` and eight more of the warp's 16, heads `pair` and the next
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k) {
            uint32_t a[4];
            load_matrices<false>(a, place_of<WIDTH>(tile, 16 * warp + (lane & 15), 2 * k + (lane >> 4)));
            multiply_f16(score, a, queries[k][0], queries[k][1]);
        }
        float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            score[e] = 16 * warp + mine + 8 * (e / 2) < seen ? score[e] * float(scale) : -INFINITY;
            top[e & 1] = fmaxf(top[e & 1], score[e]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int distance = 16; distance > 2; distance >>= 1)
                top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], distance));
            if (mine == 0) tops[warp][pair + h] = top[h];
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int w = 0; w < PARTS; ++w) top[h] = fmaxf(top[h], tops[w][pair + h]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float weight = expf(score[e] - top[e & 1]);
            const __half rounded = __float2half_rn(weight);
            const int at = 16 * warp + mine + 8 * (e / 2);
            high[pair + (e & 1)][at] = rounded;
            low[pair + (e & 1)][at] = __float2half_rn(weight - __half2float(rounded));
            sum[e & 1] += weight;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int distance = 16; distance > 2; distance >>= 1) sum[h] += __shfl_xor_sync(~0u, sum[h], distance);
            if (mine == 0) sums[warp][pair + h] = sum[h];
        }
        await_copies<2>();
        __syncthreads();
        if (threadIdx.x < count) {
            const int h = threadIdx.x;
            float whole = 0.0f, greatest = -INFINITY;
#pragma unroll
            for (int w = 0; w < PARTS; ++w) whole += sums[w][h], greatest = fmaxf(greatest, tops[w][h]);
            extremes[(row * heads + first + h) * splits + split] = make_float2(greatest, whole);
        }
#pragma unroll
        for (int t = 0; t < ELEMENTS / 16; ++t) {
            const int element = warp * ELEMENTS + 16 * t;
            float out[4] = {};
#pragma unroll
            for (int k = 0; k < SPLIT; k += 16) {
                uint32_t a[4], b[2][2];
                load_matrices<true>(a, place_of<WIDTH>(tile + TILE, k + (lane >> 4) * 8 + (lane & 7),
                                                       element / 8 + (lane >> 3 & 1)));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    memcpy(&b[0][i], &high[mine][k + 8 * i + pair], 4);
                    memcpy(&b[1][i], &low[mine][k + 8 * i + pair], 4);
                }
                multiply_f16(out, a, b[0][0], b[0][1]);
                multiply_f16(out, a, b[1][0], b[1][1]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int h = pair + (e & 1), at = element + mine + 8 * (e / 2);
                if (h < count) parts[((row * heads + first + h) * splits + split) * WIDTH + at] = out[e];
            }
        }
        __syncthreads();
    }
    await_copies<0>();
}

#define CORES_KERNEL(WIDTH)                                                                                            \
    extern "C" __global__ void __launch_bounds__(CORES)                                                                \
        attend_cores_##WIDTH(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys, \
                             Cache values, word heads, word kv_heads, double scale, word splits, float* parts,         \
                             float2* extremes) {                                                                       \
        attend_by_cores<WIDTH>(slots, positions, q, q_row, q_head, keys, values, heads, kv_heads, scale, splits, parts, \
                               extremes);                                                                              \
    }
CORES_KERNEL(64)
CORES_KERNEL(128)

// out = sum of e^(m - M) parts / sum of e^(m - M) l over the splits seen. A team of 128 members takes every eighth split,
// teams are summed in their order. JOINERS threads take TOGETHER heads; thread and head make out which.
constexpr int TEAMS = 8;
constexpr int JOINERS = 128 * TEAMS;
constexpr int AT_ONCE = 512;  // elements of a head

// Joins the head `which` of TOGETHER into shared or global memory at `out`. All threads of the block call it.
template <int TOGETHER>
DEVICE void join(int which, const float* parts, const float2* extremes, int count, int width, float* out, float* copy) {
    constexpr int MINE = TEAMS / TOGETHER, MEMBERS = 128 * MINE, SOME = AT_ONCE / 128 / TOGETHER;
    __shared__ float tops[JOINERS / 32];
    __shared__ float sums[TOGETHER][TEAMS];
    __shared__ float totals[TEAMS * TOGETHER][AT_ONCE / TOGETHER];
    const int tid = threadIdx.x % MEMBERS, team = tid / 128, member = tid % 128;
    float top = -INFINITY;
    for (int s = tid; s < count; s += MEMBERS) top = fmaxf(top, extremes[s].x);
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    if ((tid & 31) == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MEMBERS / 32; ++i) top = fmaxf(top, tops[which * (MEMBERS / 32) + i]);
    for (int from = 0; from < width; from += AT_ONCE / TOGETHER) {
        __syncthreads();
#pragma unroll
        for (int t = 0; t < TOGETHER; ++t) {  // a real team stands for TOGETHER of them
            const int mine = team + t * MINE;
            float total[SOME] = {}, sum = 0.0f;
#pragma unroll 4
            for (int s = mine; s < count; s += TEAMS) {
                const float2 extreme = extremes[s];
                const float weight = expf(extreme.x - top);
                sum = fmaf(weight, extreme.y, sum);
#pragma unroll
                for (int e = 0; e < SOME; ++e) {
                    const int v = from + e * 128 + member;
                    if (v < width) total[e] = fmaf(weight, parts[s * width + v], total[e]);
                }
            }
            if (member == 0) sums[which][mine] = sum;
#pragma unroll
            for (int e = 0; e < SOME; ++e) totals[which * TEAMS + mine][e * 128 + member] = total[e];
        }
        __syncthreads();
        for (int i = tid; i < AT_ONCE / TOGETHER && from + i < width; i += MEMBERS) {
            float whole = 0.0f, weights = 0.0f;
#pragma unroll
            for (int t = 0; t < TEAMS; ++t) whole += totals[which * TEAMS + t][i], weights += sums[which][t];
            out[from + i] = whole / weights;
            if (copy) copy[from + i] = whole / weights;
        }
    }
}

// Grid (heads, rows), JOINERS threads.
extern "C" __global__ void __launch_bounds__(JOINERS)
    attend_join(const int* positions, const float* parts, const float2* extremes, word heads, word value_width,
                word splits, float* out, word out_row, word out_head) {
    begin();
    const int row = blockIdx.y, head = blockIdx.x;
    const word at = (row * heads + head) * splits;
    join<1>(0, parts + at * value_width, extremes + at, positions[row] / SPLIT + 1, int(value_width),
            out + row * out_row + head * out_head, nullptr);
}

// The same for values of 128 elements, and two heads' results as a block of Q8_K. Grid (heads / 2, rows).
extern "C" __global__ void __launch_bounds__(JOINERS)
    attend_join_q8_k(const int* positions, const float* parts, const float2* extremes, word heads, word splits, float* out,
                     word out_row, word out_head, uint8_t* values, uint8_t* scales, word stride) {
    begin();
    __shared__ __align__(16) float both[256];
    const int row = blockIdx.y, which = threadIdx.x / (JOINERS / 2), head = 2 * blockIdx.x + which;
    const word at = (row * heads + head) * splits;
    join<2>(which, parts + at * 128, extremes + at, positions[row] / SPLIT + 1, 128,
            out + row * out_row + head * out_head, both + 128 * which);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float4* source = reinterpret_cast<const float4*>(both + 8 * threadIdx.x);
    const float4 a = source[0], b = source[1];
    const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    write_q8_k(v, values + row * stride + 256 * blockIdx.x, scales + row * stride + 64 * blockIdx.x);
}
