// Routed experts of a few rows in two launches: gate and up with the choice of experts, down with the sum by ranks. An expert
// that every row takes (a shared one) may come with them. A part of matmul.cu, which has what it is made of (Quant, Residual,
// copy_row).
#pragma once
#include "hand_off.cuh"
#include "router.cuh"
#include "spread.cuh"
#include "units.cuh"

// The expert that every row takes, of the same types and widths as the routed ones; without `gate` (`down`) there is none. It is
// the last of a row's items, and its result comes last in the row's sum.
struct Opened {
    const uint8_t *gate, *up;
    double limit;
};

template <class Quant>
DEVICE void open_items(const uint8_t* gate, const uint8_t* up, float* out, word outputs, const Activations& x, word width,
                       word row_bytes, uint8_t* ring, float limit, int block, int blocks) {
    const int first = int(threadIdx.x / 32) * blocks + block, step = blocks * int(blockDim.x / 32);
    float opened = 0.0f;
    if constexpr (Units<Quant>::HAS) {  // rows gate 0, up 0, gate 1, ...; where a warp has one row at a time, gate comes first
        const int bits = row_bits<Quant>(int(width)), mine = row_of_lane<Quant>(int(width)), lanes = 1 << lane_bits<Quant>(int(width));
        if (bits) {
            const bool leads = (threadIdx.x & (2 * lanes - 1)) == 0;
            const uint8_t* own = mine & 1 ? up : gate;
            unit_products<Quant, 1, true>(
                first, step, (2 * int(outputs) + (1 << bits) - 1) >> bits, int(width), 1, ring,
                [&](int set) { return row_at(own, min(((set << bits) + mine) >> 1, int(outputs) - 1), row_bytes); },
                [&](int) { return x; }, [] {},
                [&](int set, int, float sum) {
                    const float other = __shfl_xor_sync(~0u, sum, lanes);
                    const int output = ((set << bits) + mine) >> 1;
                    if (leads && output < outputs) out[output] = silu_times(sum, other, limit);
                });
        } else {  // a warp has neighbouring outputs
            const int each = (int(outputs) + step - 1) / step, begin = first * each;
            unit_products<Quant, 1, true>(
                2 * begin, 1, 2 * min(begin + each, int(outputs)), int(width), 1, ring,
                [&](int set) { return row_at(set & 1 ? up : gate, set >> 1, row_bytes); }, [&](int) { return x; }, [] {},
                [&](int set, int, float sum) {
                    if (set & 1 && (threadIdx.x & 31) == 0) out[set >> 1] = silu_times(opened, sum, limit);
                    opened = sum;
                });
        }
    } else if constexpr (Quant::FORM != FORM_FLOAT) {
        products_of<Quant, 1>(
            first < outputs ? (int(outputs) - first + step - 1) / step : 0, row_bytes, int(width), 1, ring,
            [&](int set, int m) { return (m ? up : gate) + (first + set * step) * row_bytes; },
            [&](int) { return x; }, [] {},
            [&](int set, int m, int, float sum) {
                if (m == 0)
                    opened = sum;
                else if ((threadIdx.x & 31) == 0)
                    out[first + set * step] = silu_times(opened, sum, limit);
            });
    }
}

// What the host is to do of all rows, by one block beside those that open experts: it needs the choice as they do. Returns
// whether there was something.
DEVICE bool hand_over(const Sending& sending, const Scored& scored, BlockChoice& choice, const int* slots, const int* ids,
                      word ids_stride, const float* mix, word mix_stride, int used, int width) {
    __shared__ float mixes[MOST_USED];
    __shared__ int goes;
    const int rows = gridDim.z, lane = threadIdx.x;
    bool some = false;
    for (int row = 0; row < rows; ++row) {
        if (row) __syncthreads();  // nobody looks at the choice of the row before any more
        if (scored.logits) choose(scored, row, choice);
        if (threadIdx.x >= 32) continue;
        if (scored.logits) {
            const float mine = mix_of_lane(scored.how, choice);
            if (lane < used) mixes[lane] = mine;
            __syncwarp();
        }
        const int* chosen = scored.logits ? choice.experts : ids + row * ids_stride;
        some = send_ids(sending, row, chosen, scored.logits ? mixes : mix + row * mix_stride, slots, used, some);
        __syncwarp();
    }
    if (lane < rows && !some && sending.ends()) sending.to_ids[lane * sending.to_ids_row] = -1;
    if (lane == 0) goes = some;
    __syncthreads();
    const bool sends = goes;
    if (sends) send_rows(sending, rows, width);
    raise_flag(sending, sends);
    return sends;
}

// Grid (blocks of warps, items of a row, rows): silu(gate) * up of every item; a warp takes the same row of both. See `experts`.
// With scores the choice is made here, by every block for itself, and written to ids and mix. If there is something to send, the
// first block does that, and looks for what comes back of it; the ranks' and rows' first blocks do nothing. Dynamic shared memory: the rings, and x (width * 5 / 4
// bytes).
extern "C" __global__ void __launch_bounds__(Units<Quant>::OPENERS, Units<Quant>::RESIDENT)
    open_experts(const uint8_t* gate, const uint8_t* up, float* out, word out_stride, word outputs, const uint8_t* values,
                 const uint8_t* scales, word x_stride, int* ids, word ids_stride, float* mix, word mix_stride, word used,
                 const int* slots, word width, word row_bytes, double limit, Opened shared, Scored scored, Sending sending,
                 Landing landing) {
    DYNAMIC_SHARED(uint8_t, rings);
    __shared__ BlockChoice choice;
    __shared__ int map[MOST_CHOSEN_FROM];
    let_next_begin();
    if (scored.logits)
        for (int i = threadIdx.x; i < scored.how.experts; i += blockDim.x) map[i] = slots[i];
    const int rank = blockIdx.y, row = blockIdx.z, item = row * int(gridDim.y) + rank;
    const bool routed = rank < used;
    const int senders = sending.to_x ? 1 : 0, block = int(blockIdx.x) - senders, blocks = int(gridDim.x) - senders;
    const int ring = ring_of_warp<Quant>(int(width));
    uint8_t* held = rings + blockDim.x / 32 * ring;
    if (block < 0 && (blockIdx.y || blockIdx.z)) return;  // one sends; its likes make room for others at once
    await_previous();
    if (block < 0) {
        if (hand_over(sending, scored, choice, slots, ids, ids_stride, mix, mix_stride, int(used), int(width)) && landing.done)
            land_early(landing, int(gridDim.z), int(landing.row), unsigned(blocks) * gridDim.y * gridDim.z);
        return;
    }
    if (Quant::FORM != FORM_FLOAT) {
        const Activations given = {values + row * x_stride, scales + row * x_stride, x_stride};
        copy_row<Units<Quant>::HAS>(given, int(width), held, threadIdx.x, blockDim.x);
    }
    int slot;
    if (scored.logits) {
        choose(scored, row, choice);
        const int expert = routed ? choice.experts[rank] : 0;
        slot = map[expert];
        if (routed && block == 0 && threadIdx.x < 32) {
            const float mine = mix_of_lane(scored.how, choice);
            if (threadIdx.x == rank) ids[row * ids_stride + rank] = expert, mix[row * mix_stride + rank] = mine;
        }
    } else {
        slot = routed ? slots[ids[row * ids_stride + rank]] : 0;
        __syncthreads();
    }
    if (!routed) gate = shared.gate, up = shared.up, limit = shared.limit, slot = 0;
    out += item * out_stride;
    if (slot < 0) {
        for (int i = block * int(blockDim.x) + int(threadIdx.x); i < outputs; i += blocks * int(blockDim.x)) out[i] = 0.0f;
        return note_done(landing);
    }
    const word at = slot * row_bytes * outputs;
    const Activations x = {held, held + width, 0};
    open_items<Quant>(gate + at, up + at, out, outputs, x, width, row_bytes, rings + threadIdx.x / 32 * ring, float(limit), block,
                      blocks);
    note_done(landing);
}

// Weight rows that a warp of close_experts takes together, as a power of two.
DEVICE int bits_closed(int width) {
    if constexpr (Units<Quant>::HAS) return row_bits<Quant>(width);
    return 1;
}

template <class Quant, class Ready>
DEVICE void close_item(const uint8_t* down, word outputs, uint8_t* hidden, word width, word row_bytes, uint8_t* ring,
                       const float* opened, float* sums, Ready ready, int first, int step) {
    if constexpr (Quant::FORM == FORM_Q8_K) {
        constexpr bool UNITS = Units<Quant>::HAS;
        const int lane = threadIdx.x & 31;
        const Activations x = {hidden, hidden + width, 0};
        // The hidden row is asked for before the weights, which take longer.
        constexpr int AT_ONCE = 3;
        float4 low[AT_ONCE], high[AT_ONCE];
        auto load = [&](int from) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float4* source = reinterpret_cast<const float4*>(opened + from + 256 * i + 8 * lane);
                if (from + 256 * i < width) low[i] = source[0], high[i] = source[1];
            }
        };
        load(0);
        ready();
        auto quantise = [&] {
            for (int from = 0; from < width; from += 256 * AT_ONCE) {
                if (from) load(from);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int at = from + 256 * i;
                    if (at >= width) break;
                    const float v[8] = {low[i].x,  low[i].y,  low[i].z,  low[i].w,
                                        high[i].x, high[i].y, high[i].z, high[i].w};
                    write_q8_k<UNITS>(v, hidden + at, hidden + width + at / 32 * 8, at / 256);
                }
            }
            __syncwarp();
        };
        if constexpr (UNITS) {
            const int bits = row_bits<Quant>(int(width)), mine = row_of_lane<Quant>(int(width));
            const bool leads = leads_row<Quant>(int(width));
            int kept = mine;
            unit_products<Quant, 1, true, Units<Quant>::AHEAD>(
                first, step, (int(outputs) + (1 << bits) - 1) >> bits, int(width), 1, ring,
                [&](int set) { return row_at(down, min((set << bits) + mine, int(outputs) - 1), row_bytes); },
                [&](int) { return x; }, quantise,
                [&](int, int, float sum) {
                    if (leads) sums[kept] = sum;
                    kept += 1 << bits;
                });
            return;
        }
        const int pairs = int(outputs + 1) / 2, sets = (pairs - first + step - 1) / step;
        products_of<Quant, 1>(
            sets, row_bytes, int(width), 1, ring,
            [&](int set, int m) { return down + min(2 * (first + set * step) + m, int(outputs) - 1) * row_bytes; },
            [&](int) { return x; }, quantise,
            [&](int set, int m, int, float sum) {
                if (lane == 0) sums[2 * set + m] = sum;
            });
    }
}

// Grid (blocks that share the outputs, rows), a warp for each item of a row. Outputs come in pairs, or as many as a warp has
// rows at a time (units.cuh). Dynamic shared memory: the warps' rings, if the type has them, the items' hidden rows as Q8_K (width
// * 5 / 4 bytes), their sums (`outputs_each` of a block). The hidden rows are f32 and rounded by every block for itself; a row's items are
// summed by ranks, as experts_sum does, then comes the host's part, the expert that every row takes (its matrix is `shared`), the
// residual, or a hyper-connection that spreads the sum of one row. If the host has part of the sums, a row's blocks are one
// more, the first of which brings them.
extern "C" __global__ void __launch_bounds__(32 * MOST_USED)
    close_experts(const uint8_t* down, float* out, word out_stride, word outputs, const float* opened, word opened_stride,
                  const int* ids, word ids_stride, const float* mix, word mix_stride, word used, const int* slots,
                  word width, word row_bytes, word outputs_each, const uint8_t* shared, Residual residual, Spread spread,
                  Landing landing) {
    DYNAMIC_SHARED(uint8_t, memory);
    __shared__ int places[MOST_USED];
    __shared__ float mixes[MOST_USED], coefficients[32];
    let_next_begin();
    if constexpr (Quant::FORM == FORM_Q8_K) {
        const int ring = ring_of_warp<Quant>(int(width));
        const int row = blockIdx.y, item = threadIdx.x / 32, lane = threadIdx.x & 31, bits = bits_closed(int(width));
        const int items = int(blockDim.x / 32), each = int(outputs_each), receivers = landing.receiving.from ? 1 : 0;
        const int block = int(blockIdx.x) - receivers, blocks = int(gridDim.x) - receivers;
        auto output_of = [&](int i) { return (block + (i >> bits) * blocks) << bits | (i & ((1 << bits) - 1)); };
        uint8_t* hidden = memory + items * ring;
        float* sums = reinterpret_cast<float*>(hidden + items * (width / 4 * 5));
        await_previous();
        const bool comes = lands(landing);
        if (block < 0) {
            if (row == 0 && comes) land(landing, gridDim.y, int(outputs));
            if (row == 0 && threadIdx.x == 0 && landing.done) *landing.done = 0;
            return;
        }
        if (threadIdx.x < used) {
            places[threadIdx.x] = slots[ids[row * ids_stride + threadIdx.x]];
            mixes[threadIdx.x] = mix[row * mix_stride + threadIdx.x];
        }
        if (spread.out && threadIdx.x < 32) coefficients[threadIdx.x] = spread.coefficient();
        __syncthreads();
        const int slot = item < used ? places[item] : 0, own = threadIdx.x;  // an output whose residual is fetched before the products
        const int own_output = output_of(own);
        float before = 0.0f, copies[MOST_SPREAD] = {};
        auto ready = [&] {
            if (spread.out) spread.fetch(min(word(own_output), outputs - 1), copies);
            if (residual.plus && own < each && own_output < outputs)
                before = residual.plus[row * residual.plus_stride + own_output];
        };
        if (slot < 0) {
            ready();
            for (int i = lane; i < each; i += 32) sums[item * each + i] = 0.0f;
        } else {
            const uint8_t* matrix = item < used ? down + slot * row_bytes * outputs : shared;
            close_item<Quant>(matrix, outputs, hidden + item * (width / 4 * 5), width, row_bytes,
                              memory + item * ring, opened + (row * items + item) * opened_stride,
                              sums + item * each, ready, block, blocks);
        }
        float landed = 0.0f;  // of the own output, fetched while other warps are still at their products
        if (comes && (threadIdx.x == 0 || own < each)) {
            await_landing(landing, threadIdx.x == 0 && row == 0 && block == 0);
            if (own < each && own_output < outputs) landed = __ldcg(landing.rows + row * landing.row + own_output);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < each; i += blockDim.x) {
            const int output = output_of(i);
            if (output >= outputs) continue;
            float total = 0.0f;
            for (int a = 0; a < used; ++a) total = __fadd_rn(total, __fmul_rn(mixes[a], sums[a * each + i]));
            if (comes && i != own) landed = __ldcg(landing.rows + row * landing.row + output);
            if (comes) total = __fadd_rn(total, landed);
            if (shared) total = __fadd_rn(total, sums[used * each + i]);
            out[row * out_stride + output] = total;
            if (residual.plus) {
                if (i != own) before = residual.plus[row * residual.plus_stride + output];
                residual.sum[row * residual.sum_stride + output] = before + total;
            }
            if (!spread.out) continue;
            if (i != own) spread.fetch(output, copies);
            spread.write(output, true, total, copies, 1, [&](int at) { return coefficients[at]; });
        }
    }
}
