// gpu_worker/kernels/blocks.cuh for a host compiler: its few intrinsics, and one function a quant type.
#include <cmath>
#include <cstdint>
#include <cstring>

#define DEVICE inline

static float half_bits(uint16_t bits) {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 0) return sign * std::ldexp(float(fraction), -24);
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * std::ldexp(float(fraction + 1024), exponent - 25);
}
static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return uint32_t(((uint64_t(high) << 32) | low) >> (shift & 31));
}
static uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = (uint64_t(y) << 32) | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= uint32_t((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
    return out;
}
static float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static int __popc(uint32_t bits) { return __builtin_popcount(bits); }
struct uint4 { uint32_t x, y, z, w; };
struct uint2 { uint32_t x, y; };

#include "blocks.cuh"

template <class Quant>
static void decode_row(const uint8_t* row, int groups, float* out) {
    constexpr int EACH = Quant::BLOCK / 32;
    for (int i = 0; i < groups; ++i) {
        Group g;
        Quant::decode(row + i / EACH * Quant::BYTES, i % EACH, g);
        for (int k = 0; k < 32; ++k) out[32 * i + k] = weight_of<Quant>(g, k);
    }
}

#define TYPE(Q) \
    extern "C" void decode_##Q(const uint8_t* row, int groups, float* out) { decode_row<Q>(row, groups, out); }
TYPE(Q8_0) TYPE(Q4_0) TYPE(Q4_1) TYPE(Q5_0) TYPE(Q5_1) TYPE(IQ4_NL) TYPE(MXFP4)
TYPE(IQ3_XXS) TYPE(IQ4_XS) TYPE(Q2_K) TYPE(Q3_K) TYPE(Q4_K) TYPE(Q5_K) TYPE(Q6_K)
