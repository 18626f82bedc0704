// Causal attention of a prompt's rows, which are neighbours of one slot, over an f16 cache: tensor cores, 128 rows of one
// head a block, 64 positions at a time, the softmax carried along. Sums are f32; queries and weights are rounded to f16.
#include "halves.cuh"

constexpr int ROWS = 128;
constexpr int SPLIT = 64;

struct Cache {
    const void* rows;
    word slot_stride, row_stride;  // in elements
};

// SPLIT rows of WIDTH elements on their way to shared memory; rows from `seen` on are zeros.
template <int WIDTH>
DEVICE void fetch_rows(uint8_t* to, const __half* rows, word row_stride, int seen) {
    constexpr int ACROSS = WIDTH / 8;
#pragma unroll
    for (int i = 0; i < SPLIT * ACROSS / 256; ++i) {
        const int at = threadIdx.x + 256 * i, row = at / ACROSS, chunk = at % ACROSS;
        copy_async(to + half_place<WIDTH>(row, chunk), rows + min(row, seen - 1) * row_stride + 8 * chunk, row < seen);
    }
}

// Grid (tiles of rows, heads), 256 threads; dynamic shared memory 2 * SPLIT * (KEY + VALUE) * 2 bytes. Widths are
// multiples of 64. Rows' positions follow positions[0].
template <int KEY, int VALUE>
DEVICE void flash(const int* slots, const int* positions, const float* q, word q_row, word q_head, const Cache& keys,
                  const Cache& values, word each, double scale, word rows, float* out, word out_row, word out_head) {
    DYNAMIC_SHARED(uint8_t, memory);
    constexpr int STAGE = SPLIT * (KEY + VALUE) * 2;
    begin();
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int first = (gridDim.x - 1 - blockIdx.x) * ROWS;  // the longest first
    const int head = blockIdx.y, group = head / int(each);
    const int start = positions[0], last = start + min(first + ROWS, int(rows)) - 1;
    const __half* key = static_cast<const __half*>(keys.rows) + slots[0] * keys.slot_stride + group * KEY;
    const __half* value = static_cast<const __half*>(values.rows) + slots[0] * values.slot_stride + group * VALUE;
    auto fetch = [&](int split) {
        uint8_t* stage = memory + (split & 1) * STAGE;
        const int from = split * SPLIT, seen = min(SPLIT, last + 1 - from);
        fetch_rows<KEY>(stage, key + from * keys.row_stride, keys.row_stride, seen);
        fetch_rows<VALUE>(stage + SPLIT * KEY * 2, value + from * values.row_stride, values.row_stride, seen);
        commit_copies();
    };
    fetch(0);

    const int mine = first + 16 * warp + lane / 4;  // and the row eight below
    uint32_t queries[KEY / 16][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float* row = q + min(mine + 8 * h, int(rows) - 1) * q_row + head * q_head + 2 * (lane & 3);
#pragma unroll
        for (int k = 0; k < KEY / 16; ++k) {
            queries[k][h] = two_halves(row[16 * k], row[16 * k + 1]);
            queries[k][h + 2] = two_halves(row[16 * k + 8], row[16 * k + 9]);
        }
    }
    float sums[VALUE / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    const float by = float(scale) * 1.4426950408889634f;

    const int splits = last / SPLIT + 1;
    for (int split = 0; split < splits; ++split) {
        await_copies<0>();
        __syncthreads();
        if (split + 1 < splits) fetch(split + 1);
        const uint8_t* stage = memory + (split & 1) * STAGE;
        float scores[SPLIT / 8][4] = {};
#pragma unroll
        for (int k = 0; k < KEY / 16; ++k)
#pragma unroll
            for (int n = 0; n < SPLIT / 16; ++n) {
                uint32_t b[4];
                load_matrices<false>(b, stage + half_place<KEY>(16 * n + (lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)));
                multiply_f16(scores[2 * n], queries[k], b[0], b[1]);
                multiply_f16(scores[2 * n + 1], queries[k], b[2], b[3]);
            }
        const bool edge = (split + 1) * SPLIT > start + first + 1;
        float above[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < SPLIT / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int position = split * SPLIT + 8 * n + 2 * (lane & 3) + (e & 1), row = mine + 8 * (e / 2);
                const bool seen = !edge || position <= start + row;
                scores[n][e] = seen ? scores[n][e] * by : -INFINITY;
                above[e / 2] = fmaxf(above[e / 2], scores[n][e]);
            }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 1));
            above[h] = fmaxf(above[h], __shfl_xor_sync(~0u, above[h], 2));
            const float less = exp2f(top[h] - above[h]);
            top[h] = above[h], total[h] *= less;
#pragma unroll
            for (int n = 0; n < VALUE / 8; ++n) sums[n][2 * h] *= less, sums[n][2 * h + 1] *= less;
        }
#pragma unroll
        for (int n = 0; n < SPLIT / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                scores[n][e] = exp2f(scores[n][e] - top[e / 2]);
                total[e / 2] += scores[n][e];
            }
        const uint8_t* from = stage + SPLIT * KEY * 2;
#pragma unroll
        for (int k = 0; k < SPLIT / 16; ++k) {
            const uint32_t a[4] = {two_halves(scores[2 * k][0], scores[2 * k][1]), two_halves(scores[2 * k][2], scores[2 * k][3]),
                                   two_halves(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                                   two_halves(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
            for (int n = 0; n < VALUE / 16; ++n) {
                uint32_t b[4];
                load_matrices<true>(b, from + half_place<VALUE>(16 * k + (lane & 15), 2 * n + (lane >> 4)));
                multiply_f16(sums[2 * n], a, b[0], b[1]);
                multiply_f16(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        const int row = mine + 8 * h;
        if (row >= rows) continue;
        float* to = out + row * out_row + head * out_head + 2 * (lane & 3);
        const float inverse = 1.0f / total[h];
#pragma unroll
        for (int n = 0; n < VALUE / 8; ++n) to[8 * n] = sums[n][2 * h] * inverse, to[8 * n + 1] = sums[n][2 * h + 1] * inverse;
    }
}

#define FLASH(KEY, VALUE)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                               \
        flash_##KEY##_##VALUE(const int* slots, const int* positions, const float* q, word q_row, word q_head, Cache keys,  \
                              Cache values, word each, double scale, word rows, float* out, word out_row, word out_head) { \
        flash<KEY, VALUE>(slots, positions, q, q_row, q_head, keys, values, each, scale, rows, out, out_row, out_head); \
    }
FLASH(64, 64)
FLASH(128, 128)
FLASH(192, 128)
