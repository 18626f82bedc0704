// RMS norm and rotary positions, also with what stands before and after them in most models. Strides count floats.
#include "q8_k.cuh"

// Grid (heads, rows), any multiple of 32 threads; `weight` may be null.
extern "C" __global__ void rms_norm(const float* x, word x_row, word x_head, float* out, word out_row, word out_head,
                                    const float* weight, word width, double epsilon) {
    begin();
    x += blockIdx.y * x_row + blockIdx.x * x_head;
    out += blockIdx.y * out_row + blockIdx.x * out_head;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
    const float root = 1.0f / sqrtf(block_sum(squares) / float(width) + float(epsilon));
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = weight ? x[i] * root * weight[i] : x[i] * root;
}

// Grid (pairs / 64, rows), 64 threads: cosine and sine of position * frequency, both times the magnitude, in double.
extern "C" __global__ void rope_table(float2* table, word pairs, const double* frequencies, double magnitude,
                                      const int* positions, word behind) {
    begin();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    double sine, cosine;
    sincos(double(positions[blockIdx.y] - behind) * frequencies[i], &sine, &cosine);
    table[blockIdx.y * pairs + i] = make_float2(float(cosine * magnitude), float(sine * magnitude));
}

// Grid (heads, rows), 64 threads. `halves`: pairs (i, i + pairs), else (2i, 2i + 1); elements beyond are copied.
extern "C" __global__ void rope(const float2* table, word pairs, const float* x, word x_row, word x_head, float* out,
                                word out_row, word out_head, word width, word halves) {
    begin();
    x += blockIdx.y * x_row + blockIdx.x * x_head;
    out += blockIdx.y * out_row + blockIdx.x * out_head;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int first = halves ? i : 2 * i, second = halves ? i + int(pairs) : 2 * i + 1;
        float a = x[first], b = x[second];
        turn_pair(a, b, table[blockIdx.y * pairs + i]);
        out[first] = a, out[second] = b;
    }
    if (x != out)
        for (int i = 2 * int(pairs) + threadIdx.x; i < width; i += blockDim.x) out[i] = x[i];
}

// Grid rows, 512 threads; dynamic shared memory width floats. Optionally x + y into sum first; optionally the normed row
// as Q8_K, too (q_stride 0: no).
extern "C" __global__ void __launch_bounds__(512)
    add_rms_norm(const float* x, word x_row, const float* y, word y_row, float* sum, word sum_row, float* out, word out_row,
                 const float* weight, word width, double epsilon, uint8_t* values, uint8_t* scales, word q_stride) {
    begin();
    DYNAMIC_SHARED(float, kept);
    const int row = blockIdx.x, n = int(width);
    x += row * x_row, out += row * out_row;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float v = x[i];
        if (y) sum[row * sum_row + i] = v = v + y[row * y_row + i];
        kept[i] = v;
        squares = fmaf(v, v, squares);
    }
    const float root = 1.0f / sqrtf(block_sum(squares) / float(n) + float(epsilon));
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = kept[i] = kept[i] * root * weight[i];
    if (!q_stride) return;
    __syncthreads();
    for (int first = threadIdx.x / 32 * 256; first < n; first += int(blockDim.x) * 8) {
        float v[8];
        const float4* source = reinterpret_cast<const float4*>(kept + first + 8 * (threadIdx.x & 31));
        const float4 a = source[0], b = source[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        write_q8_k(v, values + row * q_stride + first, scales + row * q_stride + first / 32 * 8);
    }
}

// What happens to one view between its projection and attention, in this order: norm, rotation, copy to the cache.
struct HeadJob {
    float* x;
    word row_stride, head_stride, heads, width;
    const float* weight;  // null: no norm
    double epsilon;
    word rotated;  // 0: not, else the element of a head that turns first and one more
    void* state;  // null: not written
    word slot_stride, state_stride, ring;
};
struct HeadJobs {
    HeadJob job[3];
};

// Grid (heads of all jobs, rows), 128 threads; dynamic shared memory the greatest width in floats.
template <class T>
DEVICE void prepare_heads(const HeadJobs& jobs, const float2* table, word pairs, word halves, const int* slots,
                          const int* positions) {
    DYNAMIC_SHARED(float, head);
    const int row = blockIdx.y;
    int which = 0, number = blockIdx.x;
    while (number >= jobs.job[which].heads) number -= int(jobs.job[which++].heads);
    const HeadJob& job = jobs.job[which];
    const int width = int(job.width);
    float* x = job.x + row * job.row_stride + number * job.head_stride;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        head[i] = x[i];
        squares = fmaf(head[i], head[i], squares);
    }
    if (job.weight) {
        const float root = 1.0f / sqrtf(block_sum(squares) / float(width) + float(job.epsilon));
        for (int i = threadIdx.x; i < width; i += blockDim.x) head[i] = head[i] * root * job.weight[i];
    }
    __syncthreads();
    if (job.rotated) {
        float* turned = head + job.rotated - 1;
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const int first = halves ? i : 2 * i, second = halves ? i + int(pairs) : 2 * i + 1;
            turn_pair(turned[first], turned[second], table[row * pairs + i]);
        }
        __syncthreads();
    }
    T* state = job.state ? static_cast<T*>(job.state) + slots[row] * job.slot_stride + positions[row] % job.ring * job.state_stride +
                               number * width
                         : nullptr;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        if (job.weight || job.rotated) x[i] = head[i];
        if (state) state[i] = from_float<T>(head[i]);
    }
}
extern "C" __global__ void __launch_bounds__(128)
    prepare_heads_f32(HeadJobs jobs, const float2* table, word pairs, word halves, const int* slots, const int* positions) {
    begin();
    prepare_heads<float>(jobs, table, pairs, halves, slots, positions);
}
extern "C" __global__ void __launch_bounds__(128)
    prepare_heads_f16(HeadJobs jobs, const float2* table, word pairs, word halves, const int* slots, const int* positions) {
    begin();
    prepare_heads<__half>(jobs, table, pairs, halves, slots, positions);
}
