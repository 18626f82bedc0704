// The lightning indexer: scores of group rows for a row of the step, and the list of those that it attends to.
#include "common.cuh"

constexpr int KEYS = 64;   // group rows of a block of index_scores
constexpr int HEADS = 16;  // heads whose queries are in shared memory at a time

// Grid (walkers, rows), 256 threads; dynamic shared memory 4 * (KEYS * (padded + 4) + HEADS * padded) bytes, `padded` being
// the width up to a multiple of 4. scores[row][i] = sum over heads of weight * scale * max(0, query . key i): a fourth of
// each 16 heads in one chain, then the four chains.
template <class T>
DEVICE void index_scores(const int* slots, const int* positions, const float* q, word q_row, word q_head,
                         const float* weights, word weights_row, const void* keys, word slot_stride, word row_stride,
                         word heads, word width, word ratio, double scale, float* scores, word scores_row) {
    DYNAMIC_SHARED(float, tile);
    __shared__ float sums[4][KEYS];
    begin();
    const int row = blockIdx.y, visible = int((positions[row] + 1) / ratio), w = int(width), padded = (w + 3) / 4 * 4;
    const int stride = padded + 4, mine = threadIdx.x % KEYS, part = threadIdx.x / KEYS;
    float* queries = tile + KEYS * stride;
    const T* held = static_cast<const T*>(keys) + slots[row] * slot_stride;
    q += row * q_row, weights += row * weights_row;
    for (int first = blockIdx.x * KEYS; first < visible; first += gridDim.x * KEYS) {
        __syncthreads();
        for (int i = threadIdx.x; i < KEYS * padded; i += 256) {
            const int key = i / padded, k = i % padded;
            tile[key * stride + k] = first + key < visible && k < w ? to_float(held[(first + key) * row_stride + k]) : 0.0f;
        }
        float total = 0.0f;
        for (int head = 0; head < heads; head += HEADS) {
            __syncthreads();
            for (int i = threadIdx.x; i < HEADS * padded; i += 256) {
                const int h = head + i / padded, k = i % padded;
                queries[i] = h < heads && k < w ? q[h * q_head + k] : 0.0f;
            }
            __syncthreads();
            float dots[4] = {};
            for (int k = 0; k < padded; k += 4) {
                const float4 x = *reinterpret_cast<const float4*>(tile + mine * stride + k);
#pragma unroll
                for (int h = 0; h < 4; ++h) {
                    const float4 y = *reinterpret_cast<const float4*>(queries + (4 * part + h) * padded + k);
                    dots[h] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, dots[h]))));
                }
            }
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                const int at = head + 4 * part + h;
                if (at < heads) total = fmaf(weights[at] * float(scale), dots[h] < 0.0f ? 0.0f : dots[h], total);
            }
        }
        sums[part][mine] = total;
        __syncthreads();
        if (threadIdx.x < KEYS && first + mine < visible)
            scores[row * scores_row + first + mine] = ((sums[0][mine] + sums[1][mine]) + sums[2][mine]) + sums[3][mine];
    }
}
extern "C" __global__ void __launch_bounds__(256)
    index_scores_f32(const int* slots, const int* positions, const float* q, word q_row, word q_head, const float* weights,
                     word weights_row, const void* keys, word slot_stride, word row_stride, word heads, word width,
                     word ratio, double scale, float* scores, word scores_row) {
    index_scores<float>(slots, positions, q, q_row, q_head, weights, weights_row, keys, slot_stride, row_stride, heads,
                        width, ratio, scale, scores, scores_row);
}
extern "C" __global__ void __launch_bounds__(256)
    index_scores_f16(const int* slots, const int* positions, const float* q, word q_row, word q_head, const float* weights,
                     word weights_row, const void* keys, word slot_stride, word row_stride, word heads, word width,
                     word ratio, double scale, float* scores, word scores_row) {
    index_scores<__half>(slots, positions, q, q_row, q_head, weights, weights_row, keys, slot_stride, row_stride, heads,
                         width, ratio, scale, scores, scores_row);
}

// Whole numbers in the order of scores; 0 for what is never chosen: a NaN and minus infinity.
DEVICE uint32_t order_of(float x) {
    if (isnan(x) || x == -INFINITY) return 0;
    const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 counts as 0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

constexpr int PICKERS = 1024;

// The sum of x over the threads before this one, and over all of them in `all`. `sums` has room for 33 numbers.
DEVICE int sum_before(int x, int* sums, int& all) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int mine = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, mine, distance);
        if (lane >= distance) mine += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = mine;
    __syncthreads();
    int before = 0;
    all = 0;
    for (int w = 0; w < PICKERS / 32; ++w) {
        before += w < warp ? sums[w] : 0;
        all += sums[w];
    }
    return before + mine - x;
}

// Writes the numbers i < count with the `keep` greatest rank(i) > 0, ascending, ties to the lower number, then -1 up to
// `keep`. The threshold is found eight bits at a time. Called by all threads.
template <class Rank>
DEVICE void pick(int count, int keep, Rank rank, int* out) {
    __shared__ int bins[256];
    __shared__ int sums[33];
    __shared__ uint32_t found[2];  // bits of the threshold so far; how many are still to be taken from its bin
    uint32_t top = 0, known = 0;
    int left = keep, all;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += PICKERS) bins[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += PICKERS) {
            const uint32_t x = rank(i);
            if (x && (x & known) == top) atomicAdd(&bins[(x >> shift) & 255], 1);
        }
        __syncthreads();
        // from the greatest bin on: thread t has bin 255 - t
        const int mine = threadIdx.x < 256 ? bins[255 - threadIdx.x] : 0;
        const int above = sum_before(mine, sums, all);
        if (threadIdx.x == 0) found[0] = top, found[1] = 0;  // fewer than wanted: all of the lowest bin
        __syncthreads();
        if (mine && above < left && above + mine >= left)
            found[0] = top | uint32_t(255 - threadIdx.x) << shift, found[1] = left - above;
        __syncthreads();
        if (all <= left && known == 0) {  // nothing to choose
            top = 1, left = 0, known = 0;
            break;
        }
        top = found[0], left = int(found[1]);
        known |= 255u << shift;
    }
    // rank > top is taken, and of those with rank == top the first `left`; without a choice all ranks >= 1
    const bool choice = known != 0;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int each = (count + PICKERS - 1) / PICKERS * 32;  // a warp has so many neighbours
    const int from = min(count, warp * each), to = min(count, from + each);
    int more = 0, same = 0;
    for (int i = from + lane; i < to; i += 32) {
        const uint32_t x = rank(i);
        more += choice ? x > top : x >= top;
        same += choice && x == top;
    }
    int total;
    const int lower_same = sum_before(same, sums, total);
    const int warp_same = __shfl_sync(~0u, lower_same, 0);
    int mine_same = same;
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) mine_same += __shfl_xor_sync(~0u, mine_same, distance);
    const int take_same = min(max(left - warp_same, 0), mine_same);  // the warp's share of the ties
    int warp_more = more;
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) warp_more += __shfl_xor_sync(~0u, warp_more, distance);
    int at = sum_before(lane == 0 ? warp_more + take_same : 0, sums, total);
    at = __shfl_sync(~0u, at, 0);
    int ties = take_same;
    const uint32_t below = (1u << lane) - 1;
    for (int i = from; i < to; i += 32) {
        const uint32_t x = i + lane < to ? rank(i + lane) : 0;
        const uint32_t equal = __ballot_sync(~0u, choice && x && x == top);
        const bool tied = (equal >> lane & 1) && __popc(equal & below) < ties;
        ties = max(0, ties - __popc(equal));
        const bool taken = tied || (choice ? x > top : x >= top);
        const uint32_t which = __ballot_sync(~0u, taken);
        if (taken) out[at + __popc(which & below)] = i + lane;
        at += __popc(which);
    }
    for (int i = total + threadIdx.x; i < keep; i += PICKERS) out[i] = -1;
    __syncthreads();
}

// Grid rows, 1024 threads; dynamic shared memory: a bit for each block of group rows, in whole words. See op IndexRows;
// `kept` and `within` may be null. `bests` has room for a number for each block of a row, blocks_row of them.
extern "C" __global__ void __launch_bounds__(PICKERS)
    index_rows(const int* positions, const float* scores, word scores_row, word ratio, int* out, word out_row, word keep,
               int* kept, word kept_row, word keep_blocks, const int* within, word within_row, word within_count,
               word block, uint32_t* bests, word blocks_row) {
    begin();
    DYNAMIC_SHARED(uint32_t, inside);
    const int row = blockIdx.x, visible = int((positions[row] + 1) / ratio);
    scores += row * scores_row, out += row * out_row;
    if (kept) {
        const int count = int((visible + block - 1) / block);
        bests += row * blocks_row;
        for (int b = threadIdx.x; b < count; b += PICKERS) {
            uint32_t best = 1;  // a block may be kept whatever is in it
            for (int i = b * int(block); i < min(visible, (b + 1) * int(block)); ++i) best = max(best, order_of(scores[i]));
            bests[b] = b == count - 1 ? ~0u : best;
        }
        __syncthreads();
        pick(count, int(keep_blocks), [&](int b) { return bests[b]; }, kept + row * kept_row);
    }
    if (within) {
        within += row * within_row;
        for (int i = threadIdx.x; i < blocks_row / 32 + 1; i += PICKERS) inside[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < within_count; i += PICKERS)
            if (within[i] >= 0) atomicOr(&inside[within[i] / 32], 1u << (within[i] & 31));
        __syncthreads();
        pick(visible, int(keep),
             [&](int i) { return inside[i / int(block) / 32] >> (i / int(block) & 31) & 1 ? order_of(scores[i]) : 0u; }, out);
    } else {
        pick(visible, int(keep), [&](int i) { return order_of(scores[i]); }, out);
    }
}
