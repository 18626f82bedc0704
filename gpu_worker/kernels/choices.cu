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

// Grid rows, 32 threads; dynamic shared memory 4 * (2 * experts + 2 * groups) bytes. See op Router.
extern "C" __global__ void router(const float* logits, word logits_row, int* ids, word ids_row, float* mix, word mix_row,
                                  const float* bias, word experts, word used, word sigmoid, word normalise, double scale,
                                  word groups, word groups_used) {
    extern __shared__ float memory[];
    float *scores = memory, *selection = memory + experts, *group = selection + experts;
    int* stays = reinterpret_cast<int*>(group + groups);
    const int lane = threadIdx.x, row = blockIdx.x, n = int(experts), each = n / int(groups);
    logits += row * logits_row, ids += row * ids_row, mix += row * mix_row;
    if (sigmoid) {
        for (int i = lane; i < n; i += 32) scores[i] = 1.0f / (1.0f + expf(-logits[i]));
    } else {
        float top = -INFINITY, sum = 0.0f;
        for (int i = lane; i < n; i += 32) top = fmaxf(top, logits[i]);
#pragma unroll
        for (int distance = 16; distance; distance >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        for (int i = lane; i < n; i += 32) sum += scores[i] = expf(logits[i] - top);
        sum = lanes_sum(sum);
        for (int i = lane; i < n; i += 32) scores[i] /= sum;
    }
    for (int i = lane; i < n; i += 32) selection[i] = bias ? scores[i] + bias[i] : scores[i];
    __syncwarp();
    if (groups > 1) {
        for (int g = lane; g < groups; g += 32) {
            float first = -INFINITY, second = -INFINITY;
            for (int i = 0; i < each; ++i) {
                const float x = selection[g * each + i];
                if (x > first) second = first, first = x;
                else if (x > second) second = x;
            }
            group[g] = each > 1 ? first + second : first;
            stays[g] = 0;
        }
        __syncwarp();
        for (int k = 0; k < groups_used; ++k) {
            Best best = {0.0f, -1};
            for (int g = lane; g < groups; g += 32)
                if (!stays[g] && beats(group[g], g, best)) best.value = group[g], best.index = g;
            best = warp_best(best);
            if (lane == 0) stays[best.index] = 1;
            __syncwarp();
        }
        for (int i = lane; i < n; i += 32)
            if (!stays[i / each]) selection[i] = -INFINITY;
        __syncwarp();
    }
    float total = 0.0f;
    for (int k = 0; k < used; ++k) {
        Best best = {0.0f, -1};
        for (int i = lane; i < n; i += 32) {
            const bool taken = __float_as_uint(selection[i]) == 0xffffffffu;  // the mark of the chosen, below
            if (!taken && beats(selection[i], i, best)) best.value = selection[i], best.index = i;
        }
        best = warp_best(best);
        if (lane == 0) {
            ids[k] = best.index, mix[k] = scores[best.index];
            selection[best.index] = __uint_as_float(0xffffffffu);
        }
        total = __fadd_rn(total, scores[best.index]);
        __syncwarp();
    }
    const float divisor = normalise ? fmaxf(total, 6.103515625e-05f) : 1.0f;
    for (int k = lane; k < used; k += 32) mix[k] = mix[k] / divisor * float(scale);
}

// Grid (parts, rows), 256 threads: the best of each part of a row.
extern "C" __global__ void argmax_parts(const float* x, word x_row, word width, Best* parts) {
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
    Best mine = {0.0f, -1};
    for (int i = threadIdx.x; i < count; i += 32) {
        const Best part = parts[blockIdx.x * count + i];
        if (beats(part.value, part.index, mine)) mine = part;
    }
    mine = warp_best(mine);
    if (threadIdx.x == 0) out[blockIdx.x * out_row] = mine.index;
}
