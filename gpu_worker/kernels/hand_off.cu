// Hand-offs in launches of their own, of one block each: where no kernel beside them takes them in.
#include "hand_off.cuh"

// Rows, what they were given to do, the flag. Without rows the host has no part, and is told so if it is the last one.
extern "C" __global__ void __launch_bounds__(512)
    send(const int* ids, word ids_row, const float* mix, word mix_row, const int* slots, word rows, word width, word used,
         Sending sending) {
    begin();
    send_rows(sending, int(rows), int(width));
    for (int r = threadIdx.x / 32; r < rows; r += blockDim.x / 32)
        send_ids(sending, r, ids + r * ids_row, mix + r * mix_row, slots, int(used), true);
    raise_flag(sending, rows > 0);
}

// What `out` is part of: sum = plus + out, if asked for.
struct Added {
    const float* plus;
    word plus_row;
    float* sum;
    word sum_row;
};
DEVICE void add_to(float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
DEVICE void add_to(float& a, float b) { a += b; }

// `brought`: a row of the host, or null.
template <class Value>
DEVICE void receive_row(const float* x, float* out, const float* brought, const float* plus, float* sum, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        Value value = reinterpret_cast<const Value*>(x)[i];
        if (brought) add_to(value, reinterpret_cast<const Value*>(brought)[i]);
        reinterpret_cast<Value*>(out)[i] = value;
        if (!sum) continue;
        add_to(value, reinterpret_cast<const Value*>(plus)[i]);
        reinterpret_cast<Value*>(sum)[i] = value;
    }
}

// out = x + what the host has put into `from`, after every rank's flag. It looks for them and for the first rows while the
// launches before it are still at work. Dynamic shared memory: `fit` rows, as many as are brought at a time.
extern "C" __global__ void __launch_bounds__(512)
    receive(const float* x, word x_row, float* out, word out_row, word rows, word width, word fit, Receiving receiving,
            Added added) {
    DYNAMIC_SHARED(float, brought);
    let_next_begin();
    const Part part = await_ranks(receiving, true, [&](int expected) {
        if (!receiving.times || expected != THERE) return;
        await_previous();
        receiving.times[BEGUN] = now();
    });
    for (int first = 0; first < rows; first += int(fit)) {
        const int some = min(int(fit), int(rows) - first);
        if (first) __syncthreads();  // nobody reads the rows before any more
        if (part == THERE)
            move_rows(brought, width, receiving.from + first * receiving.from_row, receiving.from_row, some, int(width));
        if (first == 0) await_previous();
        if (part == GONE) return;
        __syncthreads();
        for (int k = 0; k < some; ++k) {
            const int r = first + k;
            const float *a = x + r * x_row, *plus = added.plus + r * added.plus_row;
            const float* own = part == THERE ? brought + k * width : nullptr;
            float *to = out + r * out_row, *sum = added.plus ? added.sum + r * added.sum_row : nullptr;
            if (wide(a, own, to, width) && (!sum || wide(plus, sum, sum, width)))
                receive_row<float4>(a, to, own, plus, sum, int(width / 4));
            else
                receive_row<float>(a, to, own, plus, sum, int(width));
        }
    }
}
