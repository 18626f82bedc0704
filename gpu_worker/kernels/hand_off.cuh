// Both halves of a hand-off to the host, as parts of kernels. Words, their order and why it suffices: runtime/hand_off.py.
//
// One block sends, one looks at the ranks' flags: more would poll and fence against each other. Mapped host memory is
// written and read 16 bytes at a time, since every access crosses the bus.
#pragma once
#include "common.cuh"

constexpr int LINE_WORDS = 16;
constexpr int STEP_WORD = 0, ABORT_WORD = 1, POISON_WORD = 2;        // of the control block
constexpr int CUT_STEP_WORD = 16, CUT_REASON_WORD = 17, CUT_RANK_WORD = 18, RANK_FLAGS = 32;  // of the hand-off words
constexpr int STAGE_BITS = 20, LAP_BITS = 10;
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
constexpr int IN_FLIGHT = 6;  // values that a thread asks for before it stores the first

// A step's and a lap's number, and the flag of a hand-off in it.
DEVICE word lap_of(word step, int lap) { return step << STAGE_BITS | word(lap) << LAP_BITS; }
DEVICE word flag_of(word lap, word index) { return lap + index + 1; }

// What goes out and where to; without `to_x` nothing does. `step` is a word of the card's memory for the lap's number, whose
// part the first hand-off of a lap (first != 0) takes from the control block; `laps` are which one it is and how many follow.
// `decided` tells the card whether the host has part of the sum: twice the flag, and 1 if it has. The host is told of a
// hand-off without work for it only at the last of the last lap.
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
    const int* laps;
    word index, first, last;
    word* times;

    DEVICE bool ends() const { return last && __ldcg(laps + 1) == 0; }
};

// Rows of `width` values. A value is on its way for a microsecond and more: each thread has some at a time.
template <class Value>
DEVICE void move_values(Value* to, word to_row, const Value* from, word from_row, int rows, int width) {
    const int all = rows * width, step = blockDim.x;
    for (int first = threadIdx.x; first < all; first += IN_FLIGHT * step) {
        Value values[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const int i = first + k * step, row = i / width;
            if (i < all) values[k] = __ldcv(from + row * from_row + (i - row * width));
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const int i = first + k * step, row = i / width;
            if (i < all) to[row * to_row + (i - row * width)] = values[k];
        }
    }
}

// Rows over the bus, past the caches. By all threads of a block.
DEVICE void move_rows(float* to, word to_row, const float* from, word from_row, int rows, int width) {
    if (wide(from, to, to, width) && (rows == 1 || ((to_row | from_row) & 3) == 0))
        move_values(reinterpret_cast<float4*>(to), to_row / 4, reinterpret_cast<const float4*>(from), from_row / 4, rows,
                    width / 4);
    else
        move_values(to, to_row, from, from_row, rows, width);
}

DEVICE void send_rows(const Sending& sending, int rows, int width) {
    move_rows(sending.to_x, sending.to_x_row, sending.x, sending.x_row, rows, width);
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
    if (threadIdx.x == 0 && sending.first)
        *sending.step = lap_of(load_acquire(sending.control + STEP_WORD), __ldcg(sending.laps));
    __syncthreads();
    if (threadIdx.x) return;
    const word flag = flag_of(__ldcg(sending.step), sending.index);
    if (sent || sending.ends()) {
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
    const int* laps;
    word index, ranks, deadline;
    word* times;
};

// What of the sum is the host's: nothing, nothing since the step has been given up, or what now lies there.
enum Part { NOTHING, GONE, THERE };

// Looks at every rank's flag until all are there. By all threads of a block, one warp of which looks, while the last thread of
// those that do not does something else. May be called before the launches before this one have ended (`early`): the step's
// number then comes from the host, and what was decided and flags of this lap are only there after it was sent.
template <class Else>
DEVICE Part await_ranks(const Receiving& receiving, bool early, Else meanwhile) {
    __shared__ int expected, gone;
    __shared__ word lap;
    if (threadIdx.x == 0) {
        lap = early ? lap_of(load_acquire(receiving.control + STEP_WORD), __ldcg(receiving.laps)) : __ldcg(receiving.step);
        gone = 0;
        word decided;
        do decided = load_acquire_here(receiving.decided);
        while (decided / 2 < flag_of(lap, receiving.index));
        expected = !(decided & 1) ? NOTHING : load_acquire_here(receiving.cut) == lap >> STAGE_BITS ? GONE : THERE;
    }
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1) meanwhile(expected);
    if (expected != THERE) return Part(expected);
    const word wanted = flag_of(lap, receiving.index), number = lap >> STAGE_BITS;
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
// The block that sent may have brought them before: it looks while others of its launch are at work, which `done` counts, for
// `linger` nanoseconds at most.
struct Landing {
    Receiving receiving;
    float* rows;
    word row;
    word* flag;
    unsigned* done;
    word linger;
};

DEVICE word flag_of(const Landing& landing) { return flag_of(__ldcg(landing.receiving.step), landing.receiving.index); }

// By all threads of the block that has seen all ranks' flags, or (without rows) found that the step was given up.
DEVICE void bring(const Landing& landing, int rows, int width) {
    const Receiving& receiving = landing.receiving;
    move_rows(landing.rows, landing.row, receiving.from, receiving.from_row, rows, width);
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    store_release_here(landing.flag, flag_of(landing));
}

// By all threads of the block that sent, beside `others` of its launch. It may leave with nothing seen.
DEVICE void land_early(const Landing& landing, int rows, int width, unsigned others) {
    const Receiving& receiving = landing.receiving;
    __shared__ int there;
    __syncthreads();  // the step's number has been written
    if (threadIdx.x < 32) {
        const word wanted = flag_of(landing), begun = now();
        bool seen, goes_on;
        do {
            seen = true;
            for (word rank = threadIdx.x; rank < receiving.ranks; rank += 32)
                seen &= load_acquire(receiving.words + RANK_FLAGS + rank * LINE_WORDS) >= wanted;
            seen = !__any_sync(~0u, !seen);
            goes_on = !seen && __ldcg(landing.done) < others && now() - begun < landing.linger;
        } while (__shfl_sync(~0u, goes_on, 0));
        if (threadIdx.x == 0) there = seen;
        if (seen && receiving.times && threadIdx.x == 0) receiving.times[SEEN] = now();
    }
    __syncthreads();
    if (there) bring(landing, rows, width);
}

// By the others, once.
DEVICE void note_done(const Landing& landing) {
    if (landing.done && threadIdx.x == 0) atomicAdd(landing.done, 1u);
}

// Whether something is to land. After await_previous.
DEVICE bool lands(const Landing& landing) {
    const Receiving& receiving = landing.receiving;
    return receiving.from && __ldcg(receiving.decided) == 2 * flag_of(landing) + 1;
}

// By all threads of the first block, if something lands that has not. Also a step that was given up is said to have landed.
DEVICE void land(const Landing& landing, int rows, int width) {
    if (load_acquire_here(landing.flag) >= flag_of(landing)) return;  // nobody raises it in this launch but this block
    bring(landing, await_ranks(landing.receiving, false, [](int) {}) == THERE ? rows : 0, width);
}

// By every thread that reads of the rows before the next barrier, one at least. `says`: whether it notes that its block had nothing
// left to do.
DEVICE void await_landing(const Landing& landing, bool says) {
    const word wanted = flag_of(landing);
    if (says && landing.receiving.times) landing.receiving.times[BEGUN] = now();
    while (load_acquire_here(landing.flag) < wanted) {}
}
