// Products with weights of Q3_K, Q4_K and Q6_K: a lane takes 64 or 128 weights of a row at a time ("a unit": four runs of 16 of a
// block, or eight), so that a block's scales are taken apart once for them. Those of Q4_K and Q6_K go straight from the card's
// memory to registers, those of Q3_K by way of shared memory (q3_k.cuh).
//
// A row has so many lanes, a power of two up to 32, as have at least two units each and of which few are without one in the last
// turn (an eighth of the units; a quarter before rows have the fewest lanes); a warp has as many rows at a time as have room. Lane l of a row
// has the units l, l + lanes, ...: always the same part of a block.
// Lanes are summed at the row's end by a butterfly. The order of the sum depends on the row's length only, neither on the
// number of activation rows nor on which warp works. See products.cuh for the other types.
//
// The loop over units is bound by how many instructions it has, so that whatever changes by a constant from unit to unit is
// added to, and whatever does not change is a lane's own.
#pragma once
#include "products.cuh"
#include "q8_k.cuh"


// Where a row begins; its number and bytes are below 2^32, so that one multiplication does.
DEVICE const uint8_t* row_at(const uint8_t* matrix, int row, word row_bytes) {
    return matrix + word(uint32_t(row)) * uint32_t(row_bytes);
}

template <class Quant>
struct Units {
    static constexpr bool HAS = false, STAGED = false;  // STAGED: they come by way of shared memory
    static constexpr int SIZE = 64, LEAST = 2;  // elements of a unit; units of a block, as a power of two: fewest lanes of a row
    static constexpr int BLOCKS = 7;    // of matmul_1 that a multiprocessor is to hold; `blocks_each` of products.py
    static constexpr int RESIDENT = 2;  // of 512 threads likewise, or of OPENERS of open_experts
    static constexpr int OPENERS = 512;
    static constexpr int AHEAD = 2;     // units of a lane on their way where few rows are short
    static constexpr int TERMS = 1;     // of a unit
};

// Lanes that share a row of so many elements, as a power of two. `rows_of_warp` of products.py knows the same.
template <class Quant>
DEVICE int lane_bits(int width) {
    const int units = width / Units<Quant>::SIZE;
    for (int bits = 5; bits > Units<Quant>::LEAST; --bits) {
        const int turns = (units + (1 << bits) - 1) >> bits, most = bits > Units<Quant>::LEAST + 1 ? 9 : 10;
        if (turns > 1 && 8 * (turns << bits) <= most * units) return bits;
    }
    return Units<Quant>::LEAST;
}
// Rows that a warp has at a time, as a power of two; which of them a lane's is, and whether the lane is its first.
template <class Quant>
DEVICE int row_bits(int width) { return 5 - lane_bits<Quant>(width); }
template <class Quant>
DEVICE int row_of_lane(int width) { return int(threadIdx.x & 31) >> lane_bits<Quant>(width); }
template <class Quant>
DEVICE bool leads_row(int width) { return (threadIdx.x & ((1 << lane_bits<Quant>(width)) - 1)) == 0; }

// What a unit adds to its lane's sum: scale * sum, `scale` rounded, the product and the sum rounded once.
struct Term {
    float scale;
    int sum;  // below 2^30
};
template <int N>
DEVICE float add_terms(const Term (&terms)[N], float total) {
#pragma unroll
    for (int i = 0; i < N; ++i) total = __fmaf_rn(terms[i].scale, float(terms[i].sum), total);
    return total;
}

// Where the first of the four runs of unit 2h + i lies, which are every second piece of a half block: the next is 32 bytes to
// either side, and two more 64 bytes behind these, also where pieces are swizzled.
template <bool SWIZZLED>
DEVICE int place_of_run(int unit) { return place_of_piece<SWIZZLED>(8 * (unit >> 1) + (unit & 1)); }

DEVICE int dot16(uint4 q, int4 x, int sum) {
    return __dp4a(int(q.w), x.w, __dp4a(int(q.z), x.z, __dp4a(int(q.y), x.y, __dp4a(int(q.x), x.x, sum))));
}

// Unit j of a block: groups 2j (low nibbles of 32 bytes) and 2j + 1 (high nibbles).
template <>
struct Units<Q4_K> {
    static constexpr bool HAS = true, STAGED = false;
    static constexpr int SIZE = 64, LEAST = 2, BLOCKS = 5, RESIDENT = 2, OPENERS = 512, AHEAD = 3, TERMS = 2;
    struct Raw {
        uint4 head, first, second;
    };
    struct Weights {
        uint4 low[2], high[2];  // `high` is 16 times its values
        int scale[2];
        uint32_t minima;  // bytes: that of the first group twice, that of the second twice
        float d, dmin;
    };
    struct Part {
        int4 run[4];
        int4 scales;
    };
    DEVICE static void fetch(const uint8_t* block, int quarter, Raw& raw) {
        const uint4* quants = reinterpret_cast<const uint4*>(block + 16 + 32 * quarter);
        raw.first = __ldcs(quants), raw.second = __ldcs(quants + 1);
        raw.head = __ldcs(reinterpret_cast<const uint4*>(block));
    }
    DEVICE static uint4 both(uint4 x, uint32_t mask) {
        return make_uint4(x.x & mask, x.y & mask, x.z & mask, x.w & mask);
    }
    DEVICE static void decode(const Raw& raw, int quarter, Weights& w) {
        const uint32_t a = raw.head.y, b = raw.head.z, c = raw.head.w;
        const bool upper = quarter & 2;
        const uint32_t scales = upper ? (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u) : a & 0x3f3f3f3fu;
        const uint32_t minima = upper ? ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u) : b & 0x3f3f3f3fu;
        const int shift = 16 * (quarter & 1);
        w.scale[0] = int((scales >> shift) & 255u), w.scale[1] = int((scales >> shift) >> 8 & 255u);
        w.minima = __byte_perm(minima >> shift, 0, 0x1100);
        w.d = half_bits(uint16_t(raw.head.x)), w.dmin = half_bits(uint16_t(raw.head.x >> 16));
        w.low[0] = both(raw.first, 0x0f0f0f0fu), w.low[1] = both(raw.second, 0x0f0f0f0fu);
        w.high[0] = both(raw.first, 0xf0f0f0f0u), w.high[1] = both(raw.second, 0xf0f0f0f0u);
    }
    // Where the first of its pieces is, and how to the others: they lie around it within 64 bytes.
    template <bool SWIZZLED>
    DEVICE static int place(int unit) { return 64 * unit + (SWIZZLED ? 16 * (unit >> 1 & 3) : 0); }
    template <bool SWIZZLED>
    DEVICE static Part part(const uint8_t* values, const uint8_t* scales, int place) {
        Part x;
#pragma unroll
        for (int k = 0; k < 4; ++k) x.run[k] = *reinterpret_cast<const int4*>(values + (place ^ 16 * k));
        x.scales = *reinterpret_cast<const int4*>(scales + (place >> 6) * 16);
        return x;
    }
    DEVICE static void terms(const Weights& w, const Part& x, Term (&terms)[TERMS]) {
        const int low = dot16(w.low[1], x.run[1], dot16(w.low[0], x.run[0], 0));
        int high = 0;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            high = dot_unsigned(w.high[k].x, x.run[2 + k].x, high), high = dot_unsigned(w.high[k].y, x.run[2 + k].y, high);
            high = dot_unsigned(w.high[k].z, x.run[2 + k].z, high), high = dot_unsigned(w.high[k].w, x.run[2 + k].w, high);
        }
        const int sum = w.scale[0] * low + w.scale[1] * (high >> 4);
        const int least = __dp2a_lo(x.scales.y, int(w.minima), __dp2a_hi(x.scales.w, int(w.minima), 0));
        const float dx = __int_as_float(x.scales.x);
        terms[0] = {__fmul_rn(w.d, dx), sum}, terms[1] = {-__fmul_rn(w.dmin, dx), least};
    }
};

// Unit 2h + i of a block: of its half h the runs i, i + 2, i + 4, i + 6, which share 16 bytes of high bits. Blocks begin at
// any even byte, so what surrounds 16 bytes is read and shifted.
template <>
struct Units<Q6_K> {
    static constexpr bool HAS = true, STAGED = false;
    static constexpr int SIZE = 64, LEAST = 2, BLOCKS = 4, RESIDENT = 1, OPENERS = 512, AHEAD = 2, TERMS = 1;
    struct Raw {
        uint4 around[3][2];
        uint32_t scales[3];
        uint32_t d, shift;  // `shift`: bytes of the block past a multiple of 16
    };
    struct Weights {
        uint4 run[4];
        int scale[4];
        float d;
    };
    struct Part {
        int4 run[4];
        int sum[4];
        float d;
    };
    DEVICE static void fetch(const uint8_t* block, int quarter, Raw& raw) {
        const int half = quarter >> 1, i = quarter & 1;
        raw.shift = uint32_t(reinterpret_cast<uintptr_t>(block) & 15);
        const uint8_t* before = block - raw.shift;
        const uint4* low = reinterpret_cast<const uint4*>(before + 64 * half + 16 * i);
        const uint4* high = reinterpret_cast<const uint4*>(before + 128 + 32 * half + 16 * i);
        raw.around[0][0] = __ldcs(low), raw.around[0][1] = __ldcs(low + 1);
        raw.around[1][0] = __ldcs(low + 2), raw.around[1][1] = __ldcs(low + 3);
        raw.around[2][0] = __ldcs(high), raw.around[2][1] = __ldcs(high + 1);
        const uint8_t* scales = block + 192 + 8 * half;
        const int odd = int(raw.shift & 2);
        const uint32_t* words = reinterpret_cast<const uint32_t*>(scales - odd);
        raw.scales[0] = words[0], raw.scales[1] = words[1], raw.scales[2] = words[odd ? 2 : 1];
        raw.d = *reinterpret_cast<const uint16_t*>(block + 208);
    }
    // 16 bytes that begin `shift` (even) bytes into 32.
    DEVICE static uint4 shifted(const uint4 (&around)[2], uint32_t shift) {
        uint32_t v[8] = {around[0].x, around[0].y, around[0].z, around[0].w,
                         around[1].x, around[1].y, around[1].z, around[1].w};
#pragma unroll
        for (int k = 0; k < 6; ++k) v[k] = shift & 8 ? v[k + 2] : v[k];
#pragma unroll
        for (int k = 0; k < 5; ++k) v[k] = shift & 4 ? v[k + 1] : v[k];
        const uint32_t bits = 8 * (shift & 2);
        return make_uint4(__funnelshift_r(v[0], v[1], bits), __funnelshift_r(v[1], v[2], bits),
                          __funnelshift_r(v[2], v[3], bits), __funnelshift_r(v[3], v[4], bits));
    }
    DEVICE static void decode(const Raw& raw, int quarter, Weights& w) {
        const uint4 a = shifted(raw.around[0], raw.shift), b = shifted(raw.around[1], raw.shift);
        const uint4 q = shifted(raw.around[2], raw.shift);
#define RUNS(C)                                                                                                        \
    w.run[0].C = (a.C & 0x0f0f0f0fu) | ((q.C << 4) & 0x30303030u);                                                     \
    w.run[1].C = (b.C & 0x0f0f0f0fu) | ((q.C << 2) & 0x30303030u);                                                     \
    w.run[2].C = ((a.C >> 4) & 0x0f0f0f0fu) | (q.C & 0x30303030u);                                                     \
    w.run[3].C = ((b.C >> 4) & 0x0f0f0f0fu) | ((q.C >> 2) & 0x30303030u);
        RUNS(x) RUNS(y) RUNS(z) RUNS(w)
#undef RUNS
        const uint32_t bits = 8 * (raw.shift & 2), byte = 8 * (quarter & 1);
        const uint32_t first = __funnelshift_r(raw.scales[0], raw.scales[1], bits) >> byte;
        const uint32_t last = __funnelshift_r(raw.scales[1], raw.scales[2], bits) >> byte;
        w.scale[0] = int8_t(first), w.scale[1] = int8_t(first >> 16), w.scale[2] = int8_t(last), w.scale[3] = int8_t(last >> 16);
        w.d = half_bits(uint16_t(raw.d));
    }
    template <bool SWIZZLED>
    DEVICE static int place(int unit) { return place_of_run<SWIZZLED>(unit); }
    template <bool SWIZZLED>
    DEVICE static Part part(const uint8_t* values, const uint8_t* scales, int place) {
        Part x;
        const int i = threadIdx.x & 1, odd = place ^ 32;
        x.run[0] = *reinterpret_cast<const int4*>(values + place), x.run[1] = *reinterpret_cast<const int4*>(values + odd);
        x.run[2] = *reinterpret_cast<const int4*>(values + place + 64);
        x.run[3] = *reinterpret_cast<const int4*>(values + odd + 64);
        const int4* groups = reinterpret_cast<const int4*>(scales + (place >> 7) * 32);
        const int4 a = groups[0], b = groups[1];
        x.d = __int_as_float(a.x);
        const int sums[4] = {a.y, a.w, b.y, b.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) x.sum[k] = i ? sums[k] >> 16 : int(short(sums[k] & 0xffff));
        return x;
    }
    DEVICE static void terms(const Weights& w, const Part& x, Term (&terms)[TERMS]) {
        int sum = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum += w.scale[k] * dot16(w.run[k], x.run[k], -Q6_K::OFFSET * x.sum[k]);
        terms[0] = {__fmul_rn(w.d, x.d), sum};
    }
};

#include "q3_k.cuh"

// Adds a unit of a set's rows to its lane's sums for the rows of activations, of which the unit's begin at `place`.
template <class Quant, int NR, bool SWIZZLED, class XAt>
DEVICE void add_unit(const typename Units<Quant>::Raw& raw, int part, const XAt& x_at, int set, int place, int rows,
                     float (&total)[NR]) {
    typedef Units<Quant> U;
    typename U::Weights w;
    U::decode(raw, part, w);
    const Activations x = x_at(set);
#pragma unroll
    for (int r = 0; r < NR; ++r) {
        const word at = NR == 1 ? 0 : x.stride * (r < rows ? r : rows - 1);
        Term terms[U::TERMS];
        U::terms(w, U::template part<SWIZZLED>(x.values + at, x.scales + at, place), terms);
        total[r] = add_terms(terms, total[r]);
    }
}

#include "staged.cuh"

// Bytes of shared memory of a warp for rows of these types.
template <class Quant>
DEVICE int ring_of_units(int width) {
    if constexpr (Units<Quant>::STAGED) return staged_bytes<Quant>(lane_bits<Quant>(width));
    return 0;
}

// emit(set, row, sum) for the activation rows of the sets first, first + step, ... below `end`, called by all lanes with the
// sum of their weight row, which begins at from(set), by the activations x_at(set). `ready` is called once, before
// activations are read; weights are read before it. DEPTH units of a lane are on their way. BITS: lane_bits(width), or 0.
template <class Quant, int NR, bool SWIZZLED, int DEPTH, int BITS, class From, class XAt, class Ready, class Emit>
DEVICE void unit_products_of(int first, int step, int end, int width, int rows, From from, XAt x_at, Ready ready, Emit emit) {
    typedef Units<Quant> U;
    const int bits = BITS ? BITS : lane_bits<Quant>(width), lanes = 1 << bits, lane = threadIdx.x & (lanes - 1), quarter = lane & 3;
    const int units = width / U::SIZE, turns = (units + lanes - 1) >> bits;
    const bool in_last = lane < units - (turns - 1) * lanes;  // whether the lane has a unit in a row's last turn
    const int step_bytes = lanes / 4 * Quant::BYTES, step_place = U::SIZE * lanes;
    const int flip = SWIZZLED && lanes == 4 ? 32 : 0;  // four units further the pieces are swizzled otherwise

    int fetch_set = first, fetch_left = turns;
    const uint8_t* source = nullptr;
    auto fetch = [&](typename U::Raw& raw) {
        if (fetch_set >= end) return;
        if (fetch_left == turns) source = from(fetch_set) + lane / 4 * Quant::BYTES;
        if (fetch_left > 1 || in_last) U::fetch(source, quarter, raw);
        source += step_bytes;
        if (--fetch_left == 0) fetch_left = turns, fetch_set += step;
    };
    const int begin = U::template place<SWIZZLED>(lane);
    float total[NR];
    int set = first, left = turns, place = begin;
#pragma unroll
    for (int r = 0; r < NR; ++r) total[r] = 0.0f;
    auto use = [&](typename U::Raw& raw) {
        if (left > 1 || in_last) {
            add_unit<Quant, NR, SWIZZLED>(raw, quarter, x_at, set, place, rows, total);
        }
        place = (place + step_place) ^ flip;
        if (--left) return;
#pragma unroll
        for (int r = 0; r < NR; ++r) {
            float sum = total[r];
            if (bits > 4) sum += __shfl_xor_sync(~0u, sum, 16);
            if (bits > 3) sum += __shfl_xor_sync(~0u, sum, 8);
            if (bits > 2) sum += __shfl_xor_sync(~0u, sum, 4);
            sum += __shfl_xor_sync(~0u, sum, 2);
            sum += __shfl_xor_sync(~0u, sum, 1);
            if (r < rows) emit(set, r, sum);
            total[r] = 0.0f;
        }
        left = turns, place = begin, set += step;
    };
    typename U::Raw raw[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) fetch(raw[d]);
    ready();
    while (set < end)
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (set < end) use(raw[d]), fetch(raw[d]);
}

template <int N>
struct Bits {
    static constexpr int VALUE = N;
};

// The same by as many loops as a row can have lanes, so that all but the row itself is known when it is compiled; where registers
// are many already and rows many, by one. `ring`: ring_of_units of shared memory of the warp.
template <class Quant, int NR, bool SWIZZLED, int DEPTH = 2, class From, class XAt, class Ready, class Emit>
DEVICE void unit_products(int first, int step, int end, int width, int rows, uint8_t* ring, From from, XAt x_at, Ready ready,
                          Emit emit) {
    typedef Units<Quant> U;
    if constexpr (!U::STAGED && (NR > 1 || U::RESIDENT == 1)) {
        unit_products_of<Quant, NR, SWIZZLED, DEPTH, 0>(first, step, end, width, rows, from, x_at, ready, emit);
    } else {
        auto with = [&](auto bits) {
            constexpr int BITS = decltype(bits)::VALUE;
            if constexpr (U::STAGED)
                staged_products<Quant, NR, SWIZZLED, BITS>(first, step, end, width, rows, ring, from, x_at, ready, emit);
            else
                unit_products_of<Quant, NR, SWIZZLED, DEPTH, BITS>(first, step, end, width, rows, from, x_at, ready, emit);
        };
        switch (lane_bits<Quant>(width)) {
            case 5: return with(Bits<5>());
            case 4: return with(Bits<4>());
            case 3: return with(Bits<3>());
            case 2: return with(Bits<2>());
            default: return with(Bits<U::LEAST>());
        }
    }
}
