// What kernels of hyper-connections have in common. Strides count floats; at most MOST_COPIES copies. Sums over copies: each
// product and sum rounded, copies in ascending order.
#pragma once
#include "common.cuh"

constexpr int MOST_COPIES = 8;
constexpr int MOST_LOGITS = MOST_COPIES * (MOST_COPIES + 2);
constexpr int MIX_THREADS = 512;  // the order of the sum of squares depends on it

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// See op HyperMix; post and mixing may be null. base and scale are the weights.
struct Mixing {
    const float* streams;
    word streams_row, elements;
    float* logits;
    word logits_row;
    float* pre;
    word pre_row;
    float* post;
    word post_row;
    float* mixing;
    word mixing_row;
    const float *base, *scale;
    word copies;
    double epsilon, hyper_epsilon;
    word rounds;

    // Of the mean, from the sum of squares.
    DEVICE float inverse_root(float squares) const { return 1.0f / sqrtf(squares / float(elements) + float(epsilon)); }
    DEVICE float pre_of(float logit, float root, float scaled, float above) const {
        return sigmoid(logit * root * scaled + above) + float(hyper_epsilon);
    }
};

// Element i of a square of LINES lines lies in lane i % 32 as mine[i / 32]. Each is divided by the sum of its line (ascending
// order) plus epsilon: of its row, or of its column. Called by all lanes of a warp.
template <int LINES, bool ROWS>
DEVICE void divide_by_sums(float (&mine)[(LINES * LINES + 31) / 32], float epsilon) {
    constexpr int HELD = (LINES * LINES + 31) / 32;
    const int lane = threadIdx.x & 31;
    float total[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int i = 32 * h + lane, line = ROWS ? i / LINES * LINES : i % LINES;
        total[h] = 0.0f;
#pragma unroll
        for (int k = 0; k < LINES; ++k) {
            const int from = ROWS ? line + k : line + k * LINES;
            float value = __shfl_sync(~0u, mine[0], from);
#pragma unroll
            for (int other = 1; other < HELD; ++other) {
                const float far = __shfl_sync(~0u, mine[other], from);
                value = from / 32 == other ? far : value;
            }
            total[h] += value;
        }
    }
#pragma unroll
    for (int h = 0; h < HELD; ++h) mine[h] = mine[h] / (total[h] + epsilon);
}

// The square of `n` lines in shared memory, after `rounds` rounds: columns first, then rows and columns. By all lanes of a warp.
template <int LINES>
DEVICE void balance(float* square, int rounds, float epsilon) {
    constexpr int HELD = (LINES * LINES + 31) / 32;
    const int lane = threadIdx.x & 31;
    float mine[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) mine[h] = 32 * h + lane < LINES * LINES ? square[32 * h + lane] : 1.0f;
    divide_by_sums<LINES, false>(mine, epsilon);
    for (int turn = 1; turn < rounds; ++turn) {
        divide_by_sums<LINES, true>(mine, epsilon);
        divide_by_sums<LINES, false>(mine, epsilon);
    }
#pragma unroll
    for (int h = 0; h < HELD; ++h)
        if (32 * h + lane < LINES * LINES) square[32 * h + lane] = mine[h];
    __syncwarp();
}

// What a lane wants of the weights: for the logits lane, lane + 32, ...
struct MixWeights {
    static constexpr int HELD = (MOST_LOGITS + 31) / 32;
    float base[HELD], scale[HELD];

    DEVICE void load(const Mixing& mix) {
        const int n = int(mix.copies), all = mix.mixing ? n * (n + 2) : mix.post ? 2 * n : n;
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const int i = 32 * h + int(threadIdx.x & 31);
            base[h] = i < all ? mix.base[i] : 0.0f;
            scale[h] = i < all ? mix.scale[i < n ? 0 : i < 2 * n ? 1 : 2] : 0.0f;
        }
    }
};

// pre, post and mixing of a row from its logits and its inverse root. `square` is shared memory for MOST_COPIES lines. By all
// lanes of a warp.
DEVICE void mix_row(const Mixing& mix, const MixWeights& weights, int row, const float* logits, float root, float* square) {
    const int n = int(mix.copies), lane = threadIdx.x & 31;
    const float small = float(mix.hyper_epsilon);
#pragma unroll
    for (int h = 0; h < MixWeights::HELD; ++h) {
        const int i = 32 * h + lane;
        const float scale = weights.scale[h], base = weights.base[h];
        if (i < n)
            mix.pre[row * mix.pre_row + i] = mix.pre_of(logits[i], root, scale, base);
        else if (i < 2 * n) {
            if (mix.post) mix.post[row * mix.post_row + i - n] = 2.0f * sigmoid(logits[i] * root * scale + base);
        } else if (i < n * (n + 2) && mix.mixing)
            square[i - 2 * n] = logits[i] * root * scale + base;
    }
    if (!mix.mixing) return;
    __syncwarp();
    for (int source = lane; source < n; source += 32) {
        float* mine = square + source * n;
        float top = mine[0], total = 0.0f;
        for (int k = 1; k < n; ++k) top = fmaxf(top, mine[k]);
        for (int k = 0; k < n; ++k) total += mine[k] = expf(mine[k] - top);
        for (int k = 0; k < n; ++k) mine[k] = mine[k] / total + small;
    }
    __syncwarp();
    switch (n) {
        case 2: balance<2>(square, int(mix.rounds), small); break;
        case 3: balance<3>(square, int(mix.rounds), small); break;
        case 4: balance<4>(square, int(mix.rounds), small); break;
        case 5: balance<5>(square, int(mix.rounds), small); break;
        case 6: balance<6>(square, int(mix.rounds), small); break;
        case 7: balance<7>(square, int(mix.rounds), small); break;
        case 8: balance<8>(square, int(mix.rounds), small); break;
        default: balance<1>(square, int(mix.rounds), small);
    }
    for (int i = lane; i < n * n; i += 32) mix.mixing[row * mix.mixing_row + i] = square[i];
}

// The elements of all copies at one place, fetched before they are summed.
DEVICE void load_copies(float (&held)[MOST_COPIES], const float* streams, word copy, int copies) {
#pragma unroll
    for (int j = 0; j < MOST_COPIES; ++j) held[j] = j < copies ? streams[j * copy] : 0.0f;
}
// Sum over copies j of pre[j] * held[j].
DEVICE float collapsed(const float (&held)[MOST_COPIES], const float* pre, int copies) {
    float total = __fmul_rn(pre[0], held[0]);
#pragma unroll
    for (int j = 1; j < MOST_COPIES; ++j)
        if (j < copies) total = __fadd_rn(total, __fmul_rn(pre[j], held[j]));
    return total;
}
