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

constexpr int MOST_CHOSEN_FROM = 256, MOST_USED = 16;

// A choice made by all threads of a block, in shared memory.
struct BlockChoice {
    float scores[MOST_CHOSEN_FROM];
    __align__(16) uint32_t ranks[MOST_CHOSEN_FROM];
    int places[MOST_CHOSEN_FROM];  // how many come before an expert
    int experts[MOST_USED];
    unsigned taken, twice;  // of the places below `used`
};

// Scores of which those who use a choice make it for themselves; without `logits` it has been made and lies in memory.
struct Scored {
    const float* logits;
    word logits_row;
    const float* bias;
    Choice how;
};

// A warp's scores of experts 32 * i + lane, as route_row makes them.
template <int EACH>
DEVICE void scores_of(const Choice& how, float (&score)[EACH]) {
    const int lane = threadIdx.x & 31, n = int(how.experts);
    if (how.sigmoid) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) score[i] = 1.0f / (1.0f + expf(-score[i]));
        return;
    }
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

template <int EACH>
DEVICE void choose_of(const Scored& scored, int row, BlockChoice& choice) {
    const int n = int(scored.how.experts), used = int(scored.how.used), lane = threadIdx.x & 31;
    if (threadIdx.x < 32) {  // one warp, so that the others do not take turns with it
        const float* logits = scored.logits + row * scored.logits_row;
        float score[EACH], bias[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int expert = 32 * i + lane;
            score[i] = expert < n ? __ldcg(logits + expert) : -INFINITY;
            bias[i] = scored.bias && expert < n ? scored.bias[expert] : 0.0f;
        }
        scores_of<EACH>(scored.how, score);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int expert = 32 * i + lane;
            choice.scores[expert] = score[i];
            choice.ranks[expert] = expert < n ? rank_of(scored.bias ? score[i] + bias[i] : score[i]) : 0;
            choice.places[expert] = 0;
        }
        if (lane == 0) choice.taken = choice.twice = 0;
    }
    __syncthreads();
    // of each expert how many rank higher, in parts
    const int padded = 32 * EACH, parts = max(1, int(blockDim.x) / padded), each = (padded / 4 + parts - 1) / parts;
    for (int i = threadIdx.x; i < parts * padded; i += blockDim.x) {
        const int expert = i % padded, begin = i / padded * each, end = min(padded / 4, begin + each);
        const uint32_t mine = choice.ranks[expert];
        int higher = 0;
#pragma unroll 4
        for (int k = begin; k < end; ++k) {
            const uint4 other = reinterpret_cast<const uint4*>(choice.ranks)[k];
            higher += int(other.x > mine) + int(other.y > mine) + int(other.z > mine) + int(other.w > mine);
        }
        if (higher) atomicAdd(&choice.places[expert], higher);
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < n; expert += blockDim.x) {
        const int place = choice.places[expert];
        if (place >= used) continue;
        if (atomicOr(&choice.taken, 1u << place) >> place & 1)
            choice.twice = 1;
        else
            choice.experts[place] = expert;
    }
    __syncthreads();
    if (!choice.twice) return;
    for (int expert = threadIdx.x; expert < n; expert += blockDim.x) {  // of equal ranks the lower index comes first
        int place = choice.places[expert];
        if (place >= used) continue;
        for (int i = 0; i < expert; ++i) place += choice.ranks[i] == choice.ranks[expert];
        if (place < used) choice.experts[place] = expert;
    }
    __syncthreads();
}

// route_row's choice of experts of one group, MOST_CHOSEN_FROM of them at most. All threads of the block call it.
DEVICE void choose(const Scored& scored, int row, BlockChoice& choice) {
    if (scored.how.experts <= 128)
        choose_of<4>(scored, row, choice);
    else
        choose_of<8>(scored, row, choice);
}

// The mixing weight of the expert chosen k-th to lane k, as route_row makes it. All lanes of a warp call it.
DEVICE float mix_of_lane(const Choice& how, const BlockChoice& choice) {
    const int lane = threadIdx.x & 31;
    const float mine = lane < how.used ? choice.scores[choice.experts[lane]] : 0.0f;
    float total = 0.0f;
    for (int k = 0; k < int(how.used); ++k) total = __fadd_rn(total, __shfl_sync(~0u, mine, k));
    return mine / (how.normalise ? fmaxf(total, 6.103515625e-05f) : 1.0f) * float(how.scale);
}
