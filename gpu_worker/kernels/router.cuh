// The router's choice for one row. Every tie goes to the lower index; a NaN loses.
#pragma once
#include "common.cuh"

struct Choice {
    word experts, used, sigmoid, normalise;
    double scale;
    word groups, groups_used;
};

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

// See op Router. Called by all lanes of a warp; `scores` is shared memory of 4 * (2 * experts + groups) bytes.
DEVICE void route_row(const float* logits, int* ids, float* mix, const float* bias, const Choice& how, float* scores) {
    uint32_t *ranks = reinterpret_cast<uint32_t*>(scores + how.experts), *group_ranks = ranks + how.experts;
    const int lane = threadIdx.x & 31, n = int(how.experts), each = n / int(how.groups);
    if (how.sigmoid) {
        for (int i = lane; i < n; i += 32) scores[i] = 1.0f / (1.0f + expf(-__ldcg(logits + i)));
    } else {
        float top = -INFINITY, sum = 0.0f;
        for (int i = lane; i < n; i += 32) top = fmaxf(top, scores[i] = __ldcg(logits + i));
#pragma unroll
        for (int distance = 16; distance; distance >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        for (int i = lane; i < n; i += 32) sum += scores[i] = expf(scores[i] - top);
        sum = lanes_sum(sum);
        for (int i = lane; i < n; i += 32) scores[i] /= sum;
    }
    for (int i = lane; i < n; i += 32) ranks[i] = rank_of(bias ? scores[i] + bias[i] : scores[i]);
    __syncwarp();
    if (how.groups > 1) {
        for (int g = lane; g < how.groups; g += 32) {
            float first = -INFINITY, second = -INFINITY;
            for (int i = g * each; i < (g + 1) * each; ++i) {
                const float x = bias ? scores[i] + bias[i] : scores[i];
                if (x > first) second = first, first = x;
                else if (x > second) second = x;
            }
            group_ranks[g] = rank_of(each > 1 ? first + second : first);
        }
        __syncwarp();
        for (int k = 0; k < how.groups_used; ++k) take_best(group_ranks, int(how.groups));
        for (int i = lane; i < n; i += 32)
            if (group_ranks[i / each]) ranks[i] = rank_of(-INFINITY);
        __syncwarp();
    }
    float total = 0.0f;
    for (int k = 0; k < how.used; ++k) {
        const int best = take_best(ranks, n);
        if (lane == 0) ids[k] = best, mix[k] = scores[best];
        total = __fadd_rn(total, scores[best]);
    }
    __syncwarp();
    const float divisor = how.normalise ? fmaxf(total, 6.103515625e-05f) : 1.0f;
    for (int k = lane; k < how.used; k += 32) mix[k] = mix[k] / divisor * float(how.scale);
}
