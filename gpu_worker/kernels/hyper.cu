// Hyper-connections: how a sublayer reads the residual copies of a row, and what it leaves of them. See hyper.cuh.
#include "hyper.cuh"

// Grid rows, MIX_THREADS threads. See op HyperMix.
extern "C" __global__ void __launch_bounds__(MIX_THREADS) hyper_mix(Mixing mix) {
    __shared__ float square[MOST_COPIES * MOST_COPIES];
    let_next_begin();
    MixWeights weights;
    if (threadIdx.x < 32) weights.load(mix);
    await_previous();
    const int row = blockIdx.x;
    const float* streams = mix.streams + row * mix.streams_row;
    float squares = 0.0f;
    constexpr int AT_ONCE = 8;  // loads on their way; the sum keeps its order
    for (int from = threadIdx.x; from < mix.elements; from += AT_ONCE * MIX_THREADS) {
        float value[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int i = from + j * MIX_THREADS;
            value[j] = i < mix.elements ? streams[i] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) squares = fmaf(value[j], value[j], squares);
    }
    const float root = mix.inverse_root(block_sum(squares));
    if (threadIdx.x < 32) mix_row(mix, weights, row, mix.logits + row * mix.logits_row, root, square);
}

// Grid (width / 256, rows), 256 threads: out = sum over copies j of pre[j] * streams[j].
extern "C" __global__ void __launch_bounds__(256)
    hyper_collapse(const float* streams, word streams_row, word copy, const float* pre, word pre_row, float* out,
                   word out_row, word copies, word width) {
    begin();
    const word i = word(blockIdx.x) * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= width) return;
    float held[MOST_COPIES];
    load_copies(held, streams + row * streams_row + i, copy, int(copies));
    out[row * out_row + i] = collapsed(held, pre + row * pre_row, int(copies));
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
    load_copies(held, streams, copy, int(copies));
    for (int i = 0; i < copies; ++i) {
        float total = __fmul_rn(post[i], mine);
#pragma unroll
        for (int j = 0; j < MOST_COPIES; ++j)
            if (j < copies) total = __fadd_rn(total, __fmul_rn(mixing[j * copies + i], held[j]));
        out[i * out_copy] = total;
    }
}
