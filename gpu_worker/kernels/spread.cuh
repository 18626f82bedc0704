// What a hyper-connection makes of a sublayer's result (op HyperPost), inside the kernel that the result comes from: copy i of
// the row becomes post[i] * result + sum over j of mixing[j][i] * copy j, each product and sum rounded, j ascending. What the
// next sublayer reads of the new copies (op HyperCollapse), sum over j of pre[j] * copy j, may be made of them at once.
#pragma once
#include "common.cuh"

constexpr int MOST_SPREAD = 4;  // copies; a warp's lanes hold all coefficients

// One row. Without `out` nothing is spread. `streams` may be `out`: an element of all copies has been read before one is written.
struct Spread {
    const float* streams;
    word copy;  // floats between copies
    const float *post, *mixing;
    float* out;
    word out_copy, copies;
    const float* pre;
    float* collapsed;  // null: nothing is collapsed

    // A lane's: mixing in order, then post, then pre.
    DEVICE float coefficient() const {
        const int lane = threadIdx.x & 31, n = int(copies);
        if (lane < n * n) return mixing[lane];
        if (lane < n * n + n) return post[lane - n * n];
        return collapsed && lane < n * n + 2 * n ? pre[lane - n * n - n] : 0.0f;
    }
    DEVICE void fetch(word output, float (&held)[MOST_SPREAD]) const {
#pragma unroll
        for (int j = 0; j < MOST_SPREAD; ++j) held[j] = j < copies ? streams[j * copy + output] : 0.0f;
    }
    // Copy i of an element; `of` gives the coefficients by number.
    template <class Of>
    DEVICE float copy_of(int i, float result, const float (&held)[MOST_SPREAD], Of of) const {
        const int n = int(copies);
        float total = __fmul_rn(of(n * n + i), result);
#pragma unroll
        for (int j = 0; j < MOST_SPREAD; ++j) {
            const float factor = of(j * n + i);
            if (j < n) total = __fadd_rn(total, __fmul_rn(factor, held[j]));
        }
        return total;
    }
    // An element of all copies, and what is collapsed of it, by so many neighbouring lanes: each makes the copy of its place
    // among them, and if they are fewer than copies, others behind it. If they are more than one, all lanes of a warp call it;
    // those that are not `there` write nothing.
    template <class Of>
    DEVICE void write(int output, bool there, float result, const float (&held)[MOST_SPREAD], int lanes, Of of) const {
        const int n = int(copies), place = threadIdx.x & (lanes - 1);
        float total = 0.0f;
#pragma unroll 1
        for (int from = 0; from < n; from += lanes) {
            const int i = from + place;
            const float made = copy_of(i, result, held, of);
            if (there && i < n) out[i * out_copy + output] = made;
            if (!collapsed) continue;
            const float term = __fmul_rn(of(n * n + n + i), made);
#pragma unroll
            for (int k = 0; k < MOST_SPREAD; ++k) {
                if (k >= lanes || from + k >= n) break;
                const float next = lanes > 1 ? __shfl_sync(~0u, term, k, lanes) : term;
                total = from + k ? __fadd_rn(total, next) : next;
            }
        }
        if (collapsed && there && place == 0) collapsed[output] = total;
    }
};
