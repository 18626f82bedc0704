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

// Lane k's: the k-th expert chosen and its mixing weight.
struct Chosen {
    int expert;
    float mix;
};

// route_row for experts of one group, 32 * EACH of them at most, bit for bit, in registers. Called by all lanes of a warp.
template <int EACH>
DEVICE Chosen choose_of(const float* logits, const float* bias, const Choice& how) {
    const int lane = threadIdx.x & 31, n = int(how.experts);
    float score[EACH];
    uint32_t rank[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) score[i] = 32 * i + lane < n ? __ldcg(logits + 32 * i + lane) : -INFINITY;
    if (how.sigmoid) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) score[i] = 1.0f / (1.0f + expf(-score[i]));
    } else {
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) top = fmaxf(top, score[i]);
#pragma unroll
        for (int distance = 16; distance; distance >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (32 * i + lane < n) sum += score[i] = expf(score[i] - top);
        sum = lanes_sum(sum);
#pragma unroll
        for (int i = 0; i < EACH; ++i) score[i] /= sum;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        rank[i] = 32 * i + lane < n ? rank_of(bias ? score[i] + bias[32 * i + lane] : score[i]) : 0;
    Chosen mine = {0, 0.0f};
    float total = 0.0f;
    for (int k = 0; k < how.used; ++k) {
        uint32_t best = 0, at = ~0u;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (rank[i] > best) best = rank[i], at = 32 * i + lane;
        const uint32_t top = __reduce_max_sync(~0u, best);
        const uint32_t index = __reduce_min_sync(~0u, best == top ? at : ~0u);
        float owned = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (int(index / 32) == i) owned = score[i];
            if (index == 32 * i + lane) rank[i] = 0;
        }
        const float value = __shfl_sync(~0u, owned, index & 31);
        if (lane == k) mine.expert = int(index), mine.mix = value;
        total = __fadd_rn(total, value);
    }
    const float divisor = how.normalise ? fmaxf(total, 6.103515625e-05f) : 1.0f;
    mine.mix = mine.mix / divisor * float(how.scale);
    return mine;
}

// Scores of which those who use a choice make it for themselves; without `logits` it has been made and lies in memory.
struct Scored {
    const float* logits;
    word logits_row;
    const float* bias;
    Choice how;
};
constexpr int MOST_CHOSEN_FROM = 256;
DEVICE Chosen choose(const Scored& scored, int row) {
    const float* logits = scored.logits + row * scored.logits_row;
    return scored.how.experts <= 128 ? choose_of<4>(logits, scored.bias, scored.how)
                                     : choose_of<8>(logits, scored.bias, scored.how);
}
