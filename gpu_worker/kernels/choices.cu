// Choices among numbers: the router of experts and the greedy token. Every tie goes to the lower index; a NaN loses.
#include "hand_off.cuh"
#include "router.cuh"

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
// Grid rows, 32 threads; dynamic shared memory 4 * (2 * experts + groups) bytes. See op Router.
extern "C" __global__ void router(const float* logits, word logits_row, int* ids, word ids_row, float* mix, word mix_row,
                                  const float* bias, Choice how) {
    begin();
    DYNAMIC_SHARED(float, scores);
    const int row = blockIdx.x;
    route_row(logits + row * logits_row, ids + row * ids_row, mix + row * mix_row, bias, how, scores);
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

// One block: each row's greedy token becomes its token of the next step, at the next position; one more of the steps ahead
// has been made. Everything else that a step reads of its record stays. The host is told the tokens, too, if there is `told`:
// it has rows to bring for them (`gpu_worker/rows_ahead.py`).
extern "C" __global__ void next_record(const int* greedy, word greedy_row, word rows, int* tokens, int* positions, int* laps,
                                       int* told_tokens, word* told) {
    begin();
    if (threadIdx.x == 0) ++laps[0], --laps[1];
    for (word row = threadIdx.x; row < rows; row += blockDim.x) {
        const int token = greedy[row * greedy_row];
        tokens[row] = token;
        if (told) told_tokens[row] = token;
        ++positions[row];
    }
    if (!told) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        store_release(told, laps[0]);
    }
}
