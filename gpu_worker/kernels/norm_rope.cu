// RMS norm and rotary positions. Parameters are 8 bytes wide; strides count floats.
#include "common.cuh"

// Grid (heads, rows), any multiple of 32 threads.
extern "C" __global__ void rms_norm(const float* x, word x_row, word x_head, float* out, word out_row, word out_head,
                                    const float* weight, word width, double epsilon) {
    x += blockIdx.y * x_row + blockIdx.x * x_head;
    out += blockIdx.y * out_row + blockIdx.x * out_head;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
    const float root = 1.0f / sqrtf(block_sum(squares) / float(width) + float(epsilon));
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i] * root * weight[i];
}

// Grid (pairs / 64, rows), 64 threads: cosine and sine of position * frequency, both times the magnitude, in double.
extern "C" __global__ void rope_table(float2* table, word pairs, const double* frequencies, double magnitude,
                                      const int* positions, word behind) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    double sine, cosine;
    sincos(double(positions[blockIdx.y] - behind) * frequencies[i], &sine, &cosine);
    table[blockIdx.y * pairs + i] = make_float2(float(cosine * magnitude), float(sine * magnitude));
}

// Grid (heads, rows), 64 threads. `halves`: pairs (i, i + pairs), else (2i, 2i + 1); elements beyond are copied.
extern "C" __global__ void rope(const float2* table, word pairs, const float* x, word x_row, word x_head, float* out,
                                word out_row, word out_head, word width, word halves) {
    x += blockIdx.y * x_row + blockIdx.x * x_head;
    out += blockIdx.y * out_row + blockIdx.x * out_head;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int first = halves ? i : 2 * i, second = halves ? i + int(pairs) : 2 * i + 1;
        const float2 turn = table[blockIdx.y * pairs + i];
        const float a = x[first], b = x[second];
        out[first] = a * turn.x - b * turn.y;
        out[second] = a * turn.y + b * turn.x;
    }
    if (x != out)
        for (int i = 2 * int(pairs) + threadIdx.x; i < width; i += blockDim.x) out[i] = x[i];
}
