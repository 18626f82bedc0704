// Products with weights of one quant type (-DQUANT=...), their use by routed experts, and embedding rows.
//
// All parameters are 8 bytes wide: pointers, `word` or double.
#include "products.cuh"

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

DEVICE uint8_t* warp_ring(uint8_t* rings) { return rings + (threadIdx.x / 32) * ring_bytes<Quant>(); }

// Grid (blocks of warps, jobs * heads). Head h of a job has its own matrix, part of x and part of out.
template <int NR>
DEVICE void matmul(const Jobs& jobs, const uint8_t* values, const uint8_t* scales, word x_stride, word rows, word width,
                   word row_bytes, word heads, word head_values, word head_scales, word head_out) {
    __shared__ __align__(16) uint8_t rings[WARPS * ring_bytes<Quant>()];
    let_next_begin();
    const int head = blockIdx.y % int(heads);
    const Job job = jobs.job[blockIdx.y / int(heads)];
    const Activations x = {values + head * head_values, scales + head * head_scales, x_stride};
    const uint8_t* weights = job.weights + head * row_bytes * job.outputs;
    float* out = job.out + head * head_out;
    const int warp = blockIdx.x * WARPS + threadIdx.x / 32;
    products<Quant, NR>(weights, row_bytes, int(job.outputs), int(width), x, int(rows), warp, gridDim.x * WARPS,
                        warp_ring(rings), await_previous, [&](int output, int row, float sum) {
                            if ((threadIdx.x & 31) == 0)
                                out[row * job.out_stride + output] = job.bias ? sum + job.bias[output] : sum;
                        });
}

#define MATMUL(NR)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                           \
        matmul_##NR(Jobs jobs, const uint8_t* values, const uint8_t* scales, word x_stride, word rows, word width,     \
                    word row_bytes, word heads, word head_values, word head_scales, word head_out) {                   \
        matmul<NR>(jobs, values, scales, x_stride, rows, width, row_bytes, heads, head_values, head_scales, head_out); \
    }
MATMUL(1)
MATMUL(2)
MATMUL(4)
MATMUL(8)

// Grid (blocks of warps, items, jobs); item i = row * used + rank. The expert's matrix lies in slot slots[id] of its
// tensor's memory; a slot below 0 is not on this card, and its products are 0. x is the row's, or the item's own.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    experts(Jobs jobs, const uint8_t* values, const uint8_t* scales, word x_stride, word x_of_each_item, const int* ids,
            word ids_stride, word used, const int* slots, word width, word row_bytes) {
    __shared__ __align__(16) uint8_t rings[WARPS * ring_bytes<Quant>()];
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
    const int warp = blockIdx.x * WARPS + threadIdx.x / 32;
    products<Quant, 1>(job.weights + slot * row_bytes * job.outputs, row_bytes, int(job.outputs), int(width), x, 1, warp,
                       gridDim.x * WARPS, warp_ring(rings), [] {}, [&](int output, int, float sum) {
                           if ((threadIdx.x & 31) == 0) out[output] = sum;
                       });
}

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
