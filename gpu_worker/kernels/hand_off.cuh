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
// the first hand-off of a step (first != 0) takes from the control block; `decided` one that tells the card whether the host
// has part of the sum: twice the flag, and 1 if it has. The host is told of a hand-off without work for it only at the last.
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
    word *words, *step, *decided;
    word index, first, last;
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

// Of a row's ids those without a slot, in order, and then one -1 if there is room. Rows are written only from the first one on
// that has some, `some` says whether an earlier one had; returns whether one of them has. By all lanes of a warp.
DEVICE bool send_ids(const Sending& sending, int row, const int* ids, const float* mix, const int* slots, int used, bool some) {
    int* to_ids = sending.to_ids + row * sending.to_ids_row;
    float* to_mix = sending.to_mix + row * sending.to_mix_row;
    const int lane = threadIdx.x & 31;
    int count = 0;
    for (int first = 0; first < used; first += 32) {
        const int k = first + lane, id = k < used ? ids[k] : 0;
        const bool goes = k < used && slots[id] < 0;
        const unsigned going = __ballot_sync(~0u, goes);
        if (going && !some) {
            for (int r = lane; r < row; r += 32) sending.to_ids[r * sending.to_ids_row] = -1;
            some = true;
        }
        const int place = count + __popc(going & ((1u << lane) - 1));
        if (goes) to_ids[place] = id, to_mix[place] = mix[k];
        count += __popc(going);
    }
    if (some && lane == 0 && count < used) to_ids[count] = -1;
    return some;
}

// Says that all is there, or that there is nothing. By all threads of the block that sent it.
DEVICE void raise_flag(const Sending& sending, bool sent) {
    if (threadIdx.x == 0 && sending.first) *sending.step = load_acquire(sending.control + STEP_WORD);
    __syncthreads();
    if (threadIdx.x) return;
    const word flag = flag_of(__ldcg(sending.step), sending.index);
    if (sent || sending.last) {
        __threadfence_system();
        store_release(sending.words, flag);
    }
    store_release_here(sending.decided, 2 * flag + (sent ? 1 : 0));
    if (!sending.times) return;
    sending.times[SENT] = sent ? now() : 0;
    if (!sent) sending.times[BEGUN] = sending.times[SEEN] = 0;
}

// What comes back; without `from` nothing does. `cut` is a word of the card's memory: the step that was given up.
struct Receiving {
    const float* from;
    word from_row;
    const word* control;
    word* words;
    const word *step, *decided;
    word* cut;
    word index, ranks, deadline;
    word* times;
};

// What of the sum is the host's: nothing, nothing since the step has been given up, or what now lies there.
enum Part { NOTHING, GONE, THERE };

// Looks at every rank's flag until all are there. By all threads of a block, one warp of which looks, while the last thread of
// those that do not does something else. May be called before the launches before this one have ended: `step` then is the
// host's word for the step's number, and what was decided and flags of this step are only there after it was sent.
template <class Else>
DEVICE Part await_ranks(const Receiving& receiving, const word* step, Else meanwhile) {
    __shared__ int expected, gone;
    __shared__ word number;
    if (threadIdx.x == 0) {
        number = load_acquire(step), gone = 0;
        word decided;
        do decided = load_acquire_here(receiving.decided);
        while (decided / 2 < flag_of(number, receiving.index));
        expected = !(decided & 1) ? NOTHING : load_acquire_here(receiving.cut) == number ? GONE : THERE;
    }
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1) meanwhile(expected);
    if (expected != THERE) return Part(expected);
    const word wanted = flag_of(number, receiving.index);
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
    return gone ? GONE : THERE;
}

// Rows of the host for all blocks of a launch whose first one looks for them: it brings them to `rows` of the card's memory
// and raises `flag`, which the others await. The first block is on the card before the others are, so it may be awaited.
struct Landing {
    Receiving receiving;
    float* rows;
    word row;
    word* flag;
};

// Whether something is to land. After await_previous.
DEVICE bool lands(const Landing& landing) {
    const Receiving& receiving = landing.receiving;
    return receiving.from && __ldcg(receiving.decided) == 2 * flag_of(__ldcg(receiving.step), receiving.index) + 1;
}

// By all threads of the first block, if something lands. Also a step that was given up is said to have landed.
DEVICE void land(const Landing& landing, int rows, int width) {
    const Receiving& receiving = landing.receiving;
    if (await_ranks(receiving, receiving.step, [](int) {}) == THERE)
        for (int r = 0; r < rows; ++r)
            move_row(landing.rows + r * landing.row, receiving.from + r * receiving.from_row, width);
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    store_release_here(landing.flag, flag_of(__ldcg(receiving.step), receiving.index));
}

// By one thread; a barrier must follow. `says`: whether this block notes when it had nothing left to do.
DEVICE void await_landing(const Landing& landing, bool says) {
    const word wanted = flag_of(__ldcg(landing.receiving.step), landing.receiving.index);
    if (says && landing.receiving.times) landing.receiving.times[BEGUN] = now();
    while (load_acquire_here(landing.flag) < wanted) {}
}
