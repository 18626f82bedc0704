// Causal attention over a slot's cache, split over the context.
//
// A split is SPLIT consecutive positions whatever the step; its softmax is relative to its own greatest score, and the
// splits are joined in ascending order. So a row's result depends on its position only, not on the grid.
#include "common.cuh"

constexpr int SPLIT = 64;
constexpr int HEADS = 8;     // query heads of one key head that a block takes together
constexpr int DEPTH = 64;    // key elements staged at a time
constexpr int THREADS = 128;

struct Cache {
    const void* rows;
    word slot_stride, row_stride;  // in elements
};

// Grid (walkers, key heads * head batches, rows). parts: (row, head, split) of value_width floats, extremes likewise {m, l}.
template <class T>
DEVICE void attend(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys,
                   Cache values, word heads, word kv_heads, word key_width, word value_width, double scale, word splits,
                   float* parts, float2* extremes) {
    __shared__ float tile[SPLIT][DEPTH + 1];
    __shared__ float queries[HEADS][DEPTH];
    __shared__ float weights[HEADS][SPLIT];
    const int row = blockIdx.z, position = positions[row], tid = threadIdx.x;
    const int each = int(heads / kv_heads), batches = (each + HEADS - 1) / HEADS;
    const int group = blockIdx.y / batches, first = group * each + blockIdx.y % batches * HEADS;
    const int count = min(HEADS, (group + 1) * each - first);
    const T* key = static_cast<const T*>(keys.rows) + slots[row] * keys.slot_stride + group * key_width;
    const T* value = static_cast<const T*>(values.rows) + slots[row] * values.slot_stride + group * value_width;
    q += row * q_row + first * q_head;
    const int mine = tid % SPLIT, half = tid / SPLIT * (HEADS / 2);

    for (int split = blockIdx.x; split * SPLIT <= position; split += gridDim.x) {
        const int start = split * SPLIT, seen = min(SPLIT, position + 1 - start);
        float score[HEADS / 2] = {};
        for (int from = 0; from < key_width; from += DEPTH) {
            const int depth = min(DEPTH, int(key_width) - from);
            __syncthreads();
            for (int i = tid; i < HEADS * DEPTH; i += THREADS) {
                const int h = i / DEPTH, k = i % DEPTH;
                queries[h][k] = h < count && k < depth ? to_float(from_float<T>(q[h * q_head + from + k])) : 0.0f;
            }
            for (int i = tid; i < SPLIT * DEPTH; i += THREADS) {
                const int p = i / DEPTH, k = i % DEPTH;
                tile[p][k] = p < seen && k < depth ? to_float(key[(start + p) * keys.row_stride + from + k]) : 0.0f;
            }
            __syncthreads();
#pragma unroll 8
            for (int k = 0; k < DEPTH; ++k) {
                const float x = tile[mine][k];
#pragma unroll
                for (int h = 0; h < HEADS / 2; ++h) score[h] = fmaf(queries[half + h][k], x, score[h]);
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS / 2; ++h)
            weights[half + h][mine] = mine < seen ? score[h] * float(scale) : -INFINITY;
        __syncthreads();
        for (int h = tid / 32; h < HEADS; h += THREADS / 32) {
            const int lane = tid & 31;
            const float a = weights[h][lane], b = weights[h][lane + 32];
            float top = fmaxf(a, b);
#pragma unroll
            for (int distance = 16; distance; distance >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
            const float x = expf(a - top), y = expf(b - top);
            weights[h][lane] = x, weights[h][lane + 32] = y;
            float sum = x + y;
#pragma unroll
            for (int distance = 16; distance; distance >>= 1) sum += __shfl_xor_sync(~0u, sum, distance);
            if (lane == 0 && h < count) extremes[(row * heads + first + h) * splits + split] = make_float2(top, sum);
        }
        __syncthreads();
        for (int v = tid; v < value_width; v += THREADS) {
            float sum[HEADS] = {};
#pragma unroll 4
            for (int p = 0; p < seen; ++p) {
                const float x = to_float(value[(start + p) * values.row_stride + v]);
#pragma unroll
                for (int h = 0; h < HEADS; ++h) sum[h] = fmaf(weights[h][p], x, sum[h]);
            }
#pragma unroll
            for (int h = 0; h < HEADS; ++h)
                if (h < count) parts[((row * heads + first + h) * splits + split) * value_width + v] = sum[h];
        }
    }
}

#define ATTEND(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        attend_##NAME(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys,    \
                      Cache values, word heads, word kv_heads, word key_width, word value_width, double scale,        \
                      word splits, float* parts, float2* extremes) {                                                  \
        attend<T>(slots, positions, q, q_row, q_head, keys, values, heads, kv_heads, key_width, value_width, scale,   \
                  splits, parts, extremes);                                                                           \
    }
ATTEND(f32, float)
ATTEND(f16, __half)

// Grid (heads, rows), 128 threads: out = sum of e^(m - M) parts / sum of e^(m - M) l over the splits seen.
extern "C" __global__ void attend_join(const int* positions, const float* parts, const float2* extremes, word heads,
                                       word value_width, word splits, float* out, word out_row, word out_head) {
    const int row = blockIdx.y, head = blockIdx.x, count = positions[row] / SPLIT + 1;
    extremes += (row * heads + head) * splits, parts += (row * heads + head) * splits * value_width;
    float top = -INFINITY, sum = 0.0f;
    for (int s = 0; s < count; ++s) top = fmaxf(top, extremes[s].x);
    for (int s = 0; s < count; ++s) sum = fmaf(expf(extremes[s].x - top), extremes[s].y, sum);
    for (int v = threadIdx.x; v < value_width; v += blockDim.x) {
        float total = 0.0f;
        for (int s = 0; s < count; ++s) total = fmaf(expf(extremes[s].x - top), parts[s * value_width + v], total);
        out[row * out_row + head * out_head + v] = total / sum;
    }
}
