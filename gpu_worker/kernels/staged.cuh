// The loop of units.cuh for a type whose units come by way of shared memory. A part of units.cuh.
#pragma once

// Bytes that one row's lanes take at a time, wherever they begin, some more so that rows lie in different banks, and of the two
// stages of a warp. `ring_bytes` of products.py knows the same.
template <class Quant>
constexpr __host__ __device__ int staged_slot(int bits) {
    return ((1 << bits >> Units<Quant>::LEAST) * Quant::BYTES + 14 + 15) / 16 * 16 + (bits & 1 ? 16 : 32);
}
template <class Quant>
constexpr __host__ __device__ int staged_bytes(int bits) { return 2 * staged_slot<Quant>(bits) * (32 >> bits); }

// See unit_products. `ring`: staged_bytes of shared memory of the warp, a multiple of 16.
template <class Quant, int NR, bool SWIZZLED, int BITS, class From, class XAt, class Ready, class Emit>
DEVICE void staged_products(int first, int step, int end, int width, int rows, uint8_t* ring, From from, XAt x_at, Ready ready,
                            Emit emit) {
    typedef Units<Quant> U;
    constexpr int LANES = 1 << BITS, EACH = 1 << U::LEAST, BYTES = LANES / EACH * Quant::BYTES, STEP = U::SIZE * LANES;
    constexpr int SLOT = staged_slot<Quant>(BITS), STAGE = SLOT * (32 >> BITS), PIECES = (BYTES + 14 + 15) / 16;
    constexpr int FLIP = SWIZZLED && STEP < 512 ? 32 : 0;  // so few elements further pieces are swizzled otherwise
    const int lane = threadIdx.x & (LANES - 1), own = lane & (EACH - 1);
    const int units = width / U::SIZE, turns = (units + LANES - 1) >> BITS, last = units - (turns - 1) * LANES;
    uint8_t* mine = ring + (int(threadIdx.x & 31) >> BITS) * SLOT;

    int fetch_set = first, fetch_left = turns;
    const uint8_t* source = nullptr;
    // To stage `stage`; by how many bytes what is wanted comes after a multiple of 16.
    auto fetch = [&](int stage) {
        int behind = 0;
        if (fetch_set < end) {
            if (fetch_left == turns) source = from(fetch_set);
            behind = int(reinterpret_cast<uintptr_t>(source) & 15);
            const int bytes = (fetch_left > 1 ? BYTES : last / EACH * Quant::BYTES) + behind;
            const uint8_t* begin = source - behind;
#pragma unroll
            for (int k = 0; k < (PIECES + LANES - 1) / LANES; ++k) {
                const int at = 16 * (lane + k * LANES);
                if (at < bytes) copy_async(mine + stage * STAGE + at, begin + at);
            }
            source += BYTES;
            if (--fetch_left == 0) fetch_left = turns, fetch_set += step;
        }
        commit_copies();
        return behind;
    };
    const int begin = U::template place<SWIZZLED>(lane);
    float total[NR];
    int set = first, left = turns, place = begin;
#pragma unroll
    for (int r = 0; r < NR; ++r) total[r] = 0.0f;
    auto use = [&](int stage, int behind) {
        if (left > 1 || lane < last) {
            typename U::Raw raw;
            U::fetch(mine + stage * STAGE + behind + lane / EACH * Quant::BYTES, own, raw);
            add_unit<Quant, NR, SWIZZLED>(raw, own, x_at, set, place, rows, total);
        }
        place = (place + STEP) ^ FLIP;
        if (--left) return;
#pragma unroll
        for (int r = 0; r < NR; ++r) {
            float sum = total[r];
#pragma unroll
            for (int distance = LANES / 2; distance; distance >>= 1) sum += __shfl_xor_sync(~0u, sum, distance);
            if (r < rows) emit(set, r, sum);
            total[r] = 0.0f;
        }
        left = turns, place = begin, set += step;
    };
    int behind[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) behind[s] = fetch(s);
    ready();
    while (set < end)
#pragma unroll
        for (int s = 0; s < 2; ++s)
            if (set < end) {
                await_copies<1>();
                __syncwarp();  // all lanes' copies are there
                use(s, behind[s]);
                __syncwarp();  // nobody reads the stage any more
                behind[s] = fetch(s);
            }
    await_copies<0>();
}
