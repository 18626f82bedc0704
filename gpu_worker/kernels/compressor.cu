// Compressed rows: groups of positions become one. A row of a ring lies at position % ring rows. Strides count elements.
#include "common.cuh"

// Grid (width / 256, rows), 256 threads: [values, scores + bias[position % ratio]] into the row's place of the ring.
extern "C" __global__ void __launch_bounds__(256)
    pool_write(const int* slots, const int* positions, const float* values, word values_row, const float* scores,
               word scores_row, const float* bias, word width, word ratio, float* state, word slot_stride, word row_stride,
               word ring) {
    begin();
    const word i = word(blockIdx.x) * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= width) return;
    const int position = positions[row];
    float* to = state + slots[row] * slot_stride + position % ring * row_stride;
    const float score = scores[row * scores_row + i];
    to[i] = values[row * values_row + i];
    to[width + i] = bias ? score + bias[position % ratio * width + i] : score;
}

// Grid (elements / 128, rows), 128 threads. Rows that complete no group become 0. With `overlap` positions before the
// group's own count with the first halves of their values and scores, its own with the second ones. The sums run over
// ascending positions.
extern "C" __global__ void __launch_bounds__(128)
    pool_rows(const int* slots, const int* positions, float* out, word out_row, word elements, word width, word ratio,
              word overlap, const float* state, word slot_stride, word row_stride, word ring) {
    begin();
    const word i = word(blockIdx.x) * 128 + threadIdx.x, row = blockIdx.y;
    if (i >= elements) return;
    const int end = positions[row] + 1, own = end - int(ratio);
    float made = 0.0f;
    if (end % ratio == 0) {
        const int first = overlap ? max(own - int(ratio), 0) : own;
        const float* held = state + slots[row] * slot_stride + i;
        auto value_at = [&](int p) { return held + p % ring * row_stride + (overlap && p >= own ? elements : 0); };
        float top = -INFINITY, total = 0.0f, weights = 0.0f;
        for (int p = first; p < end; ++p) top = fmaxf(top, value_at(p)[width]);
        for (int p = first; p < end; ++p) {
            const float* at = value_at(p);
            const float weight = expf(at[width] - top);
            total = fmaf(weight, at[0], total);
            weights += weight;
        }
        made = total / weights;
    }
    out[row * out_row + i] = made;
}

// Grid (elements / 256, rows), 256 threads: rows that complete a group go to its place.
template <class T>
DEVICE void group_write(const int* slots, const int* positions, const float* x, word x_row, word elements, word ratio,
                        T* state, word slot_stride, word row_stride) {
    begin();
    const word i = word(blockIdx.x) * 256 + threadIdx.x, row = blockIdx.y;
    const int end = positions[row] + 1;
    if (i < elements && end % ratio == 0)
        state[slots[row] * slot_stride + (end / ratio - 1) * row_stride + i] = from_float<T>(x[row * x_row + i]);
}
extern "C" __global__ void __launch_bounds__(256)
    group_write_f32(const int* slots, const int* positions, const float* x, word x_row, word elements, word ratio,
                    float* state, word slot_stride, word row_stride) {
    group_write<float>(slots, positions, x, x_row, elements, ratio, state, slot_stride, row_stride);
}
extern "C" __global__ void __launch_bounds__(256)
    group_write_f16(const int* slots, const int* positions, const float* x, word x_row, word elements, word ratio,
                    __half* state, word slot_stride, word row_stride) {
    group_write<__half>(slots, positions, x, x_row, elements, ratio, state, slot_stride, row_stride);
}
