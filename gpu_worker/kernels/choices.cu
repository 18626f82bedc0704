// Choices among numbers: the router of experts and the greedy token. Every tie goes to the lower index; a NaN loses.
#include "common.cuh"

struct Best {
    float value;
    int index;
};
DEVICE bool beats(float value, int index, const Best& best) {
    if (index < 0) return false;
    if (best.index < 0) return true;
    if (isnan(value) != isnan(best.value)) return isnan(best.value);
    return value > best.value || ((value == best.value || isnan(value)) && index < best.index);
}
DEVICE Best warp_best(Best mine) {
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) {
        const float value = __shfl_xor_sync(~0u, mine.value, distance);
        const int index = __shfl_xor_sync(~0u, mine.index, distance);
        if (beats(value, index, mine)) mine.value = value, mine.index = index;
    }
    return mine;
}
DEVICE float lanes_sum(float x) {
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

// Whole numbers in the order of floats: 0 for what has been chosen, 1 for a NaN, more for all others.
DEVICE uint32_t rank_of(float x) {
    if (isnan(x)) return 1;
    const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 counts as 0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The index of the greatest rank, ties to the lower index; the rank becomes 0. Called by all lanes of a warp.
DEVICE int take_best(uint32_t* ranks, int count) {
    uint32_t best = 0, at = ~0u;
    for (int i = threadIdx.x & 31; i < count; i += 32)
        if (ranks[i] > best) best = ranks[i], at = i;
    const uint32_t top = __reduce_max_sync(~0u, best);
    const uint32_t index = __reduce_min_sync(~0u, best == top ? at : ~0u);
    if (index == at) ranks[index] = 0;
    __syncwarp();
    return int(index);
}

// Grid rows, 32 threads; dynamic shared memory 4 * (2 * experts + groups) bytes. See op Router.
extern "C" __global__ void router(const float* logits, word logits_row, int* ids, word ids_row, float* mix, word mix_row,
                                  const float* bias, word experts, word used, word sigmoid, word normalise, double scale,
                                  word groups, word groups_used) {
    begin();
    DYNAMIC_SHARED(float, scores);
    uint32_t *ranks = reinterpret_cast<uint32_t*>(scores + experts), *group_ranks = ranks + experts;
    const int lane = threadIdx.x, row = blockIdx.x, n = int(experts), each = n / int(groups);
    logits += row * logits_row, ids += row * ids_row, mix += row * mix_row;
    if (sigmoid) {
        for (int i = lane; i < n; i += 32) scores[i] = 1.0f / (1.0f + expf(-logits[i]));
    } else {
        float top = -INFINITY, sum = 0.0f;
        for (int i = lane; i < n; i += 32) top = fmaxf(top, scores[i] = logits[i]);
#pragma unroll
        for (int distance = 16; distance; distance >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        for (int i = lane; i < n; i += 32) sum += scores[i] = expf(scores[i] - top);
        sum = lanes_sum(sum);
        for (int i = lane; i < n; i += 32) scores[i] /= sum;
    }
    for (int i = lane; i < n; i += 32) ranks[i] = rank_of(bias ? scores[i] + bias[i] : scores[i]);
    __syncwarp();
    if (groups > 1) {
        for (int g = lane; g < groups; g += 32) {
            float first = -INFINITY, second = -INFINITY;
            for (int i = g * each; i < (g + 1) * each; ++i) {
                const float x = bias ? scores[i] + bias[i] : scores[i];
                if (x > first) second = first, first = x;
                else if (x > second) second = x;
            }
            group_ranks[g] = rank_of(each > 1 ? first + second : first);
        }
        __syncwarp();
        for (int k = 0; k < groups_used; ++k) take_best(group_ranks, int(groups));
        for (int i = lane; i < n; i += 32)
            if (group_ranks[i / each]) ranks[i] = rank_of(-INFINITY);
        __syncwarp();
    }
    float total = 0.0f;
    for (int k = 0; k < used; ++k) {
        const int best = take_best(ranks, n);
        if (lane == 0) ids[k] = best, mix[k] = scores[best];
        total = __fadd_rn(total, scores[best]);
    }
    __syncwarp();
    const float divisor = normalise ? fmaxf(total, 6.103515625e-05f) : 1.0f;
    for (int k = lane; k < used; k += 32) mix[k] = mix[k] / divisor * float(scale);
}

// Grid (parts, rows), 256 threads: the best of each part of a row.
extern "C" __global__ void argmax_parts(const float* x, word x_row, word width, Best* parts) {
    begin();
    __shared__ Best bests[8];
    x += blockIdx.y * x_row;
    Best mine = {0.0f, -1};
    for (int i = blockIdx.x * 256 + threadIdx.x; i < width; i += 256 * gridDim.x)
        if (beats(x[i], i, mine)) mine.value = x[i], mine.index = i;
    mine = warp_best(mine);
    if ((threadIdx.x & 31) == 0) bests[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < 8; ++i)
            if (beats(bests[i].value, bests[i].index, mine)) mine = bests[i];
        parts[blockIdx.y * gridDim.x + blockIdx.x] = mine;
    }
}

// Grid rows, 32 threads.
extern "C" __global__ void argmax_whole(const Best* parts, word count, int* out, word out_row) {
    begin();
    Best mine = {0.0f, -1};
    for (int i = threadIdx.x; i < count; i += 32) {
        const Best part = parts[blockIdx.x * count + i];
        if (beats(part.value, part.index, mine)) mine = part;
    }
    mine = warp_best(mine);
    if (threadIdx.x == 0) out[blockIdx.x * out_row] = mine.index;
}
