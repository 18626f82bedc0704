// How a sublayer reads the residual copies of a row, in one launch: the product that makes the mix's logits, op HyperMix and,
// if it comes next, op HyperCollapse. A part of matmul.cu.
//
// No block sees the whole row, which would take longer than all the rest. A block rounds a chunk of it and multiplies that
// with the same chunk of every weight row; what comes out is handed on term by term, since a logit's terms are summed in
// the order of the row (units.cuh). Those who sum them wait in later blocks: whoever waits is on the card after all for
// whom it waits.
//
// A word that is handed on is its own flag: its upper half is not 0, and the last who read it makes it 0 again.
#pragma once
#include "hyper.cuh"
#include "units.cuh"

#ifndef EMULATED
// A word of the card's memory between blocks, without any order with the rest of memory.
DEVICE void tell(word* p, word value) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DEVICE word heard(const word* p) {
    word value;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
#endif

constexpr int READERS = 24;                       // warps that sum a logit each; 24 logits are those of four copies
constexpr int READ_THREADS = 32 * (READERS + 1);  // the last warp sums squares
constexpr int CHUNK = 1024;  // elements; a thread has one unit of it: at most 50 logits
constexpr int SUMS = MIX_THREADS / 32;  // sums of squares: one for each warp of hyper_mix, in its order

// What happens to a mix of this launch, or of an earlier one, at once.
struct Collapse {
    const float* pre;  // null: of this mix
    word pre_row;
    float* out;  // null: nothing is collapsed
    word out_row, width;
};

DEVICE word word_of(float value, int more) { return word(uint64_t(uint32_t(more)) << 32 | __float_as_uint(value)); }
DEVICE float value_of(word held) { return __uint_as_float(uint32_t(held)); }
DEVICE bool arrived(word held) { return (held >> 32) != 0; }

// The words of a row: how many of those who read the shared ones have done so, the sums of squares, and for each logit the
// terms of all units. Sums and the terms of `pre` are read by all blocks that wait, if they collapse with this mix.
struct ReadWords {
    word* all;
    int units, terms;

    DEVICE unsigned* readers() const { return reinterpret_cast<unsigned*>(all); }
    DEVICE word* sums() const { return all + 1; }
    DEVICE word* terms_of(int logit) const { return all + 1 + SUMS + logit * terms * units; }
};

// The squares that warp `chain` of hyper_mix sums. By all lanes of a warp, so many loads of each on their way.
template <int AT_ONCE>
DEVICE void tell_squares(const Mixing& mix, const float* streams, int chain, const ReadWords& words) {
    const int elements = int(mix.elements);
    float squares = 0.0f;
    for (int from = 32 * chain + int(threadIdx.x & 31); from < elements; from += AT_ONCE * MIX_THREADS) {
        float value[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            value[j] = from + j * MIX_THREADS < elements ? streams[from + j * MIX_THREADS] : 0.0f;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) squares = fmaf(value[j], value[j], squares);
    }
    squares = warp_sum(squares);
    if ((threadIdx.x & 31) == 0) tell(words.sums() + chain, word_of(squares, 1));
}

// A chunk's terms of all logits, and squares.
template <class Quant>
DEVICE void tell_terms(const uint8_t* weights, word row_bytes, int logits, const Mixing& mix, int row, int chunks,
                       const ReadWords& words) {
    typedef Units<Quant> U;
    constexpr int UNITS = CHUNK / U::SIZE, EACH = 1 << U::LEAST;  // of a chunk, of a block
    __shared__ __align__(16) uint8_t rounded[CHUNK / 4 * 5];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int chain = int(blockIdx.x) + chunks * (READERS - warp);
    const float* streams = mix.streams + row * mix.streams_row;
    if (256 * warp >= CHUNK && 32 / UNITS * warp >= logits) {  // nothing else to do
        await_previous();
        if (chain < SUMS) tell_squares<40>(mix, streams, chain, words);
        __syncthreads();
        return;
    }
    const int own = threadIdx.x % UNITS, unit = UNITS * int(blockIdx.x) + own, part = own & (EACH - 1);
    const int logit = threadIdx.x / UNITS;
    const bool mine = logit < logits && unit < words.units;
    typename U::Raw raw;
    if (mine) U::fetch(row_at(weights, logit, row_bytes) + unit / EACH * Quant::BYTES, part, raw);
    await_previous();
    const int first = CHUNK * int(blockIdx.x) + 256 * warp;
    if (256 * warp < CHUNK && first < mix.elements) {
        const float4* source = reinterpret_cast<const float4*>(streams + first + 8 * lane);
        const float4 a = source[0], b = source[1];
        const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        write_q8_k<true>(v, rounded + 256 * warp, rounded + CHUNK + 64 * warp, warp);
    }
    __syncthreads();
    if (mine) {
        typename U::Weights w;
        U::decode(raw, part, w);
        Term terms[U::TERMS];
        U::terms(w, U::template part<true>(rounded, rounded + CHUNK, U::template place<true>(own)), terms);
#pragma unroll
        for (int t = 0; t < U::TERMS; ++t)
            tell(words.terms_of(logit) + t * words.units + unit, word_of(terms[t].scale, 2 * terms[t].sum + 1));
    }
    if (chain < SUMS) tell_squares<8>(mix, streams, chain, words);  // of short rows
}

// A logit from its terms, as unit_products sums them; in the first lane. `only`: nobody else reads them. By all lanes of a warp.
template <class Quant>
DEVICE float await_logit(const ReadWords& words, int logit, bool only) {
    constexpr int TERMS = Units<Quant>::TERMS, AT_ONCE = 8 / TERMS;  // units of a lane whose terms are asked for together
    const int units = words.units, lanes = 1 << lane_bits<Quant>(units * Units<Quant>::SIZE), lane = threadIdx.x & 31;
    word* from = words.terms_of(logit);
    float total = 0.0f;
    if (lane < lanes)
        for (int first = lane; first < units; first += AT_ONCE * lanes) {
            word held[AT_ONCE][TERMS];
            bool all;
            do {
                all = true;
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
                    for (int t = 0; t < TERMS; ++t)
                        if (first + k * lanes < units) held[k][t] = heard(from + t * units + first + k * lanes);
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
                    for (int t = 0; t < TERMS; ++t) all = all && (first + k * lanes >= units || arrived(held[k][t]));
            } while (!all);
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                if (first + k * lanes >= units) break;
                Term terms[TERMS];
#pragma unroll
                for (int t = 0; t < TERMS; ++t) {
                    terms[t] = {value_of(held[k][t]), int(held[k][t] >> 33)};
                    if (only) from[t * units + first + k * lanes] = 0;
                }
                total = add_terms(terms, total);
            }
        }
    __syncwarp();
    for (int distance = lanes / 2; distance; distance >>= 1) total += __shfl_xor_sync(~0u, total, distance);
    return total;
}

// The inverse root of the row, its squares summed as block_sum does it. By all lanes of a warp.
DEVICE float await_root(const Mixing& mix, const ReadWords& words, bool only) {
    const int lane = threadIdx.x & 31;
    word held = 0;
    if (lane < SUMS) {
        do held = heard(words.sums() + lane);
        while (!arrived(held));
        if (only) words.sums()[lane] = 0;
    }
    __syncwarp();
    const float mine = value_of(held);
    float total = 0.0f;
    for (int i = 0; i < SUMS; ++i) total += __shfl_sync(~0u, mine, i);
    return mix.inverse_root(total);
}

// By a warp of each block that has read the words that more than one do.
DEVICE void leave_words(const ReadWords& words, int shared, int blocks) {
    const int lane = threadIdx.x & 31;
    unsigned before = 0;
    if (lane == 0) {
        __threadfence();
        before = atomicAdd(words.readers(), 1u);
    }
    if (int(__shfl_sync(~0u, before, 0)) != blocks - 1) return;
    for (int i = lane; i < shared; i += 32) words.sums()[i] = 0;
    if (lane == 0) *words.readers() = 0;
}

// Grid (chunks of the row, a block for the mix, blocks that collapse; rows), READ_THREADS threads; `outputs` is at most
// 16 threads of READ_THREADS each. `words` are 0 before and after, `words_row` of them for a row (ReadWords).
extern "C" __global__ void __launch_bounds__(READ_THREADS)
    hyper_read(const uint8_t* weights, word row_bytes, word outputs, Mixing mix, Collapse collapse, word* words,
               word words_row) {
    __shared__ float logits[MOST_LOGITS], square[MOST_COPIES * MOST_COPIES], pre[MOST_COPIES], root;
    let_next_begin();
    if constexpr (Units<Quant>::HAS) {
        const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x & 31, copies = int(mix.copies);
        const int units = int(mix.elements) / Units<Quant>::SIZE, chunks = (int(mix.elements) + CHUNK - 1) / CHUNK;
        const int block = int(blockIdx.x) - chunks, blocks = int(gridDim.x) - chunks;
        const ReadWords told = {words + row * words_row, units, Units<Quant>::TERMS};
        if (block < 0) {
            tell_terms<Quant>(weights, row_bytes, int(outputs), mix, row, chunks, told);
            return;
        }
        const bool alone = blocks == 1 || collapse.pre;  // nobody else looks at what is told
        const int shared = SUMS + copies * Units<Quant>::TERMS * units;
        if (block == 0) {
            MixWeights of_mix;
            if (warp == 0) of_mix.load(mix);
            await_previous();
            if (warp == READERS) {
                const float found = await_root(mix, told, alone);
                if (lane == 0) root = found;
            } else
                for (int i = warp; i < outputs; i += READERS) {
                    const float logit = await_logit<Quant>(told, i, alone || i >= copies);
                    if (lane == 0) logits[i] = mix.logits[row * mix.logits_row + i] = logit;
                }
            __syncthreads();
            if (warp == 0) mix_row(mix, of_mix, row, logits, root, square);
            if (warp == 1 && !alone) leave_words(told, shared, blocks);
            return;
        }
        const int first = (block - 1) * READ_THREADS + threadIdx.x, width = int(collapse.width);
        const float above = int(threadIdx.x) < copies ? mix.base[threadIdx.x] : 0.0f, scaled = mix.scale[0];
        await_previous();
        const float* streams = mix.streams + row * mix.streams_row;
        float held[MOST_COPIES];
        if (first < width) load_copies(held, streams + first, width, copies);
        if (alone) {
            if (threadIdx.x < copies) pre[threadIdx.x] = collapse.pre[row * collapse.pre_row + threadIdx.x];
        } else {
            if (warp < copies) {
                const float logit = await_logit<Quant>(told, warp, false);
                if (lane == 0) logits[warp] = logit;
            } else if (warp == READERS) {
                const float found = await_root(mix, told, false);
                if (lane == 0) root = found;
            }
            __syncthreads();
            if (threadIdx.x < copies) pre[threadIdx.x] = mix.pre_of(logits[threadIdx.x], root, scaled, above);
        }
        __syncthreads();
        for (int i = first; i < width; i += (blocks - 1) * READ_THREADS) {
            if (i != first) load_copies(held, streams + i, width, copies);
            collapse.out[row * collapse.out_row + i] = collapsed(held, pre, copies);
        }
        if (warp == READERS && !alone) leave_words(told, shared, blocks);
    }
}
