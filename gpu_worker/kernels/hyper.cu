// Hyper-connections: how a sublayer reads the residual copies of a row, and what it leaves of them. Strides count floats;
// at most MOST_COPIES copies. Sums over copies: each product and sum rounded, copies in ascending order.
#include "common.cuh"

constexpr int MOST_COPIES = 8;

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Element i of a square of LINES lines lies in lane i % 32 as mine[i / 32]. Each is divided by the sum of its line (ascending
// order) plus epsilon: of its row, or of its column. Called by all lanes of a warp.
template <int LINES, bool ROWS>
DEVICE void divide_by_sums(float (&mine)[(LINES * LINES + 31) / 32], float epsilon) {
    constexpr int HELD = (LINES * LINES + 31) / 32;
    const int lane = threadIdx.x & 31;
    float total[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int i = 32 * h + lane, line = ROWS ? i / LINES * LINES : i % LINES;
        total[h] = 0.0f;
#pragma unroll
        for (int k = 0; k < LINES; ++k) {
            const int from = ROWS ? line + k : line + k * LINES;
            float value = __shfl_sync(~0u, mine[0], from);
#pragma unroll
            for (int other = 1; other < HELD; ++other) {
                const float far = __shfl_sync(~0u, mine[other], from);
                value = from / 32 == other ? far : value;
            }
            total[h] += value;
        }
    }
#pragma unroll
    for (int h = 0; h < HELD; ++h) mine[h] = mine[h] / (total[h] + epsilon);
}

// The square of `n` lines in shared memory, after `rounds` rounds: columns first, then rows and columns. By all lanes of a warp.
template <int LINES>
DEVICE void balance(float* square, int rounds, float epsilon) {
    constexpr int HELD = (LINES * LINES + 31) / 32;
    const int lane = threadIdx.x & 31;
    float mine[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) mine[h] = 32 * h + lane < LINES * LINES ? square[32 * h + lane] : 1.0f;
    divide_by_sums<LINES, false>(mine, epsilon);
    for (int turn = 1; turn < rounds; ++turn) {
        divide_by_sums<LINES, true>(mine, epsilon);
        divide_by_sums<LINES, false>(mine, epsilon);
    }
#pragma unroll
    for (int h = 0; h < HELD; ++h)
        if (32 * h + lane < LINES * LINES) square[32 * h + lane] = mine[h];
    __syncwarp();
}

// Grid rows, 512 threads. See op HyperMix; post and mixing may be null. base and scale are the weights.
extern "C" __global__ void __launch_bounds__(512)
    hyper_mix(const float* streams, word streams_row, word elements, const float* logits, word logits_row, float* pre,
              word pre_row, float* post, word post_row, float* mixing, word mixing_row, const float* base,
              const float* scale, word copies, double epsilon, double hyper_epsilon, word rounds) {
    begin();
    __shared__ float square[MOST_COPIES * MOST_COPIES];
    const int row = blockIdx.x, n = int(copies), lane = threadIdx.x;
    const float small = float(hyper_epsilon);
    streams += row * streams_row, logits += row * logits_row;
    float squares = 0.0f;
    constexpr int AT_ONCE = 8;  // loads on their way; the sum keeps its order
    for (int from = threadIdx.x; from < elements; from += AT_ONCE * blockDim.x) {
        float value[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int i = from + j * blockDim.x;
            value[j] = i < elements ? streams[i] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) squares = fmaf(value[j], value[j], squares);
    }
    const float root = 1.0f / sqrtf(block_sum(squares) / float(elements) + float(epsilon));
    if (threadIdx.x >= 32) return;
    for (int i = lane; i < n; i += 32) {
        pre[row * pre_row + i] = sigmoid(logits[i] * root * scale[0] + base[i]) + small;
        if (post) post[row * post_row + i] = 2.0f * sigmoid(logits[n + i] * root * scale[1] + base[n + i]);
    }
    if (!mixing) return;
    for (int i = lane; i < n * n; i += 32) square[i] = logits[2 * n + i] * root * scale[2] + base[2 * n + i];
    __syncwarp();
    for (int source = lane; source < n; source += 32) {
        float* mine = square + source * n;
        float top = mine[0], total = 0.0f;
        for (int k = 1; k < n; ++k) top = fmaxf(top, mine[k]);
        for (int k = 0; k < n; ++k) total += mine[k] = expf(mine[k] - top);
        for (int k = 0; k < n; ++k) mine[k] = mine[k] / total + small;
    }
    __syncwarp();
    switch (n) {
        case 2: balance<2>(square, int(rounds), small); break;
        case 3: balance<3>(square, int(rounds), small); break;
        case 4: balance<4>(square, int(rounds), small); break;
        case 5: balance<5>(square, int(rounds), small); break;
        case 6: balance<6>(square, int(rounds), small); break;
        case 7: balance<7>(square, int(rounds), small); break;
        case 8: balance<8>(square, int(rounds), small); break;
        default: balance<1>(square, int(rounds), small);
    }
    for (int i = lane; i < n * n; i += 32) mixing[row * mixing_row + i] = square[i];
}

// Grid (width / 256, rows), 256 threads: out = sum over copies j of pre[j] * streams[j].
extern "C" __global__ void __launch_bounds__(256)
    hyper_collapse(const float* streams, word streams_row, word copy, const float* pre, word pre_row, float* out,
                   word out_row, word copies, word width) {
    begin();
    const word i = word(blockIdx.x) * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= width) return;
    streams += row * streams_row + i, pre += row * pre_row;
    float total = __fmul_rn(pre[0], streams[0]);
    for (int j = 1; j < copies; ++j) total = __fadd_rn(total, __fmul_rn(pre[j], streams[j * copy]));
    out[row * out_row + i] = total;
}

// Grid (width / 256, rows), 256 threads: out[i] = post[i] * y + sum over j of mixing[j][i] * streams[j]. A thread has read
// its element of all copies before it writes one, so out may be streams.
extern "C" __global__ void __launch_bounds__(256)
    hyper_post(const float* y, word y_row, const float* streams, word streams_row, word copy, const float* post,
               word post_row, const float* mixing, word mixing_row, float* out, word out_row, word out_copy, word copies,
               word width) {
    begin();
    const word at = word(blockIdx.x) * 256 + threadIdx.x, row = blockIdx.y;
    if (at >= width) return;
    streams += row * streams_row + at, post += row * post_row, mixing += row * mixing_row;
    out += row * out_row + at;
    const float mine = y[row * y_row + at];
    float held[MOST_COPIES];
#pragma unroll
    for (int j = 0; j < MOST_COPIES; ++j) held[j] = j < copies ? streams[j * copy] : 0.0f;
    for (int i = 0; i < copies; ++i) {
        float total = __fmul_rn(post[i], mine);
#pragma unroll
        for (int j = 0; j < MOST_COPIES; ++j)
            if (j < copies) total = __fadd_rn(total, __fmul_rn(mixing[j * copies + i], held[j]));
        out[i * out_copy] = total;
    }
}
