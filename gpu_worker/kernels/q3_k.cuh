// Q3_K for decode steps: a lane takes 128 weights of a row at a time, half of a block, out of shared memory.
//
// Blocks of 110 bytes begin at any even byte, and what a lane wants of one lies in four places. Read word by word from the card's
// memory they kept the first-level cache busier than the arithmetic; so a warp copies what its lanes take next, 16 bytes at a
// time and past that cache, and takes it apart from there. Two such copies take turns.
//
// A part of units.cuh.
#pragma once

// Unit i of a block: of both halves the runs i, i + 2, i + 4, i + 6, which share 16 bytes of low bits; their high bits are in 16
// bytes that the halves share.
//
// A weight is low - 4 * lacking, `lacking` being 1 where the high bit is not set. Neither is shifted to its place: a product
// with bits of a byte where they are is the wanted one times a power of two.
template <>
struct Units<Q3_K> {
    static constexpr bool HAS = true, STAGED = true;
    static constexpr int SIZE = 128, LEAST = 1, BLOCKS = 7, RESIDENT = 2, OPENERS = 384, AHEAD = 2, TERMS = 1;
    struct Raw {
        uint32_t low[2][5], high[5], scales[4];
        uint32_t shift;  // bits of the first word before the block
    };
    struct Weights {
        uint32_t low[2][4], high[2][4];  // of a half: bits 2t, 2t + 1 and bit t of a byte: run t
        int scales[2];                   // int8, that of run t in byte t
        float d;
    };
    struct Part {
        int4 run[2][4];
        float d;
    };
    DEVICE static void fetch(const uint8_t* block, int i, Raw& raw) {
        const uint32_t odd = uint32_t(reinterpret_cast<uintptr_t>(block)) & 2;
        raw.shift = 8 * odd;
        const uint32_t *words = reinterpret_cast<const uint32_t*>(block - odd), *mine = words + 4 * i;
#pragma unroll
        for (int k = 0; k < 5; ++k) raw.high[k] = mine[k], raw.low[0][k] = mine[8 + k], raw.low[1][k] = mine[16 + k];
#pragma unroll
        for (int k = 0; k < 4; ++k) raw.scales[k] = words[24 + k];  // the last has d
    }
    DEVICE static void decode(const Raw& raw, int i, Weights& w) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            w.low[0][k] = __funnelshift_r(raw.low[0][k], raw.low[0][k + 1], raw.shift);
            w.low[1][k] = __funnelshift_r(raw.low[1][k], raw.low[1][k + 1], raw.shift);
            w.high[0][k] = __funnelshift_r(raw.high[k], raw.high[k + 1], raw.shift);
            w.high[1][k] = w.high[0][k] >> 4;
        }
        // Byte i and every second one behind it: the low four bits of the first half's and the last half's; then the high two.
        const uint32_t which = i ? 0x7531 : 0x6420;
        const uint32_t low = __byte_perm(__funnelshift_r(raw.scales[0], raw.scales[1], raw.shift),
                                         __funnelshift_r(raw.scales[1], raw.scales[2], raw.shift), which);
        const uint32_t pairs = __funnelshift_r(raw.scales[2], raw.scales[3], raw.shift);
        const uint32_t high = __byte_perm(pairs, pairs >> 2, which);
        const uint32_t first = (low & 0x0f0f0f0fu) | ((high << 4) & 0x30303030u);
        const uint32_t last = ((low >> 4) & 0x0f0f0f0fu) | (high & 0x30303030u);
        w.scales[0] = int((first + 0x60606060u) ^ 0x80808080u);  // less 32
        w.scales[1] = int((last + 0x60606060u) ^ 0x80808080u);
        w.d = half_bits(uint16_t(raw.scales[3] >> raw.shift));
    }
    // Where the first run of the first half lies: those of a half are every second piece of it, so that the next is 32 bytes to
    // either side, and two more 64 bytes behind these, also where pieces are swizzled; the last half is 128 bytes behind.
    template <bool SWIZZLED>
    DEVICE static int place(int unit) { return place_of_piece<SWIZZLED>(16 * (unit >> 1) + (unit & 1)); }
    template <bool SWIZZLED>
    DEVICE static Part part(const uint8_t* values, const uint8_t* scales, int place) {
        Part x;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int mine = (SWIZZLED ? place ^ 16 * half : place) + 128 * half;
            const int4* even = reinterpret_cast<const int4*>(values + mine);
            const int4* odd = reinterpret_cast<const int4*>(values + (mine ^ 32));
            x.run[half][0] = even[0], x.run[half][1] = odd[0], x.run[half][2] = even[4], x.run[half][3] = odd[4];
        }
        x.d = *reinterpret_cast<const float*>(scales + (place >> 8) * 64);
        return x;
    }
    // 4 to the power of T times the sum of run T of a half.
    template <int T>
    DEVICE static int run_of(const uint32_t (&low)[4], const uint32_t (&high)[4], const int4& x) {
        constexpr uint32_t LOW = 0x03030303u << 2 * T, HIGH = 0x01010101u << T;
        int lacking = __dp4a(int(~high[0] & HIGH), x.x, 0);
        lacking = __dp4a(int(~high[1] & HIGH), x.y, lacking);
        lacking = __dp4a(int(~high[2] & HIGH), x.z, lacking);
        lacking = __dp4a(int(~high[3] & HIGH), x.w, lacking);
        int sum = -(4 << T) * lacking;
        sum = dot_unsigned(low[0] & LOW, x.x, sum), sum = dot_unsigned(low[1] & LOW, x.y, sum);
        return dot_unsigned(low[3] & LOW, x.w, dot_unsigned(low[2] & LOW, x.z, sum));
    }
    DEVICE static void terms(const Weights& w, const Part& x, Term (&terms)[TERMS]) {
        int sum = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // a run's sum fits 16 bits: at most 16 * 4 * 128
            const uint32_t(&low)[4] = w.low[half], (&high)[4] = w.high[half];
            const int4(&run)[4] = x.run[half];
            const uint32_t first = __byte_perm(run_of<0>(low, high, run[0]), run_of<1>(low, high, run[1]) >> 2, 0x5410);
            const uint32_t last = __byte_perm(run_of<2>(low, high, run[2]) >> 4, run_of<3>(low, high, run[3]) >> 6, 0x5410);
            sum = __dp2a_hi(int(last), w.scales[half], __dp2a_lo(int(first), w.scales[half], sum));
        }
        terms[0] = {__fmul_rn(w.d, x.d), sum};
    }
};
