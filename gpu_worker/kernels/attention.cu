// Causal attention over a slot's cache, split over the context.
//
// A split is SPLIT consecutive positions whatever the step; its softmax is relative to its own greatest score, and the
// splits are joined in a fixed order. So a row's result depends on its position only, not on the grid. Kernels for tensor
// cores have runs of splits for splits, as many as `most_runs` at most.
#include "cores.cuh"

constexpr int DEPTH = 64;    // elements of keys or values staged at a time
constexpr int STRIDE = DEPTH + 4;
constexpr int THREADS = 256;
constexpr int EACH = HEADS * SPLIT / THREADS;  // heads that a thread takes at one position or element
constexpr int RESIDENT = 512 / THREADS;  // blocks that a multiprocessor must have room for

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

#define CORES_KERNEL(WIDTH)                                                                                            \
    extern "C" __global__ void __launch_bounds__(CORES)                                                                \
        attend_cores_##WIDTH(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys, \
                             Cache values, word heads, word kv_heads, double scale, word most_runs, float* parts,         \
                             float2* extremes) {                                                                       \
        attend_by_cores<WIDTH, false>(slots, positions, q, q_row, q_head, keys, values, heads, kv_heads, scale, most_runs, \
                                      parts, extremes, nullptr);                                                       \
    }
CORES_KERNEL(64)
CORES_KERNEL(128)

#define FRESH_KERNEL(WIDTH)                                                                                            \
    extern "C" __global__ void __launch_bounds__(CORES)                                                                \
        attend_fresh_##WIDTH(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys, \
                             Cache values, word heads, word kv_heads, double scale, word most_runs, float* parts,         \
                             float2* extremes, Fresh fresh) {                                                          \
        attend_by_cores<WIDTH, true>(slots, positions, q, q_row, q_head, keys, values, heads, kv_heads, scale, most_runs, \
                                     parts, extremes, &fresh);                                                         \
    }
FRESH_KERNEL(64)
FRESH_KERNEL(128)

// out = sum of e^(m - M) parts / sum of e^(m - M) l over the splits seen. A team of 128 members takes every eighth split,
// teams are summed in their order.
constexpr int TEAMS = 8;
constexpr int JOINERS = 128 * TEAMS;
constexpr int AT_ONCE = 512;  // elements

// Joins a head into `out`. All JOINERS threads of the block call it.
DEVICE void join(const float* parts, const float2* extremes, int count, int width, float* out) {
    constexpr int SOME = AT_ONCE / 128;
    __shared__ float tops[JOINERS / 32];
    __shared__ float sums[TEAMS];
    __shared__ float totals[TEAMS][AT_ONCE];
    const int tid = threadIdx.x, team = tid / 128, member = tid % 128;
    float top = -INFINITY;
    for (int s = tid; s < count; s += JOINERS) top = fmaxf(top, extremes[s].x);
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    if ((tid & 31) == 0) tops[tid / 32] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < JOINERS / 32; ++i) top = fmaxf(top, tops[i]);
    for (int from = 0; from < width; from += AT_ONCE) {
        __syncthreads();
        float total[SOME] = {}, sum = 0.0f;
#pragma unroll 4
        for (int s = team; s < count; s += TEAMS) {
            const float2 extreme = extremes[s];
            const float weight = expf(extreme.x - top);
            sum = fmaf(weight, extreme.y, sum);
#pragma unroll
            for (int e = 0; e < SOME; ++e) {
                const int v = from + e * 128 + member;
                if (v < width) total[e] = fmaf(weight, parts[s * width + v], total[e]);
            }
        }
        if (member == 0) sums[team] = sum;
#pragma unroll
        for (int e = 0; e < SOME; ++e) totals[team][e * 128 + member] = total[e];
        __syncthreads();
        for (int i = tid; i < AT_ONCE && from + i < width; i += JOINERS) {
            float whole = 0.0f, weights = 0.0f;
#pragma unroll
            for (int t = 0; t < TEAMS; ++t) whole += totals[t][i], weights += sums[t];
            out[from + i] = whole / weights;
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
    join(parts + at * value_width, extremes + at, min(positions[row] / SPLIT + 1, int(splits)), int(value_width),
         out + row * out_row + head * out_head);
}

// The same for values of 128 elements, and two heads' results as a block of Q8_K. Grid (heads / 2, rows). The sums are those
// of `join`, whose teams are here four of a head that stand for two each; what the first splits need is asked for at once.
extern "C" __global__ void __launch_bounds__(JOINERS)
    attend_join_q8_k(const int* positions, const float* parts, const float2* extremes, word heads, word splits, float* out,
                     word out_row, word out_head, uint8_t* values, uint8_t* scales, word stride) {
    constexpr int REAL = TEAMS / 2, EACH = 3;
    __shared__ float tops[2][REAL], sums[2][TEAMS], totals[2][TEAMS][128];
    __shared__ __align__(16) float both[256];
    let_next_begin();
    const int row = blockIdx.y, which = threadIdx.x / (JOINERS / 2), head = 2 * blockIdx.x + which;
    const int team = threadIdx.x / 128 % REAL, member = threadIdx.x % 128;
    const int count = min(positions[row] / SPLIT + 1, int(splits));
    parts += (row * heads + head) * splits * 128 + member, extremes += (row * heads + head) * splits;
    await_previous();
    float2 extreme[2][EACH];
    float part[2][EACH], top = -INFINITY;
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int s = team + t * REAL + k * TEAMS;
            if (s < count) extreme[t][k] = extremes[s], part[t][k] = parts[s * 128];
        }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            if (team + t * REAL + k * TEAMS < count) top = fmaxf(top, extreme[t][k].x);
    }
    for (int s = team + EACH * TEAMS; s < count; s += REAL) top = fmaxf(top, extremes[s].x);
    if (member == 0) tops[which][team] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < REAL; ++i) top = fmaxf(top, tops[which][i]);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        const int mine = team + t * REAL;
        float total = 0.0f, sum = 0.0f;
        auto add = [&](float2 of, float value) {
            const float weight = expf(of.x - top);
            sum = fmaf(weight, of.y, sum), total = fmaf(weight, value, total);
        };
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            if (mine + k * TEAMS < count) add(extreme[t][k], part[t][k]);
#pragma unroll 4
        for (int s = mine + EACH * TEAMS; s < count; s += TEAMS) add(extremes[s], parts[s * 128]);
        if (member == 0) sums[which][mine] = sum;
        totals[which][mine][member] = total;
    }
    __syncthreads();
    if (team == 0) {
        float whole = 0.0f, weights = 0.0f;
#pragma unroll
        for (int t = 0; t < TEAMS; ++t) whole += totals[which][t][member], weights += sums[which][t];
        out[row * out_row + head * out_head + member] = both[128 * which + member] = whole / weights;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float4* source = reinterpret_cast<const float4*>(both + 8 * threadIdx.x);
    const float4 a = source[0], b = source[1];
    const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    write_q8_k(v, values + row * stride + 256 * blockIdx.x, scales + row * stride + 64 * blockIdx.x);
}
