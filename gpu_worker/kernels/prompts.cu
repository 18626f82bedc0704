// What prompts need besides products and attention: rows as scaled f16, and items sorted by expert.
#include "common.cuh"

struct Input {  // as in activations.cu
    const float* x;
    const float* up;  // may be null; strides as x
    word row_stride, head_stride, width;
    double limit;
};

// Grid rows, 256 threads: a row as f16, times the power of two that brings its greatest magnitude to 2^14 .. 2^15, and
// `scales`, what undoes that and `factor`, the weights' own. Elements up to `padded`, a multiple of 64, are 0.
extern "C" __global__ void __launch_bounds__(256)
    rows_as_f16(Input in, word elements, word padded, __half* out, float* scales, double factor) {
    begin();
    __shared__ float tops[8];
    const int n = int(elements), width = int(in.width), row = blockIdx.x;
    const float* x = in.x + row * in.row_stride;
    const float* up = in.up ? in.up + row * in.row_stride : nullptr;
    auto read = [&](int i) {
        const word at = i / width * in.head_stride + i % width;
        return up ? silu_times(x[at], up[at], float(in.limit)) : x[at];
    };
    const bool plain = !up && width == n && ((reinterpret_cast<uintptr_t>(x) | (n * 4)) & 15) == 0;
    float top = 0.0f;
    if (plain)
        for (int i = threadIdx.x; i < n / 4; i += 256) {
            const float4 v = reinterpret_cast<const float4*>(x)[i];
            top = fmaxf(fmaxf(fmaxf(top, fabsf(v.x)), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
        }
    else
        for (int i = threadIdx.x; i < n; i += 256) top = fmaxf(top, fabsf(read(i)));
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) top = fmaxf(top, tops[i]);
    // 2^e <= top < 2^(e + 1): what is multiplied with is 2^(14 - e), as far as both it and its inverse are normal
    const int e = int(__float_as_uint(top) >> 23) - 127;
    const int raise = top > 0.0f && top < INFINITY ? min(14 - e, 100) : 0;
    const float up_by = __uint_as_float(uint32_t(127 + raise) << 23);
    if (threadIdx.x == 0) scales[row] = __uint_as_float(uint32_t(127 - raise) << 23) * float(factor);
    out += row * padded;
    if (plain)
        for (int i = threadIdx.x; i < padded / 4; i += 256) {
            const float4 v = 4 * i < n ? reinterpret_cast<const float4*>(x)[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            reinterpret_cast<__half2*>(out)[2 * i] = __floats2half2_rn(v.x * up_by, v.y * up_by);
            reinterpret_cast<__half2*>(out)[2 * i + 1] = __floats2half2_rn(v.z * up_by, v.w * up_by);
        }
    else
        for (int i = threadIdx.x; i < padded; i += 256) out[i] = __float2half_rn(i < n ? read(i) * up_by : 0.0f);
}

// Grid experts, 256 threads: the numbers of the items that chose this expert, ascending, at their place among those of
// all experts; counts[expert]. Item i is place i % used of row i / used.
extern "C" __global__ void __launch_bounds__(256)
    sort_items(const int* ids, word ids_row, word used, word items, int* sorted, int* counts) {
    begin();
    __shared__ int lower[8];
    __shared__ int mine[8];
    const int expert = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int each = (int(items) + 8 * 32 - 1) / (8 * 32) * 32;  // a warp takes so many neighbours
    const int from = warp * each, to = min(int(items), from + each);
    auto chosen = [&](int i) { return ids[i / int(used) * ids_row + i % int(used)]; };
    int below = 0, same = 0;
    for (int i = from + lane; i < to; i += 32) {
        const int id = chosen(i);
        below += id < expert, same += id == expert;
    }
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) {
        below += __shfl_xor_sync(~0u, below, distance);
        same += __shfl_xor_sync(~0u, same, distance);
    }
    if (lane == 0) lower[warp] = below, mine[warp] = same;
    __syncthreads();
    int at = 0, all = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        at += lower[w] + (w < warp ? mine[w] : 0);
        all += mine[w];
    }
    if (threadIdx.x == 0) counts[expert] = all;
    for (int i = from; i < to; i += 32) {
        const bool here = i + lane < to && chosen(i + lane) == expert;
        const uint32_t which = __ballot_sync(~0u, here);
        if (here) sorted[at + __popc(which & ((1u << lane) - 1))] = i + lane;
        at += __popc(which);
    }
}

struct Tile {
    int expert, first, count, unused;
};

// One block of 256 threads; dynamic shared memory 4 * experts bytes: tiles of up to 128 items of one expert, in order;
// those that are not needed have count 0.
extern "C" __global__ void __launch_bounds__(256) list_tiles(const int* counts, word experts, Tile* tiles, word capacity) {
    begin();
    DYNAMIC_SHARED(int, count);
    for (int e = threadIdx.x; e < experts; e += 256) count[e] = counts[e];
    __syncthreads();
    int total = 0;
    for (int i = 0; i < experts; ++i) total += (count[i] + 127) / 128;
    for (int e = threadIdx.x; e < experts; e += 256) {
        int tile = 0, first = 0;
        for (int i = 0; i < e; ++i) tile += (count[i] + 127) / 128, first += count[i];
        for (int done = 0; done < count[e]; done += 128, ++tile)
            tiles[tile] = {e, first + done, min(128, count[e] - done), 0};
    }
    for (int i = total + threadIdx.x; i < capacity; i += 256) tiles[i] = {0, 0, 0, 0};
}
