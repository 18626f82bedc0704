// Products of weight rows with activations, one warp for a few weight rows at a time: the loop that decode speed is made of.
//
// A warp copies its rows chunk by chunk into a ring in shared memory with 16-byte asynchronous copies, whatever the
// alignment of the type's blocks, and takes the chunks apart from there. Lane l has the groups l, l+32, ... of a row;
// lanes are summed at the row's end by a butterfly. The order of the sum depends on the row's length only, neither on
// the number of activation rows nor on which warp works.
//
// Activations of quantised types: `values` int8, `scales` {float d, sums} for each group of 32, sums being two int16 (the
// sums of the first and the last 16 values) or, for Q4_1 and Q5_1, the float s of Q8_1.
#pragma once
#include "blocks.cuh"
#include <cuda_bf16.h>

typedef long long word;

constexpr int WARPS = 4;

DEVICE void copy_async(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

struct F32 {
    typedef float Element;
    static constexpr int BYTES = 4;
    static constexpr Form FORM = FORM_FLOAT;
    DEVICE static float value(float x) { return x; }
};
struct F16 {
    typedef __half Element;
    static constexpr int BYTES = 2;
    static constexpr Form FORM = FORM_FLOAT;
    DEVICE static float value(__half x) { return __half2float(x); }
};
struct BF16 {
    typedef __nv_bfloat16 Element;
    static constexpr int BYTES = 2;
    static constexpr Form FORM = FORM_FLOAT;
    DEVICE static float value(__nv_bfloat16 x) { return __bfloat162float(x); }
};

template <class Quant>
constexpr __host__ __device__ int chunk_bytes() {
    if constexpr (Quant::FORM == FORM_FLOAT)
        return 1024;
    else
        return 1024 / Quant::BLOCK * Quant::BYTES;
}
// A chunk, its misalignment, and the word that an unaligned read takes beyond it.
template <class Quant>
constexpr __host__ __device__ int slot_bytes() {
    return (chunk_bytes<Quant>() + 15) / 16 * 16 + 32;
}
// Weight rows that a warp takes together, and chunks of them on their way: few matrices of float types are large, so a
// warp must not have to wait for the chunks of a row one after the other.
template <class Quant>
constexpr __host__ __device__ int rows_together() {
    return Quant::FORM == FORM_FLOAT ? 1 : 2;
}
template <class Quant>
constexpr __host__ __device__ int stages() {
    return Quant::FORM == FORM_FLOAT ? 8 : 4;
}
template <class Quant>
constexpr __host__ __device__ int ring_bytes() {
    return stages<Quant>() * rows_together<Quant>() * slot_bytes<Quant>();
}

struct Activations {
    const uint8_t* values;  // int8, or f32 for float types
    const uint8_t* scales;
    word stride;  // bytes between rows, of both
};

// One chunk of two weight rows against NR activation rows, quantised.
template <class Quant, int NR>
DEVICE void quantised_chunk(const uint8_t* const* slot, int chunk, int groups, const Activations& x, int rows,
                            float (&total)[rows_together<Quant>()][NR]) {
    const int lane = threadIdx.x & 31, group = chunk * 32 + lane;
    if (group >= groups) return;
    constexpr int EACH = Quant::BLOCK / 32, PAIR = rows_together<Quant>();
    Group g[PAIR];
#pragma unroll
    for (int m = 0; m < PAIR; ++m) Quant::decode(slot[m] + lane / EACH * Quant::BYTES, lane % EACH, g[m]);
#pragma unroll
    for (int r = 0; r < NR; ++r) {
        const word row = x.stride * (r < rows ? r : rows - 1);
        const int4 a = *reinterpret_cast<const int4*>(x.values + row + 32 * group);
        const int4 b = *reinterpret_cast<const int4*>(x.values + row + 32 * group + 16);
        const int2 scales = *reinterpret_cast<const int2*>(x.scales + row + 8 * group);
        const int v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        const float dx = __int_as_float(scales.x);
        const int first = int(short(scales.y & 0xffff)), last = scales.y >> 16;
#pragma unroll
        for (int m = 0; m < PAIR; ++m) {
            int low = 0, high = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low = __dp4a(int(g[m].q[i]), v[i], low);
                high = __dp4a(int(g[m].q[i + 4]), v[i + 4], high);
            }
            if (Quant::OFFSET) low -= Quant::OFFSET * first, high -= Quant::OFFSET * last;
            const int sum = g[m].scale[0] * low + g[m].scale[1] * high;
            total[m][r] = __fmaf_rn(__fmul_rn(g[m].d, dx), float(sum), total[m][r]);
            if (Quant::MINIMA) {
                const int least = g[m].minimum[0] * first + g[m].minimum[1] * last;
                total[m][r] = __fmaf_rn(-__fmul_rn(g[m].dmin, dx), float(least), total[m][r]);
            }
            if (Quant::FORM == FORM_Q8_1) total[m][r] = __fmaf_rn(g[m].dmin, __int_as_float(scales.y), total[m][r]);
        }
    }
}

template <class Quant, int NR>
DEVICE void float_chunk(const uint8_t* const* slot, int chunk, int width, const Activations& x, int rows,
                        float (&total)[rows_together<Quant>()][NR]) {
    typedef typename Quant::Element Element;
    constexpr int EACH = chunk_bytes<Quant>() / Quant::BYTES, PAIR = rows_together<Quant>();
    const int first = chunk * EACH, count = min(EACH, width - first);
#pragma unroll 4
    for (int i = threadIdx.x & 31; i < count; i += 32) {
        float w[PAIR];
#pragma unroll
        for (int m = 0; m < PAIR; ++m) w[m] = Quant::value(reinterpret_cast<const Element*>(slot[m])[i]);
#pragma unroll
        for (int r = 0; r < NR; ++r) {
            const word row = x.stride * (r < rows ? r : rows - 1);
            const float v = reinterpret_cast<const float*>(x.values + row)[first + i];
#pragma unroll
            for (int m = 0; m < PAIR; ++m) total[m][r] = __fmaf_rn(w[m], v, total[m][r]);
        }
    }
}

// emit(output, row, sum) for the PAIR weight rows from PAIR * p on, of p = first, first + step, ... ; called by all lanes of a warp.
template <class Quant, int NR, class Emit>
DEVICE void products(const uint8_t* weights, word row_bytes, int outputs, int width, const Activations& x, int rows,
                     int first, int step, uint8_t* ring, Emit emit) {
    constexpr int CHUNK = chunk_bytes<Quant>(), SLOT = slot_bytes<Quant>();
    constexpr int PAIR = rows_together<Quant>(), STAGES = stages<Quant>();
    const int lane = threadIdx.x & 31;
    const int pairs = (outputs + PAIR - 1) / PAIR;
    const int chunks = int((row_bytes + CHUNK - 1) / CHUNK);
    const int units = first < pairs ? (pairs - first + step - 1) / step * chunks : 0;
    const uint32_t ring_address = uint32_t(__cvta_generic_to_shared(ring));

    int fetched = 0, fetch_pair = first, fetch_chunk = 0;
    auto fetch = [&]() {
        if (fetched < units) {
            const int at = fetched % STAGES * PAIR * SLOT;
#pragma unroll
            for (int m = 0; m < PAIR; ++m) {
                const int row = min(PAIR * fetch_pair + m, outputs - 1);
                const word done = word(fetch_chunk) * CHUNK;
                const uintptr_t from = reinterpret_cast<uintptr_t>(weights + row * row_bytes + done);
                const int bytes = int(min(word(CHUNK), row_bytes - done)), shift = int(from & 15);
                const char* source = reinterpret_cast<const char*>(from - shift);
                for (int i = 16 * lane; i < shift + bytes; i += 512) copy_async(ring_address + at + m * SLOT + i, source + i);
            }
            if (++fetch_chunk == chunks) fetch_chunk = 0, fetch_pair += step;
        }
        ++fetched;
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch();

    float total[PAIR][NR];
    int pair = first, chunk = 0;
    for (int unit = 0; unit < units; ++unit) {
        if (chunk == 0) {
#pragma unroll
            for (int m = 0; m < PAIR; ++m)
#pragma unroll
                for (int r = 0; r < NR; ++r) total[m][r] = 0.0f;
        }
        await_copies<STAGES - 2>();
        __syncwarp();
        const uint8_t* slot[PAIR];
#pragma unroll
        for (int m = 0; m < PAIR; ++m) {
            const int row = min(PAIR * pair + m, outputs - 1);
            const uintptr_t from = reinterpret_cast<uintptr_t>(weights + row * row_bytes + word(chunk) * CHUNK);
            slot[m] = ring + (unit % STAGES * PAIR + m) * SLOT + int(from & 15);
        }
        if constexpr (Quant::FORM == FORM_FLOAT)
            float_chunk<Quant, NR>(slot, chunk, width, x, rows, total);
        else
            quantised_chunk<Quant, NR>(slot, chunk, width / 32, x, rows, total);
        __syncwarp();
        fetch();
        if (++chunk == chunks) {
#pragma unroll
            for (int m = 0; m < PAIR; ++m)
#pragma unroll
                for (int r = 0; r < NR; ++r) {
                    const float sum = warp_sum(total[m][r]);
                    if (r < rows && PAIR * pair + m < outputs) emit(PAIR * pair + m, r, sum);
                }
            chunk = 0, pair += step;
        }
    }
    await_copies<0>();
}
