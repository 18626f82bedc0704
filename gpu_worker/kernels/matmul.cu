// Products with weights of one quant type (-DQUANT=...), their use by routed experts, and embedding rows.
//
// All parameters are 8 bytes wide: pointers, `word` or double.
#include "normed.cuh"
#include "products.cuh"
#include "q8_k.cuh"
#include "router.cuh"
#include "spread.cuh"
#include "units.cuh"

typedef QUANT Quant;

struct Job {
    const uint8_t* weights;
    const float* bias;  // may be null
    float* out;
    word outputs;
    word out_stride;  // floats between rows
};
struct Jobs {
    Job job[4];
};
// Rows to which results are added, too: sum = plus + out. Strides count floats.
struct Residual {
    const float* plus;  // may be null
    word plus_stride;
    float* sum;
    word sum_stride;
};

// How a warp leaves its results. What is added to one row is fetched before the products, a lane each, in their order.
template <int NR>
struct Results {
    const Job& job;
    const Residual& residual;
    float fetched;
    int results;

    DEVICE Results(const Job& of, const Residual& with) : job(of), residual(with), fetched(0.0f), results(0) {}
    DEVICE void fetch(int first, int step) {
        constexpr int PAIR = rows_together<Quant>();
        const int lane = threadIdx.x & 31, output = PAIR * (first + lane / PAIR * step) + lane % PAIR;
        if (NR == 1 && residual.plus && output < job.outputs) fetched = residual.plus[output];
    }
    // All lanes of the warp call it with the sum.
    DEVICE void put(float* out, int output, int row, float sum) {
        const int lane = threadIdx.x & 31;
        if (job.bias) sum += job.bias[output];
        float plus = __shfl_sync(~0u, fetched, results & 31);
        if (lane == 0) {
            out[row * job.out_stride + output] = sum;
            if (residual.plus) {
                if (NR > 1 || results > 31) plus = residual.plus[row * residual.plus_stride + output];
                residual.sum[row * residual.sum_stride + output] = plus + sum;
            }
        }
        ++results;
    }
};

// Bytes of shared memory that a warp has for its weights, and where in static memory they are.
template <class Quant>
DEVICE int ring_of_warp(int width) { return Units<Quant>::HAS ? ring_of_units<Quant>(width) : ring_bytes<Quant>(); }
DEVICE uint8_t* warp_ring(uint8_t* rings) { return rings + (threadIdx.x / 32) * ring_bytes<Quant>(); }

// An activation row of a quantised form to shared memory, its scales after its values, so that the way to the second-level
// cache is gone once and not once a chunk. Widths are multiples of 32.
template <bool SWIZZLED = false>
DEVICE void copy_row(const Activations& x, int width, uint8_t* to, int thread, int threads) {
    const int pieces = width / 16, all = pieces + width / 64;
    constexpr int AT_ONCE = 4;
    for (int from = thread; from < all; from += AT_ONCE * threads) {
        int4 held[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int i = from + k * threads;
            if (i < all) held[k] = *reinterpret_cast<const int4*>(i < pieces ? x.values + 16 * i : x.scales + 16 * (i - pieces));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int i = from + k * threads;
            if (i < all) *reinterpret_cast<int4*>(to + (i < pieces ? place_of_piece<SWIZZLED>(i) : 16 * i)) = held[k];
        }
    }
    for (int i = width / 64 * 2 + thread; i < width / 32; i += threads)  // where scales are no multiple of 16 bytes
        *reinterpret_cast<int2*>(to + width + 8 * i) = *reinterpret_cast<const int2*>(x.scales + 8 * i);
}

// Dynamic shared memory: for one row x (width * 5 / 4 bytes), and the warps' rings. `first` and `step` count sets of as many weight rows as a warp
// has at a time.
template <int NR>
DEVICE void unit_matmul(const Job& job, const uint8_t* weights, word row_bytes, const Activations& x, int rows, int width,
                        float* out, int first, int step, const Residual& residual) {
    if constexpr (Units<Quant>::HAS) {
        DYNAMIC_SHARED(uint8_t, held);
        const int bits = row_bits<Quant>(width), mine = row_of_lane<Quant>(width), outputs = int(job.outputs);
        const bool leads = leads_row<Quant>(width);
        auto output_of = [&](int set) { return (set << bits) + mine; };
        const Activations given = NR == 1 ? Activations{held, held + width, 0} : x;
        uint8_t* ring = held + (NR == 1 ? width / 4 * 5 : 0) + threadIdx.x / 32 * ring_of_units<Quant>(width);
        float fetched = 0.0f;  // what is added to the first result of one row
        auto ready = [&] {
            await_previous();
            if (NR == 1) {
                copy_row<true>(x, width, held, threadIdx.x, blockDim.x);
                if (residual.plus && leads && output_of(first) < outputs) fetched = residual.plus[output_of(first)];
                __syncthreads();
            }
        };
        unit_products<Quant, NR, NR == 1>(
            first, step, (outputs + (1 << bits) - 1) >> bits, width, rows, ring,
            [&](int set) { return row_at(weights, min(output_of(set), outputs - 1), row_bytes); },
            [&](int) { return given; }, ready,
            [&](int set, int row, float sum) {
                const int output = output_of(set);
                if (!leads || output >= outputs) return;
                if (job.bias) sum += job.bias[output];
                out[row * job.out_stride + output] = sum;
                if (!residual.plus) return;
                const float plus = NR == 1 && set == first ? fetched : residual.plus[row * residual.plus_stride + output];
                residual.sum[row * residual.sum_stride + output] = plus + sum;
            });
    }
}

// Grid (blocks of warps, jobs * heads). Head h of a job has its own matrix, part of x and part of out.
template <int NR>
DEVICE void matmul(const Jobs& jobs, const uint8_t* values, const uint8_t* scales, word x_stride, word rows, word width,
                   word row_bytes, word heads, word head_values, word head_scales, word head_out,
                   const Residual& residual) {
    let_next_begin();
    const int head = blockIdx.y % int(heads);
    const Job job = jobs.job[blockIdx.y / int(heads)];
    const Activations x = {values + head * head_values, scales + head * head_scales, x_stride};
    const uint8_t* weights = job.weights + head * row_bytes * job.outputs;
    float* out = job.out + head * head_out;
    const int first = threadIdx.x / 32 * gridDim.x + blockIdx.x, step = gridDim.x * WARPS;  // blocks get as much each
    if constexpr (Units<Quant>::HAS) {
        unit_matmul<NR>(job, weights, row_bytes, x, int(rows), int(width), out, first, step, residual);
    } else {
        __shared__ __align__(16) uint8_t rings[WARPS * ring_bytes<Quant>()];
        Results<NR> results(job, residual);
        auto ready = [&] { await_previous(), results.fetch(first, step); };
        products<Quant, NR>(weights, row_bytes, int(job.outputs), int(width), x, int(rows), first, step, warp_ring(rings),
                            ready, [&](int output, int row, float sum) { results.put(out, output, row, sum); });
    }
}

#define MATMUL(NR)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, NR == 1 ? Units<Quant>::BLOCKS : 1)                                          \
        matmul_##NR(Jobs jobs, const uint8_t* values, const uint8_t* scales, word x_stride, word rows, word width,     \
                    word row_bytes, word heads, word head_values, word head_scales, word head_out,                     \
                    Residual residual) {                                                                               \
        matmul<NR>(jobs, values, scales, x_stride, rows, width, row_bytes, heads, head_values, head_scales, head_out,  \
                   residual);                                                                                          \
    }
MATMUL(1)
MATMUL(2)
MATMUL(4)
MATMUL(8)

// One row's product whose result a hyper-connection spreads. Grid blocks of warps; see `matmul` and unit_matmul.
extern "C" __global__ void __launch_bounds__(32 * WARPS, Units<Quant>::BLOCKS)
    spread_matmul(const uint8_t* weights, float* out, word outputs, const uint8_t* values, const uint8_t* scales, word width,
                  word row_bytes, Spread spread) {
    DYNAMIC_SHARED(uint8_t, rounded);
    let_next_begin();
    if constexpr (Units<Quant>::HAS) {
        const int wide = int(width), bits = row_bits<Quant>(wide), mine = row_of_lane<Quant>(wide), last = int(outputs) - 1;
        const int first = threadIdx.x / 32 * gridDim.x + blockIdx.x, step = gridDim.x * WARPS;
        const Activations x = {rounded, rounded + width, 0};
        uint8_t* ring = rounded + width / 4 * 5 + threadIdx.x / 32 * ring_of_units<Quant>(wide);
        auto output_of = [&](int set) { return min((set << bits) + mine, last); };
        float coefficient = 0.0f, copies[MOST_SPREAD];
        auto ready = [&] {
            await_previous();
            copy_row<true>({values, scales, 0}, wide, rounded, threadIdx.x, blockDim.x);
            coefficient = spread.coefficient();
            spread.fetch(output_of(first), copies);
            __syncthreads();
        };
        unit_products<Quant, 1, true>(
            first, step, (int(outputs) + (1 << bits) - 1) >> bits, wide, 1, ring,
            [&](int set) { return row_at(weights, output_of(set), row_bytes); }, [&](int) { return x; }, ready,
            [&](int set, int, float sum) {
                const int output = output_of(set);
                const bool there = (set << bits) + mine <= last;
                if (set != first) spread.fetch(output, copies);
                __syncwarp();  // all have read
                auto of = [&](int i) { return __shfl_sync(~0u, coefficient, i & 31); };
                spread.write(output, there, sum, copies, 1 << lane_bits<Quant>(wide), of);
                if (there && leads_row<Quant>(wide)) out[output] = sum;
            });
    }
}

// Grid (blocks of warps, items, jobs); item i = row * used + rank. The expert's matrix lies in slot slots[id] of its
// tensor's memory; a slot below 0 is not on this card, and its products are 0. x is the row's, or the item's own. Dynamic shared
// memory: rings of types whose units are staged.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    experts(Jobs jobs, const uint8_t* values, const uint8_t* scales, word x_stride, word x_of_each_item, const int* ids,
            word ids_stride, word used, const int* slots, word width, word row_bytes) {
    DYNAMIC_SHARED(uint8_t, staged);
    begin();
    const Job job = jobs.job[blockIdx.z];
    const int item = blockIdx.y, row = item / int(used);
    const int slot = slots[ids[row * ids_stride + item % int(used)]];
    float* out = job.out + item * job.out_stride;
    if (slot < 0) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < job.outputs; i += gridDim.x * blockDim.x) out[i] = 0.0f;
        return;
    }
    const word at = (x_of_each_item ? item : row) * x_stride;
    const Activations x = {values + at, scales + at, x_stride};
    const int warp = blockIdx.x * WARPS + threadIdx.x / 32, step = gridDim.x * WARPS;
    const uint8_t* weights = job.weights + slot * row_bytes * job.outputs;
    if constexpr (Units<Quant>::HAS) {
        const int bits = row_bits<Quant>(int(width)), mine = row_of_lane<Quant>(int(width)), outputs = int(job.outputs);
        const bool leads = leads_row<Quant>(int(width));
        unit_products<Quant, 1, false>(
            warp, step, (outputs + (1 << bits) - 1) >> bits, int(width), 1,
            staged + threadIdx.x / 32 * ring_of_units<Quant>(int(width)),
            [&](int set) { return row_at(weights, min((set << bits) + mine, outputs - 1), row_bytes); },
            [&](int) { return x; }, [] {},
            [&](int set, int, float sum) {
                const int output = (set << bits) + mine;
                if (leads && output < outputs) out[output] = sum;
            });
    } else {
        __shared__ __align__(16) uint8_t rings[WARPS * ring_bytes<Quant>()];
        products<Quant, 1>(weights, row_bytes, int(job.outputs), int(width), x, 1, warp, step, warp_ring(rings), [] {},
                           [&](int output, int, float sum) {
                               if ((threadIdx.x & 31) == 0) out[output] = sum;
                           });
    }
}

// Grid (experts / WARPS, rows); dynamic shared memory 4 * (2 * experts + groups) bytes. The router's product and, by the
// block that is the last to end, its choice. `ended`: a counter for each row, 0 before and after.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    route(const uint8_t* weights, word row_bytes, word width, const uint8_t* values, word x_stride, float* logits,
          word logits_row, int* ids, word ids_row, float* mix, word mix_row, const float* bias, Choice how,
          unsigned* ended) {
    DYNAMIC_SHARED(float, scores);
    __shared__ bool last;
    let_next_begin();
    if constexpr (Quant::FORM == FORM_FLOAT) {
        const int warp = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31, row = blockIdx.y;
        if (warp < how.experts)
            for (int i = 128 * lane; i < row_bytes; i += 32 * 128) prefetch(weights + warp * row_bytes + i);
        logits += row * logits_row;
        const Activations x = {values + row * x_stride, nullptr, x_stride};
        await_previous();
        float_products<Quant, 1>(weights, row_bytes, int(how.experts), int(width), x, 1, warp, gridDim.x * WARPS,
                                 [&](int output, int, float sum) {
                                     if (lane == 0) logits[output] = sum;
                                 });
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(ended + row, 1u) == gridDim.x - 1;
            if (last) ended[row] = 0;
        }
        __syncthreads();
        if (!last || threadIdx.x >= 32) return;
        __threadfence();
        route_row(logits, ids + row * ids_row, mix + row * mix_row, bias, how, scores);
    }
}

// Products of a norm's row: see `matmul`. Grid blocks, NORM_THREADS threads that share the jobs' outputs, in pairs or as many
// as a warp has rows at a time; dynamic shared memory: the warps' rings, if the type has them, the normed row, and the same as
// Q8_K (width * 5 / 4 bytes).
extern "C" __global__ void __launch_bounds__(NORM_THREADS, Units<Quant>::RESIDENT) normed_matmul(Jobs jobs, Normed norm, word row_bytes) {
    DYNAMIC_SHARED(uint8_t, memory);
    let_next_begin();
    if constexpr (Quant::FORM == FORM_Q8_K) {
        constexpr int ALL = NORM_THREADS / 32;
        constexpr bool UNITS = Units<Quant>::HAS;
        const int width = int(norm.width), first = threadIdx.x / 32 * gridDim.x + blockIdx.x, step = gridDim.x * ALL;
        const int ring = ring_of_warp<Quant>(width);
        float* kept = reinterpret_cast<float*>(memory + ALL * ring);
        uint8_t* rounded = reinterpret_cast<uint8_t*>(kept + width);
        const Activations x = {rounded, rounded + width, 0};
        NormedRow normed;
        if (UNITS) normed.load(norm, 0, await_previous);  // before the weights, which take longer
        auto ready = [&] {
            if (!UNITS) normed.load(norm, 0, await_previous);
            normed.finish(norm, 0, kept);
            __syncthreads();
            round_row<UNITS>(kept, width, rounded, rounded + width);
            if (blockIdx.x == 0 && norm.q_stride) round_row(kept, width, norm.values, norm.scales, ALL / 2);
            if (blockIdx.x == 0)
                for (int i = threadIdx.x; i < width; i += NORM_THREADS) norm.out[i] = kept[i];
            __syncthreads();
        };
        if constexpr (UNITS) {
            const int bits = row_bits<Quant>(width), mine = row_of_lane<Quant>(width);
            int ends[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) ends[j] = int(jobs.job[j].outputs) + (j ? ends[j - 1] : 0);
            const bool leads = leads_row<Quant>(width);
            auto job_of = [&](int set, int& output) -> const Job& {  // the last row again for those beyond
                const int row = min((set << bits) + mine, ends[3] - 1);
                const int which = int(row >= ends[0]) + int(row >= ends[1]) + int(row >= ends[2]);
                output = row - (which == 0 ? 0 : which == 1 ? ends[0] : which == 2 ? ends[1] : ends[2]);
                return jobs.job[which];
            };
            unit_products<Quant, 1, true>(
                first, step, (ends[3] + (1 << bits) - 1) >> bits, width, 1, memory + threadIdx.x / 32 * ring,
                [&](int set) {
                    int output;
                    const Job& job = job_of(set, output);
                    return row_at(job.weights, output, row_bytes);
                },
                [&](int) { return x; }, ready,
                [&](int set, int, float sum) {
                    int output;
                    const Job& job = job_of(set, output);
                    if (leads) job.out[output] = job.bias ? sum + job.bias[output] : sum;
                });
            return;
        }
        int pairs = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs += int(jobs.job[j].outputs + 1) / 2;
        auto place = [&](int set, int m, int& output) -> int {
            int pair = first + set * step, which = 0;
            while (pair >= int(jobs.job[which].outputs + 1) / 2) pair -= int(jobs.job[which++].outputs + 1) / 2;
            output = 2 * pair + m;
            return which;
        };
        products_of<Quant, 1>(
            first < pairs ? (pairs - first + step - 1) / step : 0, row_bytes, width, 1,
            memory + threadIdx.x / 32 * ring,
            [&](int set, int m) {
                int output;
                const Job& job = jobs.job[place(set, m, output)];
                return job.weights + min(output, int(job.outputs) - 1) * row_bytes;
            },
            [&](int) { return x; }, ready,
            [&](int set, int m, int, float sum) {
                int output;
                const Job& job = jobs.job[place(set, m, output)];
                if ((threadIdx.x & 31) == 0 && output < job.outputs)
                    job.out[output] = job.bias ? sum + job.bias[output] : sum;
            });
    }
}

#include "scores.cuh"

#include "experts.cuh"
#include "hyper_read.cuh"

template <class Quant>
DEVICE void embed_part(const uint8_t* row, int index, int width, float* out) {
    if constexpr (Quant::FORM == FORM_FLOAT) {
        typedef typename Quant::Element Element;
        for (int i = 32 * index; i < min(width, 32 * index + 32); ++i)
            out[i] = Quant::value(reinterpret_cast<const Element*>(row)[i]);
    } else {
        constexpr int EACH = Quant::BLOCK / 32;
        if (32 * index >= width) return;
        Group g;
        Quant::decode(row + index / EACH * Quant::BYTES, index % EACH, g);
#pragma unroll
        for (int i = 0; i < 32; ++i) out[32 * index + i] = weight_of<Quant>(g, i);
    }
}

// Grid (blocks of threads, rows): row tokens[r] of the matrix, dequantised; a thread takes 32 elements.
extern "C" __global__ void embed(const uint8_t* weights, word row_bytes, word width, const int* tokens, float* out,
                                 word out_stride) {
    begin();
    embed_part<Quant>(weights + tokens[blockIdx.y] * row_bytes, blockIdx.x * blockDim.x + threadIdx.x, int(width),
                      out + blockIdx.y * out_stride);
}

// Grid (rows * count, blocks of threads): the rows of a table that were brought for the rows of a step, `count` each, one
// after the other; a thread takes 32 elements.
extern "C" __global__ void __launch_bounds__(64)
    table_rows(const uint8_t* brought, word row_bytes, word width, word count, float* out, word out_stride) {
    begin();
    const word item = blockIdx.x;
    embed_part<Quant>(brought + item * row_bytes, blockIdx.y * blockDim.x + threadIdx.x, int(width),
                      out + item / count * out_stride + item % count * width);
}

// Elements 32 * index to 32 * index + 31 of a row, as far as there are so many.
template <class Quant>
DEVICE void group_as_f16(const uint8_t* row, int index, int width, float factor, __half* out) {
    if constexpr (Quant::FORM == FORM_FLOAT) {
        const typename Quant::Element* elements = reinterpret_cast<const typename Quant::Element*>(row) + 32 * index;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (32 * index + i < width) out[i] = __float2half_rn(Quant::value(elements[i]) * factor);
    } else {
        constexpr int EACH = Quant::BLOCK / 32;
        Group g;
        Quant::decode(row + index / EACH * Quant::BYTES, index % EACH, g);
        g.d *= factor, g.dmin *= factor;
#pragma unroll
        for (int i = 0; i < 32; ++i) out[i] = __float2half_rn(weight_of<Quant>(g, i));
    }
}

// Grid (groups of 32 elements / 256, matrices), 256 threads: weights as f16, times `factor`, rows of `padded` elements (a
// multiple of 64) whose end is 0. Matrix m lies in slot slots[m] of the memory (m itself without `slots`); one that is
// not on this card is all 0, one of which counts[m] is 0 is left out.
extern "C" __global__ void __launch_bounds__(256)
    dequantise(const uint8_t* weights, word row_bytes, word width, word outputs, word padded, const int* slots,
               const int* counts, word first, __half* out, double factor) {
    __shared__ __align__(16) uint4 kept[8][128];
    begin();
    const int matrix = int(first) + blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    if (counts && counts[matrix] == 0) return;
    const int slot = slots ? slots[matrix] : matrix;
    const int across = int(padded) / 32;
    const word groups = outputs * across, from = (word(blockIdx.x) * 8 + warp) * 32, at = from + lane;
    const int row = int(at / across), index = int(at % across);
    union {
        __half element[32];
        uint4 piece[4];
    } made;
#pragma unroll
    for (int i = 0; i < 4; ++i) made.piece[i] = make_uint4(0, 0, 0, 0);
    if (at < groups && slot >= 0 && 32 * index < width) {
        const uint8_t* source = weights + (word(slot) * outputs + row) * row_bytes;
        group_as_f16<Quant>(source, index, int(width), float(factor), made.element);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) kept[warp][4 * lane + (i ^ ((lane >> 1) & 3))] = made.piece[i];
    __syncwarp();
    uint4* to = reinterpret_cast<uint4*>(out + (word(blockIdx.y) * groups + from) * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int piece = 32 * i + lane, owner = piece / 4;
        if (from + owner < groups) to[piece] = kept[warp][4 * owner + ((piece & 3) ^ ((owner >> 1) & 3))];
    }
}
