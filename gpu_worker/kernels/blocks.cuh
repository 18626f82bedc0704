// The quant types' block layouts, taken apart 32 weights ("a group") at a time. Knows no kernel and no activation.
//
// Weight i of a group is  d * scale[i / 16] * (q_i - offset) - dmin * minimum[i / 16], where q_i is byte i of q[0..7].
// HALVES says that the two scales of a group may differ.
// Types with a float minimum (Q4_1, Q5_1) have scale 1, minimum 0 and keep the minimum in `dmin`; it is added.
// Layouts after the block structs of ggml-common.h. Plain C++ apart from a few intrinsics, so that a host compiler can
// test it.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#include "machine.cuh"
#include <cuda_fp16.h>
DEVICE float half_bits(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
#define TABLE static __device__ const
#else
#define TABLE static const
#endif
#include "grids.cuh"

struct Group {
    uint32_t q[8];
    int scale[2];
    int minimum[2];
    float d;
    float dmin;
};

// Whether activations are quantised in blocks of 256 (Q8_K) or 32 (Q8_0, Q8_1), or not at all.
enum Form { FORM_Q8_K, FORM_Q8_0, FORM_Q8_1, FORM_FLOAT };

DEVICE float half_at(const uint8_t* p) { return half_bits(*reinterpret_cast<const uint16_t*>(p)); }

// N little-endian words from an address that is a multiple of ALIGN. With ALIGN 1 or 2 the words around it are read, up to
// four bytes past the end.
template <int ALIGN, int N>
DEVICE void load_words(const uint8_t* p, uint32_t* out) {
    if constexpr (ALIGN % 16 == 0 && N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(p + 4 * i);
            out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
        }
    } else if constexpr (ALIGN % 8 == 0 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(p + 4 * i);
            out[i] = v.x, out[i + 1] = v.y;
        }
    } else if constexpr (ALIGN % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = *reinterpret_cast<const uint32_t*>(p + 4 * i);
    } else {
        const uintptr_t address = reinterpret_cast<uintptr_t>(p);
        const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t(3));
        const uint32_t shift = 8 * (address & 3);
        uint32_t low = words[0];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const uint32_t high = words[i + 1];
            out[i] = __funnelshift_r(low, high, shift);
            low = high;
        }
    }
}

// Four bits to the lowest bits of four bytes.
DEVICE uint32_t spread_bits(uint32_t bits) { return ((bits & 15u) * 0x00204081u) & 0x01010101u; }

// 16 bytes of nibble pairs: low nibbles are weights 0..15, high ones 16..31.
template <int ALIGN>
DEVICE void load_nibbles(const uint8_t* p, uint32_t* q) {
    uint32_t w[4];
    load_words<ALIGN, 4>(p, w);
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = w[i] & 0x0f0f0f0fu, q[i + 4] = (w[i] >> 4) & 0x0f0f0f0fu;
}

// 4-bit codes to the 16 bytes of a table (first lowest) by byte permutation: eight nibbles of w give four low and four high.
struct Codes {
    uint32_t t0, t1, t2, t3;
};
DEVICE void look_up(const Codes t, uint32_t w, uint32_t& low, uint32_t& high) {
    uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t v = w >> (16 * i), at = v & 0x7777u;
        const uint32_t below = __byte_perm(t.t0, t.t1, at), above = __byte_perm(t.t2, t.t3, at);
        half[i] = __byte_perm(below, above, 0x3210u | ((v & 0x8888u) >> 1));
    }
    low = __byte_perm(half[0], half[1], 0x6420u);
    high = __byte_perm(half[0], half[1], 0x7531u);
}
// The non-linear values of IQ4_NL and IQ4_XS.
DEVICE void nonlinear(uint32_t w, uint32_t& low, uint32_t& high) {
    look_up({0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}, w, low, high);
}

DEVICE void plain_scales(Group& g) { g.scale[0] = g.scale[1] = 1, g.minimum[0] = g.minimum[1] = 0, g.dmin = 0.0f; }

struct Q8_0 {
    static constexpr int BLOCK = 32, BYTES = 34, OFFSET = 0;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_0;
    DEVICE static void decode(const uint8_t* b, int, Group& g) {
        plain_scales(g);
        g.d = half_at(b);
        load_words<2, 8>(b + 2, g.q);
    }
};

struct Q4_0 {
    static constexpr int BLOCK = 32, BYTES = 18, OFFSET = 8;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_0;
    DEVICE static void decode(const uint8_t* b, int, Group& g) {
        plain_scales(g);
        g.d = half_at(b);
        load_nibbles<2>(b + 2, g.q);
    }
};

struct Q4_1 {
    static constexpr int BLOCK = 32, BYTES = 20, OFFSET = 0;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_1;
    DEVICE static void decode(const uint8_t* b, int, Group& g) {
        plain_scales(g);
        g.d = half_at(b), g.dmin = half_at(b + 2);
        load_nibbles<4>(b + 4, g.q);
    }
};

DEVICE void fifth_bits(uint32_t bits, uint32_t* q) {
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] |= spread_bits(bits >> (4 * i)) << 4;
}

struct Q5_0 {
    static constexpr int BLOCK = 32, BYTES = 22, OFFSET = 16;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_0;
    DEVICE static void decode(const uint8_t* b, int, Group& g) {
        uint32_t bits;
        plain_scales(g);
        g.d = half_at(b);
        load_words<2, 1>(b + 2, &bits);
        load_nibbles<2>(b + 6, g.q);
        fifth_bits(bits, g.q);
    }
};

struct Q5_1 {
    static constexpr int BLOCK = 32, BYTES = 24, OFFSET = 0;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_1;
    DEVICE static void decode(const uint8_t* b, int, Group& g) {
        plain_scales(g);
        g.d = half_at(b), g.dmin = half_at(b + 2);
        load_nibbles<8>(b + 8, g.q);
        fifth_bits(*reinterpret_cast<const uint32_t*>(b + 4), g.q);
    }
};

struct IQ4_NL {
    static constexpr int BLOCK = 32, BYTES = 18, OFFSET = 0;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_0;
    DEVICE static void decode(const uint8_t* b, int, Group& g) {
        uint32_t w[4];
        plain_scales(g);
        g.d = half_at(b);
        load_words<2, 4>(b + 2, w);
#pragma unroll
        for (int i = 0; i < 4; ++i) nonlinear(w[i], g.q[i], g.q[i + 4]);
    }
};

struct IQ4_XS {
    static constexpr int BLOCK = 256, BYTES = 136, OFFSET = 0;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_K;
    DEVICE static void decode(const uint8_t* b, int j, Group& g) {
        uint32_t w[4];
        plain_scales(g);
        g.d = half_at(b);
        const uint32_t high = *reinterpret_cast<const uint16_t*>(b + 2);
        const int low = (b[4 + j / 2] >> (4 * (j & 1))) & 15;
        g.scale[0] = g.scale[1] = (low | (int((high >> (2 * j)) & 3) << 4)) - 32;
        load_words<8, 4>(b + 8 + 16 * j, w);
#pragma unroll
        for (int i = 0; i < 4; ++i) nonlinear(w[i], g.q[i], g.q[i + 4]);
    }
};

// Codes of four bits are twice a float of two exponent bits and one fraction bit; the scale is 2^(e - 128).
struct MXFP4 {
    static constexpr int BLOCK = 32, BYTES = 17, OFFSET = 0;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_0;
    DEVICE static void decode(const uint8_t* b, int, Group& g) {
        uint32_t w[4];
        plain_scales(g);
        const uint32_t e = b[0];
        g.d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        load_words<1, 4>(b + 1, w);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            look_up({0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}, w[i], g.q[i], g.q[i + 4]);
    }
};

// Four bytes with those negated whose bit is set; none of them may be 0.
DEVICE uint32_t with_signs(uint32_t bytes, uint32_t bits) {
    const uint32_t ones = spread_bits(bits);
    return (bytes ^ ones * 255u) + ones;
}

// Codes of eight bits stand for four values. A word for each 32 of them has four times seven sign bits, the eighth of
// which makes their number even, and the scale above.
struct IQ3_XXS {
    static constexpr int BLOCK = 256, BYTES = 98, OFFSET = 0;
    static constexpr bool MINIMA = false, HALVES = false;
    static constexpr Form FORM = FORM_Q8_K;
    DEVICE static void decode(const uint8_t* b, int j, Group& g) {
        uint32_t codes[2], word;
        plain_scales(g);
        g.d = 0.25f * half_at(b);
        load_words<2, 2>(b + 2 + 8 * j, codes);
        load_words<2, 1>(b + 66 + 4 * j, &word);
        g.scale[0] = g.scale[1] = 2 * int(word >> 28) + 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t signs = (word >> (7 * i)) & 127u;
            signs |= (__popc(signs) & 1u) << 7;
            const uint32_t pair = codes[i / 2] >> (16 * (i & 1));
            g.q[2 * i] = with_signs(GRID_IQ3_XXS[pair & 255u], signs);
            g.q[2 * i + 1] = with_signs(GRID_IQ3_XXS[(pair >> 8) & 255u], signs >> 4);
        }
    }
};

struct Q2_K {
    static constexpr int BLOCK = 256, BYTES = 84, OFFSET = 0;
    static constexpr bool MINIMA = true, HALVES = true;
    static constexpr Form FORM = FORM_Q8_K;
    DEVICE static void decode(const uint8_t* b, int j, Group& g) {
        g.d = half_at(b + 80), g.dmin = half_at(b + 82);
#pragma unroll
        for (int i = 0; i < 2; ++i) g.scale[i] = b[2 * j + i] & 15, g.minimum[i] = b[2 * j + i] >> 4;
        load_words<4, 8>(b + 16 + 32 * (j / 4), g.q);
#pragma unroll
        for (int i = 0; i < 8; ++i) g.q[i] = (g.q[i] >> (2 * (j & 3))) & 0x03030303u;
    }
};

struct Q3_K {
    static constexpr int BLOCK = 256, BYTES = 110, OFFSET = 4;
    static constexpr bool MINIMA = false, HALVES = true;
    static constexpr Form FORM = FORM_Q8_K;
    DEVICE static void decode(const uint8_t* b, int j, Group& g) {
        plain_scales(g);
        g.d = half_at(b + 108);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int k = 2 * j + i;
            const int low = (b[96 + (k & 7)] >> (4 * (k >> 3))) & 15, high = (b[104 + (k & 3)] >> (2 * (k >> 2))) & 3;
            g.scale[i] = (low | (high << 4)) - 32;
        }
        uint32_t mask[8];
        load_words<2, 8>(b, mask);
        load_words<2, 8>(b + 32 + 32 * (j / 4), g.q);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            g.q[i] = ((g.q[i] >> (2 * (j & 3))) & 0x03030303u) | (((mask[i] >> j) & 0x01010101u) << 2);
    }
};

// The 6-bit scales and minima of Q4_K and Q5_K: 12 bytes for 8 groups, those of the last four spread over three bytes.
DEVICE void packed_scales(const uint8_t* s, int j, Group& g) {
    const int a = s[j & 3], b = s[4 + (j & 3)], c = s[8 + (j & 3)];
    g.scale[0] = g.scale[1] = j < 4 ? a & 63 : (c & 15) | ((a >> 2) & 48);
    g.minimum[0] = g.minimum[1] = j < 4 ? b & 63 : (c >> 4) | ((b >> 2) & 48);
}

struct Q4_K {
    static constexpr int BLOCK = 256, BYTES = 144, OFFSET = 0;
    static constexpr bool MINIMA = true, HALVES = false;
    static constexpr Form FORM = FORM_Q8_K;
    DEVICE static void decode(const uint8_t* b, int j, Group& g) {
        g.d = half_at(b), g.dmin = half_at(b + 2);
        packed_scales(b + 4, j, g);
        load_words<16, 8>(b + 16 + 32 * (j / 2), g.q);
#pragma unroll
        for (int i = 0; i < 8; ++i) g.q[i] = (g.q[i] >> (4 * (j & 1))) & 0x0f0f0f0fu;
    }
};

struct Q5_K {
    static constexpr int BLOCK = 256, BYTES = 176, OFFSET = 0;
    static constexpr bool MINIMA = true, HALVES = false;
    static constexpr Form FORM = FORM_Q8_K;
    DEVICE static void decode(const uint8_t* b, int j, Group& g) {
        g.d = half_at(b), g.dmin = half_at(b + 2);
        packed_scales(b + 4, j, g);
        uint32_t high[8];
        load_words<16, 8>(b + 16, high);
        load_words<16, 8>(b + 48 + 32 * (j / 2), g.q);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            g.q[i] = ((g.q[i] >> (4 * (j & 1))) & 0x0f0f0f0fu) | (((high[i] >> j) & 0x01010101u) << 4);
    }
};

struct Q6_K {
    static constexpr int BLOCK = 256, BYTES = 210, OFFSET = 32;
    static constexpr bool MINIMA = false, HALVES = true;
    static constexpr Form FORM = FORM_Q8_K;
    DEVICE static void decode(const uint8_t* b, int j, Group& g) {
        plain_scales(g);
        g.d = half_at(b + 208);
        const int half = j / 4, t = j & 3;
#pragma unroll
        for (int i = 0; i < 2; ++i) g.scale[i] = int(int8_t(b[192 + 2 * j + i]));
        uint32_t high[8];
        load_words<2, 8>(b + 64 * half + 32 * (t & 1), g.q);
        load_words<2, 8>(b + 128 + 32 * half, high);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            g.q[i] = ((g.q[i] >> (4 * (t >> 1))) & 0x0f0f0f0fu) | (((high[i] >> (2 * t)) & 0x03030303u) << 4);
    }
};

// One weight of a group, in the order of operations of ggml's dequantisation.
template <class Quant>
DEVICE float weight_of(const Group& g, int i) {
    const int byte = int((g.q[i / 4] >> (8 * (i & 3))) & 255u);
    const int value = (Quant::OFFSET ? byte - Quant::OFFSET : int(int8_t(byte)));
    const float scaled = (g.d * float(g.scale[i / 16])) * float(value);
    if (Quant::FORM == FORM_Q8_1) return scaled + g.dmin;
    return Quant::MINIMA ? scaled - g.dmin * float(g.minimum[i / 16]) : scaled;
}
