// Engrams: the history of tokens, and how much each residual copy takes of what an n-gram table says of them. The rows of
// the tables are brought by the host (`gpu_worker/engram_feed.py`); matmul.cu takes them apart. Strides count elements.
#include "hand_off.cuh"

// Grid rows / 64, 64 threads: the history's ring gets the token of each row.
extern "C" __global__ void __launch_bounds__(64)
    token_write(const int* tokens, const int* slots, const int* positions, word rows, int* state, word slot_stride,
                word row_stride, word ring) {
    begin();
    const int row = blockIdx.x * 64 + threadIdx.x;
    if (row < rows) state[slots[row] * slot_stride + positions[row] % ring * row_stride] = tokens[row];
}

// One block of 256 threads: once the host has the rows of this step's tokens (`gpu_worker/rows_ahead.py`) so many floats come
// to the card, of which 16 bytes at a time are taken.
extern "C" __global__ void __launch_bounds__(256)
    await_rows(const word* flag, const int* laps, const float* from, float* to, word floats) {
    begin();
    if (threadIdx.x == 0)
        while (load_acquire(flag) < laps[0]) {}
    __syncthreads();
    move_rows(to, 0, from, 0, 1, int(floats));
}

// Grid (copies, rows), 256 threads. See op EngramGate.
extern "C" __global__ void __launch_bounds__(256)
    engram_gate(const float* streams, word streams_row, word copy, const float* keys, word keys_row, word key,
                const float* value, word value_row, float* gate, word gate_row, float* out, word out_row, word out_copy,
                const float* key_weight, const float* query_weight, word width, double epsilon) {
    begin();
    const word j = blockIdx.x, row = blockIdx.y;
    streams += row * streams_row + j * copy, keys += row * keys_row + j * key;
    key_weight += j * width, query_weight += j * width;
    float products = 0.0f, of_keys = 0.0f, of_queries = 0.0f;
    for (word i = threadIdx.x; i < width; i += 256) {
        const float a = keys[i], b = streams[i];
        products = fmaf(a * key_weight[i], b * query_weight[i], products);
        of_keys = fmaf(a, a, of_keys);
        of_queries = fmaf(b, b, of_queries);
    }
    products = block_sum(products);
    __syncthreads();  // the sums' memory is used again
    of_keys = block_sum(of_keys);
    __syncthreads();
    of_queries = block_sum(of_queries);
    const float n = float(width), small = float(epsilon);
    const float d = products / (sqrtf(of_keys / n + small) * sqrtf(of_queries / n + small)) / sqrtf(n);
    const float grown = d == 0.0f ? 0.0f : copysignf(sqrtf(fmaxf(fabsf(d), 1e-6f)), d);
    const float share = 1.0f / (1.0f + expf(-grown));
    if (threadIdx.x == 0) gate[row * gate_row + j] = share;
    out += row * out_row + j * out_copy, value += row * value_row;
    for (word i = threadIdx.x; i < width; i += 256) out[i] = __fadd_rn(streams[i], __fmul_rn(share, value[i]));
}
