// What a hyper-connection makes of a sublayer's result (op HyperPost), inside the kernel that the result comes from: copy i of
// the row becomes post[i] * result + sum over j of mixing[j][i] * copy j, each product and sum rounded, j ascending.
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

    // A lane's: mixing in order, then post.
    DEVICE float coefficient() const {
        const int lane = threadIdx.x & 31, n = int(copies);
        return lane < n * n ? mixing[lane] : lane < n * n + n ? post[lane - n * n] : 0.0f;
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
};
