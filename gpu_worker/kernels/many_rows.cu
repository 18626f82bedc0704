// Products of many rows, as prompts have them: f16 on tensor cores (weights were made f16 before), f32 without.
//
// Rows of activations are f16 times a power of two, `x_scales[row]` being what a product must be multiplied with.
// Experts: the items (row and place in its list) lie sorted by expert; a tile is up to 128 neighbours of one expert.
#include "tiles.cuh"

struct Job {
    const void* weights;
    const float* bias;  // may be null
    float* out;
    word outputs;
    word out_stride;  // floats between rows
};
struct Jobs {
    Job job[4];
};
struct Tile {
    int expert, first, count, unused;
};

DEVICE void store_pair(float* out, float x, float y, bool both) {
    if (both && (reinterpret_cast<uintptr_t>(out) & 7) == 0) {
        *reinterpret_cast<float2*>(out) = make_float2(x, y);
    } else {
        out[0] = x;
        if (both) out[1] = y;
    }
}

// Takes tile number `tile` of all jobs' tiles of `each` outputs; false if there are fewer.
DEVICE bool find_job(const Jobs& jobs, int& tile, int each, Job& job) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int tiles = int(jobs.job[i].outputs + each - 1) / each;
        if (tile < tiles) {
            job = jobs.job[i];
            return true;
        }
        tile -= tiles;
    }
    return false;
}

// Grid (tiles of rows, tiles of the jobs' outputs, heads). Rows of weights are w_stride elements apart, heads lie head_x
// and head_out apart, a head's weights after the one before; width (a multiple of 64) is what is summed over.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    dense_f16(Jobs jobs, const __half* x, const float* x_scales, word x_stride, word rows, word width, word w_stride,
              word head_x, word head_out) {
    DYNAMIC_SHARED(uint8_t, memory);
    begin();
    int tile = blockIdx.y;
    Job job;
    if (!find_job(jobs, tile, TILE, job)) return;
    const int row0 = blockIdx.x * TILE, out0 = tile * TILE, outputs = int(job.outputs);
    const __half* weights = static_cast<const __half*>(job.weights) + blockIdx.z * outputs * w_stride;
    x += blockIdx.z * head_x;
    float sums[4][4][4];
    multiply_tile(
        memory, int(width), [&](int r) { return x + min(row0 + r, int(rows) - 1) * x_stride; },
        [&](int r) { return weights + min(out0 + r, outputs - 1) * w_stride; }, sums);
    each_pair([&](int r, int c, int i, int j, int e) {
        const int row = row0 + r, output = out0 + c;
        if (row >= rows || output >= outputs) return;
        const float scale = x_scales[row];
        const bool both = output + 1 < outputs;
        float first = sums[i][j][e] * scale, second = sums[i][j][e + 1] * scale;
        if (job.bias) first += job.bias[output], second += both ? job.bias[output + 1] : 0.0f;
        store_pair(job.out + blockIdx.z * head_out + row * job.out_stride + output, first, second, both);
    });
}

// Grid (tiles of 64 outputs, tiles): silu(gate) * up of every item, in sorted order; x are the rows of the step. Only
// experts from first_expert on, whose weights begin at `gate` and `up`, before last_expert.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    experts_open(const __half* gate, const __half* up, const __half* x, const float* x_scales, word x_stride, word width,
                 word outputs, const int* items, word used, const Tile* tiles, word first_expert, word last_expert,
                 float* out, word out_stride, double limit) {
    DYNAMIC_SHARED(uint8_t, memory);
    begin();
    const Tile tile = tiles[blockIdx.y];
    if (tile.count == 0 || tile.expert < first_expert || tile.expert >= last_expert) return;
    const int out0 = blockIdx.x * (TILE / 2);
    const word at = (tile.expert - first_expert) * outputs;
    float sums[4][4][4];
    // eight outputs of gate and the same eight of up take turns
    multiply_tile(
        memory, int(width),
        [&](int r) { return x + items[tile.first + min(r, tile.count - 1)] / int(used) * x_stride; },
        [&](int r) {
            const int output = min(out0 + r / 16 * 8 + (r & 7), int(outputs) - 1);
            return ((r >> 3) & 1 ? up : gate) + (at + output) * width;
        },
        sums);
    each_pair([&](int r, int c, int i, int j, int e) {
        if (j & 1 || r >= tile.count) return;
        const int output = out0 + c / 16 * 8 + (c & 7), sorted = tile.first + r;
        if (output >= outputs) return;
        const float scale = x_scales[items[sorted] / int(used)];
        const float first = silu_times(sums[i][j][e] * scale, sums[i][j + 1][e] * scale, float(limit));
        const float second = silu_times(sums[i][j][e + 1] * scale, sums[i][j + 1][e + 1] * scale, float(limit));
        store_pair(out + sorted * out_stride + output, first, second, output + 1 < outputs);
    });
}

// Grid (tiles of outputs, tiles): down's products of every item; x are the hidden rows in sorted order, out lies in the
// order of items.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    experts_close(const __half* down, const __half* x, const float* x_scales, word x_stride, word width, word outputs,
                  const int* items, const Tile* tiles, word first_expert, word last_expert, float* out, word out_stride) {
    DYNAMIC_SHARED(uint8_t, memory);
    begin();
    const Tile tile = tiles[blockIdx.y];
    if (tile.count == 0 || tile.expert < first_expert || tile.expert >= last_expert) return;
    const int out0 = blockIdx.x * TILE;
    const __half* weights = down + (tile.expert - first_expert) * outputs * width;
    float sums[4][4][4];
    multiply_tile(
        memory, int(width), [&](int r) { return x + (tile.first + min(r, tile.count - 1)) * x_stride; },
        [&](int r) { return weights + min(out0 + r, int(outputs) - 1) * width; }, sums);
    each_pair([&](int r, int c, int i, int j, int e) {
        const int output = out0 + c, sorted = tile.first + r;
        if (r >= tile.count || output >= outputs) return;
        const float scale = x_scales[sorted];
        store_pair(out + items[sorted] * out_stride + output, sums[i][j][e] * scale, sums[i][j][e + 1] * scale,
                   output + 1 < outputs);
    });
}

constexpr int SIDE = 64, ALONG = 16;

// Grid (tiles of 64 rows, tiles of 64 outputs of the jobs, heads), 256 threads: f32 weights and rows, fused multiply-adds
// in ascending order.
extern "C" __global__ void __launch_bounds__(256)
    dense_f32(Jobs jobs, const float* x, word x_stride, word rows, word width, word head_x, word head_out) {
    begin();
    __shared__ __align__(16) float xs[ALONG][SIDE + 4];
    __shared__ __align__(16) float ws[ALONG][SIDE + 4];
    int tile = blockIdx.y;
    Job job;
    if (!find_job(jobs, tile, SIDE, job)) return;
    const int row0 = blockIdx.x * SIDE, out0 = tile * SIDE, outputs = int(job.outputs), n = int(width);
    const float* weights = static_cast<const float*>(job.weights) + word(blockIdx.z) * outputs * n;
    x += blockIdx.z * head_x;
    const int line = threadIdx.x / 4, part = threadIdx.x % 4 * 4, across = threadIdx.x % 16 * 4, down = threadIdx.x / 16 * 4;
    const float* from_x = x + min(row0 + line, int(rows) - 1) * x_stride;
    const float* from_w = weights + word(min(out0 + line, outputs - 1)) * n;
    float sums[4][4] = {}, next_x[4], next_w[4];
    auto fetch = [&](int k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool there = k + part + i < n;
            next_x[i] = there ? from_x[k + part + i] : 0.0f, next_w[i] = there ? from_w[k + part + i] : 0.0f;
        }
    };
    fetch(0);
    for (int k = 0; k < n; k += ALONG) {
#pragma unroll
        for (int i = 0; i < 4; ++i) xs[part + i][line] = next_x[i], ws[part + i][line] = next_w[i];
        __syncthreads();
        fetch(k + ALONG);
#pragma unroll
        for (int i = 0; i < ALONG; ++i) {
            const float4 a = *reinterpret_cast<const float4*>(&xs[i][down]);
            const float4 b = *reinterpret_cast<const float4*>(&ws[i][across]);
            const float xa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) sums[r][c] = __fmaf_rn(xa[r], wb[c], sums[r][c]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int row = row0 + down + r, output = out0 + across + c;
            if (row < rows && output < outputs)
                job.out[blockIdx.z * head_out + row * job.out_stride + output] =
                    job.bias ? sums[r][c] + job.bias[output] : sums[r][c];
        }
}
