// Hand-offs of expert work to the host inside a step. Words, their order and why it suffices: runtime/hand_off.py.
//
// One block each: more would poll and fence against each other. Mapped host memory is written and read 16 bytes at a
// time, since every access crosses the bus.
#include "common.cuh"

constexpr int LINE_WORDS = 16;
constexpr int STEP_WORD = 0, ABORT_WORD = 1, POISON_WORD = 2;        // of the control block
constexpr int CUT_STEP_WORD = 16, CUT_REASON_WORD = 17, CUT_RANK_WORD = 18, RANK_FLAGS = 32;  // of the hand-off words
constexpr int STAGE_BITS = 20;
constexpr word TOLD = 1, LATE = 2;
constexpr int LOOKS = 32;  // at a flag between two looks at everything else

#ifndef EMULATED
DEVICE void store_release(word* p, word value) {
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DEVICE word load_acquire(const word* p) {
    word value;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
DEVICE word now() {
    word ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
#endif

// Copies or adds `width` floats of a row; 16 bytes at a time where places allow.
DEVICE bool wide(const void* a, const void* b, const void* c, word width) {
    const uintptr_t places = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c);
    return ((places & 15) | (width & 3)) == 0;
}

// Times of a hand-off by the card's clock, in mapped memory (runtime/leg_times.py).
constexpr int SENT = 0, BEGUN = 1, SEEN = 2;

// `step` is a word of the card's memory for the step's number, which the first hand-off of a step (first != 0) takes
// from the control block. Of each row's ids those without a slot go out, in order, and then one -1 if there is room.
template <bool TIMED>
DEVICE void send_work(const float* x, word x_row, const int* ids, word ids_row, const float* mix, word mix_row,
                      const int* slots, word rows, word width, word used, float* to_x, word to_x_row, int* to_ids,
                      word to_ids_row, float* to_mix, word to_mix_row, const word* control, word* words, word* step,
                      word index, word first, word* times) {
    begin();
    for (word r = 0; r < rows; ++r) {
        const float* from = x + r * x_row;
        float* to = to_x + r * to_x_row;
        if (wide(from, to, to, width)) {
            for (word i = threadIdx.x; i < width / 4; i += blockDim.x)
                reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
        } else {
            for (word i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
        }
    }
    for (word r = threadIdx.x; r < rows; r += blockDim.x) {
        int count = 0;
        for (int a = 0; a < used; ++a) {
            const int id = ids[r * ids_row + a];
            if (slots[id] < 0) {
                to_ids[r * to_ids_row + count] = id;
                to_mix[r * to_mix_row + count] = mix[r * mix_row + a];
                ++count;
            }
        }
        if (count < used) to_ids[r * to_ids_row + count] = -1;
    }
    if (threadIdx.x == 0 && first) *step = load_acquire(control + STEP_WORD);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        store_release(words, *step << STAGE_BITS | (index + 1));
        if (TIMED) times[SENT] = now();
    }
}
extern "C" __global__ void __launch_bounds__(512)
    send(const float* x, word x_row, const int* ids, word ids_row, const float* mix, word mix_row, const int* slots,
         word rows, word width, word used, float* to_x, word to_x_row, int* to_ids, word to_ids_row, float* to_mix,
         word to_mix_row, const word* control, word* words, word* step, word index, word first) {
    send_work<false>(x, x_row, ids, ids_row, mix, mix_row, slots, rows, width, used, to_x, to_x_row, to_ids, to_ids_row,
                     to_mix, to_mix_row, control, words, step, index, first, nullptr);
}
extern "C" __global__ void __launch_bounds__(512)
    send_timed(const float* x, word x_row, const int* ids, word ids_row, const float* mix, word mix_row, const int* slots,
               word rows, word width, word used, float* to_x, word to_x_row, int* to_ids, word to_ids_row, float* to_mix,
               word to_mix_row, const word* control, word* words, word* step, word index, word first, word* times) {
    send_work<true>(x, x_row, ids, ids_row, mix, mix_row, slots, rows, width, used, to_x, to_x_row, to_ids, to_ids_row,
                    to_mix, to_mix_row, control, words, step, index, first, times);
}

// out = x + what the host has put into `from`, after every rank's flag. `cut` is a word of the card's memory: the step that
// was given up.
template <bool TIMED>
DEVICE void receive_work(const float* x, word x_row, float* out, word out_row, word rows, word width, const float* from,
                         word from_row, const word* control, word* words, const word* step, word* cut, word index,
                         word ranks, word deadline, word* times) {
    begin();
    if (TIMED && threadIdx.x == 0) times[BEGUN] = now();
    __shared__ int gone;
    const word number = *step, wanted = number << STAGE_BITS | (index + 1);
    if (threadIdx.x == 0) gone = *cut == number;
    __syncthreads();
    if (gone) return;
    for (word rank = threadIdx.x; rank < ranks; rank += blockDim.x) {
        const word* flag = words + RANK_FLAGS + rank * LINE_WORDS;
        const word begun = now();
        for (int looks = 1; load_acquire(flag) < wanted; ++looks) {
            if (looks % LOOKS) continue;
            const bool told = load_acquire(control + ABORT_WORD) == number || load_acquire(control + POISON_WORD) == number;
            if (told || now() - begun > deadline) {
                words[CUT_REASON_WORD] = told ? TOLD : LATE;
                words[CUT_RANK_WORD] = rank;
                __threadfence_system();
                store_release(words + CUT_STEP_WORD, number);
                *cut = number;
                gone = 1;
                break;
            }
        }
    }
    __syncthreads();
    if (gone) return;
    if (TIMED && threadIdx.x == 0) times[SEEN] = now();
    for (word r = 0; r < rows; ++r) {
        const float *a = x + r * x_row, *b = from + r * from_row;
        float* to = out + r * out_row;
        if (wide(a, b, to, width)) {
            for (word i = threadIdx.x; i < width / 4; i += blockDim.x) {
                const float4 p = reinterpret_cast<const float4*>(a)[i], q = __ldcv(reinterpret_cast<const float4*>(b) + i);
                reinterpret_cast<float4*>(to)[i] = make_float4(p.x + q.x, p.y + q.y, p.z + q.z, p.w + q.w);
            }
        } else {
            for (word i = threadIdx.x; i < width; i += blockDim.x) to[i] = a[i] + __ldcv(b + i);
        }
    }
}
extern "C" __global__ void __launch_bounds__(512)
    receive(const float* x, word x_row, float* out, word out_row, word rows, word width, const float* from, word from_row,
            const word* control, word* words, const word* step, word* cut, word index, word ranks, word deadline) {
    receive_work<false>(x, x_row, out, out_row, rows, width, from, from_row, control, words, step, cut, index, ranks,
                        deadline, nullptr);
}
extern "C" __global__ void __launch_bounds__(512)
    receive_timed(const float* x, word x_row, float* out, word out_row, word rows, word width, const float* from,
                  word from_row, const word* control, word* words, const word* step, word* cut, word index, word ranks,
                  word deadline, word* times) {
    receive_work<true>(x, x_row, out, out_row, rows, width, from, from_row, control, words, step, cut, index, ranks,
                       deadline, times);
}
