// Ops that touch each element once: sums, silu products, copies, cache writes, the mixing of experts.
// Grids are (elements / 256, rows) of 256 threads; strides count floats; heads lie x_head apart, `width` wide.
#include "common.cuh"

DEVICE int element() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void add(const float* x, word x_row, word x_head, const float* y, word y_row, word y_head, float* out,
                               word out_row, word out_head, word width, word elements) {
    begin();
    const int i = element(), head = i / int(width), at = i % int(width);
    const word r = blockIdx.y;
    if (i >= elements) return;
    out[r * out_row + head * out_head + at] = x[r * x_row + head * x_head + at] + y[r * y_row + head * y_head + at];
}

extern "C" __global__ void swiglu(const float* gate, word gate_row, word gate_head, const float* up, word up_row,
                                  word up_head, float* out, word out_row, word out_head, word width, word elements,
                                  double limit) {
    begin();
    const int i = element(), head = i / int(width), at = i % int(width);
    const word r = blockIdx.y;
    if (i >= elements) return;
    out[r * out_row + head * out_head + at] =
        silu_times(gate[r * gate_row + head * gate_head + at], up[r * up_row + head * up_head + at], float(limit));
}

extern "C" __global__ void copy_heads(const float* x, word x_row, word x_head, float* out, word out_row, word out_head,
                                      word width, word elements) {
    begin();
    const int i = element(), head = i / int(width), at = i % int(width);
    const word r = blockIdx.y;
    if (i < elements) out[r * out_row + head * out_head + at] = x[r * x_row + head * x_head + at];
}

extern "C" __global__ void select_rows(const int* out_rows, const float* x, word x_row, word x_head, float* out,
                                       word out_row, word out_head, word width, word elements) {
    begin();
    const int i = element(), head = i / int(width), at = i % int(width);
    const word o = blockIdx.y;
    if (i < elements) out[o * out_row + head * out_head + at] = x[out_rows[o] * x_row + head * x_head + at];
}

// state[slot][position % ring][start...] = x; strides of the state count its elements.
template <class T>
DEVICE void cache_write(const int* slots, const int* positions, const float* x, word x_row, word x_head, word width,
                        word elements, T* state, word slot_stride, word row_stride, word ring) {
    const int i = element();
    const word r = blockIdx.y;
    if (i < elements)
        state[slots[r] * slot_stride + positions[r] % ring * row_stride + i] =
            from_float<T>(x[r * x_row + i / int(width) * x_head + i % int(width)]);
}
extern "C" __global__ void cache_write_f32(const int* slots, const int* positions, const float* x, word x_row, word x_head,
                                           word width, word elements, float* state, word slot_stride, word row_stride,
                                           word ring) {
    begin();
    cache_write<float>(slots, positions, x, x_row, x_head, width, elements, state, slot_stride, row_stride, ring);
}
extern "C" __global__ void cache_write_f16(const int* slots, const int* positions, const float* x, word x_row, word x_head,
                                           word width, word elements, __half* state, word slot_stride, word row_stride,
                                           word ring) {
    begin();
    cache_write<__half>(slots, positions, x, x_row, x_head, width, elements, state, slot_stride, row_stride, ring);
}

// out[r] = ((0 + mix[r][0] * parts[r][0]) + mix[r][1] * parts[r][1]) + ..., each product and sum rounded.
extern "C" __global__ void experts_sum(const float* parts, const float* mix, word mix_row, word used, float* out,
                                       word out_row, word elements) {
    begin();
    const word i = element(), r = blockIdx.y;
    if (i >= elements) return;
    float total = 0.0f;
    for (int a = 0; a < used; ++a)
        total = __fadd_rn(total, __fmul_rn(mix[r * mix_row + a], parts[(r * used + a) * elements + i]));
    out[r * out_row + i] = total;
}
