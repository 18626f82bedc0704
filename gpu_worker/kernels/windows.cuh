// What attention over a window of positions and over group rows reads: the places of a row's keys.
#pragma once
#include "common.cuh"

struct Ring {
    const void* rows;
    word slot_stride, row_stride, count, span;
};
struct Groups {
    const void* rows;  // null: a window alone
    word slot_stride, row_stride, ratio;
    const int* chosen;  // null: all that are visible
    word chosen_row, most;
};

// How many numbers of an ascending list, which ends with -1, are no less than 0. Called by all threads of a block of 256.
DEVICE int listed(const int* list, int most) {
    __shared__ int counts[8];
    int mine = 0;
    for (int i = threadIdx.x; i < most; i += 256) mine += list[i] >= 0;
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) mine += __shfl_xor_sync(~0u, mine, distance);
    if ((threadIdx.x & 31) == 0) counts[threadIdx.x / 32] = mine;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < 8; ++w) all += counts[w];
    return all;
}
