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
#include "machine.cuh"
#include <cuda_bf16.h>

typedef long long word;

constexpr int WARPS = 4;

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
    DEVICE static float rounded(float x) { return x; }  // as activations of this type are
};
struct F16 {
    typedef __half Element;
    static constexpr int BYTES = 2;
    static constexpr Form FORM = FORM_FLOAT;
    DEVICE static float value(__half x) { return __half2float(x); }
    DEVICE static float rounded(float x) { return __half2float(__float2half_rn(x)); }
};
struct BF16 {
    typedef __nv_bfloat16 Element;
    static constexpr int BYTES = 2;
    static constexpr Form FORM = FORM_FLOAT;
    DEVICE static float value(__nv_bfloat16 x) { return __bfloat162float(x); }
    DEVICE static float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
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

// How far an address is past a multiple of 16: nowhere if all of the type's blocks are such multiples.
template <class Quant>
DEVICE int shift_of(const uint8_t* p) {
    return Quant::FORM != FORM_FLOAT && Quant::BYTES % 16 == 0 ? 0 : int(reinterpret_cast<uintptr_t>(p) & 15);
}

struct Activations {
    const uint8_t* values;  // int8, or f32 for float types
    const uint8_t* scales;
    word stride;  // bytes between rows, of both
};

// What a lane needs of one activation row for one chunk: the 32 values of its group, their scale and sums.
struct LanePart {
    int4 a, b;
    int2 scales;
};
DEVICE LanePart lane_part(const Activations& x, word row, int group) {
    return {*reinterpret_cast<const int4*>(x.values + row + 32 * group),
            *reinterpret_cast<const int4*>(x.values + row + 32 * group + 16),
            *reinterpret_cast<const int2*>(x.scales + row + 8 * group)};
}

// One chunk of two weight rows against NR activation rows, quantised; with one row its part was loaded before.
template <class Quant, int NR>
DEVICE void quantised_chunk(const uint8_t* const* slot, int chunk, int groups, const Activations& x, const LanePart& only,
                            int rows, float (&total)[rows_together<Quant>()][NR]) {
    const int lane = threadIdx.x & 31, group = chunk * 32 + lane;
    if (group >= groups) return;
    constexpr int EACH = Quant::BLOCK / 32, PAIR = rows_together<Quant>();
    Group g[PAIR];
#pragma unroll
    for (int m = 0; m < PAIR; ++m) Quant::decode(slot[m] + lane / EACH * Quant::BYTES, lane % EACH, g[m]);
#pragma unroll
    for (int r = 0; r < NR; ++r) {
        const LanePart part = NR == 1 ? only : lane_part(x, x.stride * (r < rows ? r : rows - 1), group);
        const int v[8] = {part.a.x, part.a.y, part.a.z, part.a.w, part.b.x, part.b.y, part.b.z, part.b.w};
        const float dx = __int_as_float(part.scales.x);
        const int first = int(short(part.scales.y & 0xffff)), last = part.scales.y >> 16;
#pragma unroll
        for (int m = 0; m < PAIR; ++m) {
            int low = 0, high = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low = __dp4a(int(g[m].q[i]), v[i], low);
                high = __dp4a(int(g[m].q[i + 4]), v[i + 4], high);
            }
            if (Quant::OFFSET) low -= Quant::OFFSET * first, high -= Quant::OFFSET * last;
            const int sum = Quant::HALVES ? g[m].scale[0] * low + g[m].scale[1] * high : g[m].scale[0] * (low + high);
            total[m][r] = __fmaf_rn(__fmul_rn(g[m].d, dx), float(sum), total[m][r]);
            if (Quant::MINIMA) {
                const int least = Quant::HALVES ? g[m].minimum[0] * first + g[m].minimum[1] * last
                                                : g[m].minimum[0] * (first + last);
                total[m][r] = __fmaf_rn(-__fmul_rn(g[m].dmin, dx), float(least), total[m][r]);
            }
            if (Quant::FORM == FORM_Q8_1)
                total[m][r] = __fmaf_rn(g[m].dmin, __int_as_float(part.scales.y), total[m][r]);
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

// Rows of a float type whose rows are multiples of 16 bytes: a lane reads 16 bytes at a time, eight of them on their way.
template <class Quant, int NR, class Emit>
DEVICE void float_products(const uint8_t* weights, word row_bytes, int outputs, int width, const Activations& x, int rows,
                           int first, int step, Emit emit) {
    typedef typename Quant::Element Element;
    constexpr int EACH = 16 / Quant::BYTES, BATCH = 8;
    const int lane = threadIdx.x & 31, pieces = width / EACH;
    for (int output = first; output < outputs; output += step) {
        const uint4* row = reinterpret_cast<const uint4*>(weights + output * row_bytes);
        float total[NR] = {};
        for (int from = lane; from < pieces; from += 32 * BATCH) {
            union {
                uint4 raw;
                Element element[EACH];
            } w[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                w[i].raw = from + 32 * i < pieces ? __ldcs(row + from + 32 * i) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (from + 32 * i >= pieces) break;
#pragma unroll
                for (int r = 0; r < NR; ++r) {
                    const uint8_t* mine = x.values + x.stride * (NR == 1 || r < rows ? r : rows - 1);
                    const float4* values = reinterpret_cast<const float4*>(mine) + (from + 32 * i) * (EACH / 4);
#pragma unroll
                    for (int e = 0; e < EACH; e += 4) {
                        const float4 v = values[e / 4];
                        total[r] = __fmaf_rn(Quant::value(w[i].element[e]), v.x, total[r]);
                        total[r] = __fmaf_rn(Quant::value(w[i].element[e + 1]), v.y, total[r]);
                        total[r] = __fmaf_rn(Quant::value(w[i].element[e + 2]), v.z, total[r]);
                        total[r] = __fmaf_rn(Quant::value(w[i].element[e + 3]), v.w, total[r]);
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < NR; ++r) {
            const float sum = warp_sum(total[r]);
            if (r < rows) emit(output, r, sum);
        }
    }
}

// emit(u, m, row, sum) for sets u = 0 .. count - 1 of PAIR weight rows, m = 0 .. PAIR - 1, which begin at row_at(u, m),
// with the activations x_at(u); called by all lanes of a warp. `ready` is called once, before activations are read;
// weights are read before it.
template <class Quant, int NR, class RowAt, class XAt, class Ready, class Emit>
DEVICE void products_of(int count, word row_bytes, int width, int rows, uint8_t* ring, RowAt row_at, XAt x_at, Ready ready,
                        Emit emit) {
    constexpr int CHUNK = chunk_bytes<Quant>(), SLOT = slot_bytes<Quant>();
    constexpr int PAIR = rows_together<Quant>(), STAGES = stages<Quant>();
    const int lane = threadIdx.x & 31;
    const int chunks = int((row_bytes + CHUNK - 1) / CHUNK);
    const int units = count * chunks;

    // where the next chunk of each row comes from
    int fetched = 0, fetch_set = 0, fetch_left = int(row_bytes), into = 0;
    const uint8_t* source[PAIR];
    auto begin_rows = [&]() {
#pragma unroll
        for (int m = 0; m < PAIR; ++m) source[m] = row_at(fetch_set, m);
    };
    auto fetch = [&]() {
        if (fetched < units) {
            if (fetch_left == int(row_bytes)) begin_rows();
            const int bytes = min(CHUNK, fetch_left);
#pragma unroll
            for (int m = 0; m < PAIR; ++m) {
                const int shift = shift_of<Quant>(source[m]);
                uint8_t* to = ring + into + m * SLOT;
                const uint8_t* from = source[m] - shift;
#pragma unroll
                for (int k = 0; k < SLOT; k += 512) {
                    const int i = k + 16 * lane;
                    if (i < shift + bytes) copy_async(to + i, from + i);
                }
                source[m] += CHUNK;
            }
            into = into == (STAGES - 1) * PAIR * SLOT ? 0 : into + PAIR * SLOT;
            if ((fetch_left -= CHUNK) <= 0) fetch_left = int(row_bytes), ++fetch_set;
        }
        ++fetched;
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch();
    ready();

    constexpr bool ONE = NR == 1 && Quant::FORM != FORM_FLOAT;
    LanePart next = {};
    if constexpr (ONE)
        if (units && 32 * lane < width) next = lane_part(x_at(0), 0, lane);
    float total[PAIR][NR];
    int set = 0, chunk = 0, out_of = 0;
    for (int unit = 0; unit < units; ++unit) {
        if (chunk == 0) {
#pragma unroll
            for (int m = 0; m < PAIR; ++m)
#pragma unroll
                for (int r = 0; r < NR; ++r) total[m][r] = 0.0f;
        }
        const LanePart part = next;
        if constexpr (ONE) {
            const bool last = chunk + 1 == chunks;
            const int then = last ? set + 1 : set, group = (last ? 0 : chunk + 1) * 32 + lane;
            if (unit + 1 < units && 32 * group < width) next = lane_part(x_at(then), 0, group);
        }
        await_copies<STAGES - 2>();
        __syncwarp();
        const uint8_t* slot[PAIR];
#pragma unroll
        for (int m = 0; m < PAIR; ++m) {
            const uint32_t from = uint32_t(reinterpret_cast<uintptr_t>(row_at(set, m))) + chunk * CHUNK;
            slot[m] = ring + out_of + m * SLOT + shift_of<Quant>(reinterpret_cast<const uint8_t*>(uintptr_t(from)));
        }
        out_of = out_of == (STAGES - 1) * PAIR * SLOT ? 0 : out_of + PAIR * SLOT;
        if constexpr (Quant::FORM == FORM_FLOAT)
            float_chunk<Quant, NR>(slot, chunk, width, x_at(set), rows, total);
        else
            quantised_chunk<Quant, NR>(slot, chunk, width / 32, x_at(set), part, rows, total);
        __syncwarp();
        fetch();
        if (++chunk == chunks) {
#pragma unroll
            for (int m = 0; m < PAIR; ++m)
#pragma unroll
                for (int r = 0; r < NR; ++r) {
                    const float sum = warp_sum(total[m][r]);
                    if (r < rows) emit(set, m, r, sum);
                }
            chunk = 0, ++set;
        }
    }
    await_copies<0>();
}

// emit(output, row, sum) for the weight rows PAIR * p and after, of p = first, first + step, ... ; see products_of.
template <class Quant, int NR, class Ready, class Emit>
DEVICE void products(const uint8_t* weights, word row_bytes, int outputs, int width, const Activations& x, int rows,
                     int first, int step, uint8_t* ring, Ready ready, Emit emit) {
    constexpr int PAIR = rows_together<Quant>();
    if constexpr (Quant::FORM == FORM_FLOAT) {
        const uintptr_t places = reinterpret_cast<uintptr_t>(weights) | reinterpret_cast<uintptr_t>(x.values);
        if (((places | row_bytes | x.stride) & 15) == 0) {
            ready();
            return float_products<Quant, NR>(weights, row_bytes, outputs, width, x, rows, first, step, emit);
        }
    }
    const int pairs = (outputs + PAIR - 1) / PAIR;
    products_of<Quant, NR>(
        first < pairs ? (pairs - first + step - 1) / step : 0, row_bytes, width, rows, ring,
        [&](int set, int m) { return weights + min(PAIR * (first + set * step) + m, outputs - 1) * row_bytes; },
        [&](int) -> const Activations& { return x; }, ready,
        [&](int set, int m, int r, float sum) {
            const int output = PAIR * (first + set * step) + m;
            if (output < outputs) emit(output, r, sum);
        });
}
