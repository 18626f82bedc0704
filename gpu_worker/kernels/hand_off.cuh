// Both halves of a hand-off to the host, as parts of kernels. Words, their order and why it suffices: runtime/hand_off.py.
//
// One block sends, one looks at the ranks' flags: more would poll and fence against each other. Mapped host memory is
// written and read 16 bytes at a time, since every access crosses the bus.
#pragma once
#include "common.cuh"

constexpr int LINE_WORDS = 16;
constexpr int STEP_WORD = 0, ABORT_WORD = 1, POISON_WORD = 2;        // of the control block
constexpr int CUT_STEP_WORD = 16, CUT_REASON_WORD = 17, CUT_RANK_WORD = 18, RANK_FLAGS = 32;  // of the hand-off words
constexpr int STAGE_BITS = 20;
constexpr word TOLD = 1, LATE = 2;
constexpr int LOOKS = 32;  // at a flag between two looks at everything else
constexpr int SENT = 0, BEGUN = 1, SEEN = 2;  // times by the card's clock, in mapped memory (runtime/leg_times.py)

#ifndef EMULATED
DEVICE void store_release(word* p, word value) {
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DEVICE word load_acquire(const word* p) {
    word value;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
// The same between blocks of the card.
DEVICE void store_release_here(word* p, word value) {
    asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
DEVICE word load_acquire_here(const word* p) {
    word value;
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
DEVICE word now() {
    word ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
#endif

// Whether rows of `width` floats can be taken 16 bytes at a time.
DEVICE bool wide(const void* a, const void* b, const void* c, word width) {
    const uintptr_t places = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c);
    return ((places & 15) | (width & 3)) == 0;
}

DEVICE word flag_of(word step, word index) { return step << STAGE_BITS | (index + 1); }

// What goes out and where to; without `to_x` nothing does. `step` is a word of the card's memory for the step's number, which
// the first hand-off of a step (first != 0) takes from the control block.
struct Sending {
    const float* x;
    word x_row;
    float* to_x;
    word to_x_row;
    int* to_ids;
    word to_ids_row;
    float* to_mix;
    word to_mix_row;
    const word* control;
    word *words, *step;
    word index, first;
    word* times;
};

// A row over the bus, past the caches. By all threads of a block.
DEVICE void move_row(float* to, const float* from, int width) {
    if (wide(from, to, to, width)) {
        for (int i = threadIdx.x; i < width / 4; i += blockDim.x)
            reinterpret_cast<float4*>(to)[i] = __ldcv(reinterpret_cast<const float4*>(from) + i);
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = __ldcv(from + i);
    }
}

DEVICE void send_rows(const Sending& sending, int rows, int width) {
    for (int r = 0; r < rows; ++r) move_row(sending.to_x + r * sending.to_x_row, sending.x + r * sending.x_row, width);
}

// Of a row's ids those without a slot, in order, and then one -1 if there is room. By all lanes of a warp.
DEVICE void send_ids(const Sending& sending, int row, const int* ids, const float* mix, const int* slots, int used) {
    int* to_ids = sending.to_ids + row * sending.to_ids_row;
    float* to_mix = sending.to_mix + row * sending.to_mix_row;
    const int lane = threadIdx.x & 31;
    int count = 0;
    for (int first = 0; first < used; first += 32) {
        const int k = first + lane, id = k < used ? ids[k] : 0;
        const bool goes = k < used && slots[id] < 0;
        const unsigned going = __ballot_sync(~0u, goes);
        const int place = count + __popc(going & ((1u << lane) - 1));
        if (goes) to_ids[place] = id, to_mix[place] = mix[k];
        count += __popc(going);
    }
    if (lane == 0 && count < used) to_ids[count] = -1;
}

// Says that all is there. By all threads of the block that sent it.
DEVICE void raise_flag(const Sending& sending) {
    if (threadIdx.x == 0 && sending.first) *sending.step = load_acquire(sending.control + STEP_WORD);
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence_system();
    store_release(sending.words, flag_of(*sending.step, sending.index));
    if (sending.times) sending.times[SENT] = now();
}

// What comes back; without `from` nothing does. `cut` is a word of the card's memory: the step that was given up.
struct Receiving {
    const float* from;
    word from_row;
    const word* control;
    word* words;
    const word* step;
    word* cut;
    word index, ranks, deadline;
    word* times;
};

// Looks at every rank's flag until all are there; whether they came. By all threads of a block, one warp of which looks, while
// the last thread of those that do not does something else. May be called before the launches before this one have ended:
// `number` is the step's, and flags of it are raised for what was sent in it.
template <class Else>
DEVICE bool await_ranks(const Receiving& receiving, word number, Else meanwhile) {
    __shared__ int given_up, gone;  // by an earlier hand-off, by this one
    const word wanted = flag_of(number, receiving.index);
    if (threadIdx.x == 0) given_up = load_acquire_here(receiving.cut) == number, gone = 0;
    __syncthreads();
    if (given_up) return false;
    if (threadIdx.x == blockDim.x - 1) meanwhile();
    for (word rank = threadIdx.x; rank < receiving.ranks && threadIdx.x < 32; rank += 32) {
        const word* flag = receiving.words + RANK_FLAGS + rank * LINE_WORDS;
        const word* control = receiving.control;
        const word begun = now();
        for (int looks = 1; load_acquire(flag) < wanted; ++looks) {
            if (looks % LOOKS) continue;
            if (load_acquire_here(receiving.cut) == number) {  // somebody else has said why
                gone = 1;
                break;
            }
            const bool told = load_acquire(control + ABORT_WORD) == number || load_acquire(control + POISON_WORD) == number;
            if (told || now() - begun > receiving.deadline) {
                receiving.words[CUT_REASON_WORD] = told ? TOLD : LATE;
                receiving.words[CUT_RANK_WORD] = rank;
                __threadfence_system();
                store_release(receiving.words + CUT_STEP_WORD, number);
                store_release_here(receiving.cut, number);
                gone = 1;
                break;
            }
        }
    }
    if (threadIdx.x < 32) __syncwarp();
    if (receiving.times && threadIdx.x == 0) receiving.times[SEEN] = now();
    __syncthreads();
    return !gone;
}

// Rows of the host for all blocks of a launch whose first one looks for them: it brings them to `rows` of the card's memory
// and raises `flag`, which the others await. The first block is on the card before the others are, so it may be awaited.
struct Landing {
    Receiving receiving;
    float* rows;
    word row;
    word* flag;
};

// By all threads of the first block, after await_previous. Also a step that was given up is said to have landed.
DEVICE void land(const Landing& landing, int rows, int width) {
    const Receiving& receiving = landing.receiving;
    const word number = *receiving.step;
    if (await_ranks(receiving, number, [] {}))
        for (int r = 0; r < rows; ++r)
            move_row(landing.rows + r * landing.row, receiving.from + r * receiving.from_row, width);
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    store_release_here(landing.flag, flag_of(number, receiving.index));
}

// By one thread; a barrier must follow. `says`: whether this block notes when it had nothing left to do.
DEVICE void await_landing(const Landing& landing, bool says) {
    const word wanted = flag_of(*landing.receiving.step, landing.receiving.index);
    if (says && landing.receiving.times) landing.receiving.times[BEGUN] = now();
    while (load_acquire_here(landing.flag) < wanted) {}
}
