// A card for a host compiler: runs the kernels of gpu_worker/kernels on the CPU, one block after the other, a fiber for
// each thread. Included before a kernel file; it stands in for the compiler's built-ins, the intrinsics that kernels use
// and machine.cuh. Slow, and meant for tests: threads of a block interleave at barriers and warp operations only,
// asynchronous copies arrive when they are waited for and not before, memory of a block begins as garbage.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <sys/mman.h>
#include <vector>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#undef __shared__
#undef __global__
#undef __device__
#undef __forceinline__
#undef __launch_bounds__
#define EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DEVICE inline
#define DYNAMIC_SHARED(TYPE, NAME) TYPE* NAME = reinterpret_cast<TYPE*>(emulated::shared)
#define UNROLLED

struct Three {
    unsigned x, y, z;
};
static Three threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
constexpr size_t STACK = 256 << 10, PAGE = 4096, BEYOND = 256;  // bytes; BEYOND a block's memory nothing may be written
static uint8_t* shared;

// A stack takes memory as far down as it was used; a thread that wants more than all of it ends at the page below.
struct Stack {
    uint8_t* base;
    Stack() {
        void* at = mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED || mprotect(at, PAGE, PROT_NONE)) std::perror("a thread's stack"), std::abort();
        base = static_cast<uint8_t*>(at) + PAGE;
    }
    Stack(Stack&& other) noexcept : base(std::exchange(other.base, nullptr)) {}
    ~Stack() {
        if (base) munmap(base - PAGE, STACK + PAGE);
    }
};

// A thread of execution with a stack of its own. Blocks change between theirs some hundred times a thread, and
// swapcontext asks the kernel for the signal mask each time: on x86-64 only what a call keeps is put aside.
#ifdef __x86_64__
extern "C" void emulated_change(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.pushsection .text
.globl emulated_change
.hidden emulated_change
.type emulated_change, @function
emulated_change:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulated_change, . - emulated_change
.popsection
)");
struct Place {
    void* at;
    void begin(uint8_t* stack, size_t size, void (*work)()) {
        void** top = reinterpret_cast<void**>(stack + size);
        *--top = nullptr;  // as after a call: nobody returns from work
        *--top = reinterpret_cast<void*>(work);
        at = top - 6;  // registers of any value
    }
    void leave_for(Place& other) { emulated_change(&at, other.at); }
};
#else
struct Place {
    ucontext_t at;
    void begin(uint8_t* stack, size_t size, void (*work)()) {
        getcontext(&at);
        at.uc_stack.ss_sp = stack, at.uc_stack.ss_size = size, at.uc_link = nullptr;
        makecontext(&at, work, 0);
    }
    void leave_for(Place& other) { swapcontext(&at, &other.at); }
};
#endif

struct Copy {
    void* to;
    uint8_t bytes[16];
};
struct Fiber {
    Place place;
    Stack stack;
    bool ended;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
struct Warp {
    void* lanes[32];
    int arrived, turn;
};
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Place scheduler;
static int current, alive, threads, at_barrier, barrier_turn;
static std::function<void()> body;

// The next thread of the block goes on, the first after the last; who launched the block once all have ended.
inline void yield() {
    Place& mine = fibers[current].place;
    if (!alive) return mine.leave_for(scheduler);
    const int last = current;
    do current = current + 1 == threads ? 0 : current + 1;
    while (fibers[current].ended);
    threadIdx = {unsigned(current), 0, 0};
    if (current != last) mine.leave_for(fibers[current].place);
}
inline void barrier() {
    const int turn = barrier_turn;
    if (++at_barrier == alive) at_barrier = 0, ++barrier_turn;
    while (turn == barrier_turn) yield();
}
// All lanes of a warp bring something; the last to come does the work for all.
template <class Work>
void together(void* mine, Work work) {
    Warp& warp = warps[current / 32];
    const int turn = warp.turn;
    warp.lanes[current % 32] = mine;
    if (++warp.arrived == 32) {
        work(warp.lanes);
        warp.arrived = 0, ++warp.turn;
    }
    while (turn == warp.turn) yield();
}
inline void run() {
    body();
    fibers[current].ended = true;
    --alive;
    if (alive && at_barrier == alive) at_barrier = 0, ++barrier_turn;
    yield();
}
// False if a block wrote beyond its shared memory.
inline bool launch(std::function<void()> work, Three grid, unsigned count, size_t shared_bytes) {
    std::vector<uint8_t> memory(shared_bytes + 64 + BEYOND);
    shared = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
    if (fibers.size() < count) fibers.resize(count);
    body = work, gridDim = grid, blockDim = {count, 1, 1}, threads = int(count);
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                std::memset(memory.data(), 0x7d, memory.size());
                warps.assign(count / 32, Warp{});
                alive = threads, at_barrier = 0;
                for (int i = 0; i < threads; ++i) {
                    Fiber& fiber = fibers[i];
                    fiber.ended = false, fiber.groups.clear(), fiber.open.clear();
                    // not all at the same place of their pages, which would share the same few lines of the cache
                    fiber.place.begin(fiber.stack.base, STACK - i % 32 * 1088 % PAGE, run);
                }
                current = 0, threadIdx = {0, 0, 0};
                scheduler.leave_for(fibers[0].place);
                if (std::any_of(shared + shared_bytes, shared + shared_bytes + BEYOND, [](auto x) { return x != 0x7d; }))
                    return false;
            }
    return true;
}
// A kernel's parameters are taken one after the other from a row of 8-byte words.
template <class... Parameters>
bool call(void (*kernel)(Parameters...), const uint8_t* words, Three grid, unsigned threads, size_t shared_bytes) {
    auto work = [=] {
        const uint8_t* at = words;
        auto next = [&at](auto* value) { std::memcpy(value, at, sizeof *value), at += sizeof *value; };
        std::tuple<Parameters...> values;
        std::apply([&](auto&... each) { (next(&each), ...); }, values);
        std::apply(kernel, values);
    };
    return launch(work, grid, threads, shared_bytes);
}
template <class T, class Combine>
T exchange(T value, Combine combine) {
    struct Part {
        T in, out;
    } part{value, value};
    together(&part, [&](void** lanes) {
        for (int i = 0; i < 32; ++i)
            static_cast<Part*>(lanes[i])->out = combine(i, [&](int k) { return static_cast<Part*>(lanes[k])->in; });
    });
    return part.out;
}
// Eight numbers at a time; the compiler makes of it what the machine has.
using Floats = float __attribute__((vector_size(32)));
using Words = uint32_t __attribute__((vector_size(32)));
using Halves = uint16_t __attribute__((vector_size(16)));
// What numbers of sixteen bits are, `count` times eight of them.
inline void numbers_of_halves(float* to, const void* from, int count) {
    for (int i = 0; i < count; ++i) {
        Halves read;
        std::memcpy(&read, static_cast<const uint8_t*>(from) + 16 * i, 16);
        const Words bits = __builtin_convertvector(read, Words), magnitude = (bits & 0x7fff) << 13;
        const Words finite = Words(Floats(magnitude) * 0x1p112f), endless = magnitude | 0x7f800000;
        const Words number = ((bits & 0x7c00) == 0x7c00 ? endless : finite) | (bits & 0x8000) << 16;
        std::memcpy(to + 8 * i, &number, 32);
    }
}
inline void arrive(std::vector<Copy>& copies) {
    for (auto& copy : copies) std::memcpy(copy.to, copy.bytes, 16);
    copies.clear();
}
}  // namespace emulated

// ---- built-ins
inline void __syncthreads() { emulated::barrier(); }
inline void __threadfence() {}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __syncwarp(unsigned = ~0u) {
    int nothing;
    emulated::together(&nothing, [](void**) {});
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    return emulated::exchange(value, [=](int i, auto in) { return in(i ^ distance); });
}
template <class T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {  // `from` may differ between lanes
    struct Part {
        T in, out;
        int from;
    } part{value, value, from};
    emulated::together(&part, [&](void** lanes) {
        for (int i = 0; i < 32; ++i) {
            Part* mine = static_cast<Part*>(lanes[i]);
            mine->out = static_cast<Part*>(lanes[(i & -width) | (mine->from & (width - 1))])->in;
        }
    });
    return part.out;
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
    return emulated::exchange(value, [=](int i, auto in) { return in(i < distance ? i : i - distance); });
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __ballot_sync(unsigned, bool mine) {
    return emulated::exchange(unsigned(mine), [](int, auto in) {
        unsigned all = 0;
        for (int k = 0; k < 32; ++k) all |= (in(k) & 1) << k;
        return all;
    });
}
inline int __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return emulated::exchange(value, [](int, auto in) {
        unsigned best = in(0);
        for (int k = 1; k < 32; ++k) best = std::max(best, in(k));
        return best;
    });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    return emulated::exchange(value, [](int, auto in) {
        unsigned best = in(0);
        for (int k = 1; k < 32; ++k) best = std::min(best, in(k));
        return best;
    });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned atomicAdd(unsigned* at, unsigned value) { return std::exchange(*at, *at + value); }
inline unsigned atomicOr(unsigned* at, unsigned value) { return std::exchange(*at, *at | value); }
inline int atomicAdd(int* at, int value) { return std::exchange(*at, *at + value); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
template <class To, class From>
To emulated_bits(From from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline float half_bits(uint16_t bits) { return __half2float(emulated_bits<__half>(bits)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((uint64_t(high) << 32) | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t(y) << 32) | x;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= unsigned((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
    return out;
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
    return c;
}
inline int __dp2a_lo(int a, int b, int c) { return c + int(int16_t(a)) * int8_t(b) + int(int16_t(a >> 16)) * int8_t(b >> 8); }
inline int __dp2a_hi(int a, int b, int c) { return __dp2a_lo(a, b >> 16, c); }
inline int dot_unsigned(uint32_t a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int(uint8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
    return c;
}
template <class T>
T __ldcs(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
T __ldcv(const T* at) { return *at; }
template <class T>
T __ldg(const T* at) { return *at; }
using std::isnan;
using std::max;
using std::min;
inline int min(int a, unsigned b) { return std::min(a, int(b)); }

// ---- hand_off.cuh
inline void store_release(long long* at, long long value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline long long load_acquire(const long long* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_release_here(long long* at, long long value) { store_release(at, value); }
inline long long load_acquire_here(const long long* at) { return load_acquire(at); }
inline long long now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

// ---- hyper_read.cuh
inline void tell(long long* at, long long value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
inline long long heard(const long long* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }

// ---- machine.cuh
inline void let_next_begin() {}
inline void await_previous() {}
inline void begin() {}
inline void prefetch(const void*) {}
inline void copy_async(void* to, const void* from, bool present = true) {
    emulated::Copy copy{to, {}};
    if (present) std::memcpy(copy.bytes, from, 16);
    emulated::fibers[emulated::current].open.push_back(copy);
}
inline void commit_copies() {
    emulated::Fiber& fiber = emulated::fibers[emulated::current];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}
template <int PENDING>
void await_copies() {
    emulated::Fiber& fiber = emulated::fibers[emulated::current];
    while (fiber.groups.size() > PENDING) {
        emulated::arrive(fiber.groups.front());
        fiber.groups.pop_front();
    }
}
template <bool TRANSPOSED>
void load_matrices(uint32_t (&out)[4], const void* row) {
    struct Part {
        const uint16_t* row;
        uint32_t* out;
    } part{static_cast<const uint16_t*>(row), out};
    if (reinterpret_cast<uintptr_t>(row) % 16) std::fprintf(stderr, "a matrix row is not aligned\n"), std::abort();
    emulated::together(&part, [](void** lanes) {
        auto element = [&](int matrix, int r, int c) { return uint32_t(static_cast<Part*>(lanes[8 * matrix + r])->row[c]); };
        for (int lane = 0; lane < 32; ++lane)
            for (int m = 0; m < 4; ++m) {
                const int r = lane / 4, c = lane % 4 * 2;
                static_cast<Part*>(lanes[lane])->out[m] =
                    TRANSPOSED ? element(m, c, r) | element(m, c + 1, r) << 16 : element(m, r, c) | element(m, r, c + 1) << 16;
            }
    });
}
inline uint32_t transpose_matrix(uint32_t x) {
    struct Part {
        uint32_t in, out;
    } part{x, 0};
    emulated::together(&part, [](void** lanes) {
        auto element = [&](int r, int c) { return static_cast<Part*>(lanes[4 * r + c / 2])->in >> 16 * (c % 2) & 0xFFFF; };
        for (int lane = 0; lane < 32; ++lane) {
            const int r = lane / 4, c = lane % 4 * 2;
            static_cast<Part*>(lanes[lane])->out = element(c, r) | element(c + 1, r) << 16;
        }
    });
    return part.out;
}
inline void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Part {
        float* d;
        const uint32_t* a;
        uint32_t b[2];
    } part{d, a, {b0, b1}};
    emulated::together(&part, [](void** lanes) {
        constexpr int ROWS = 4;  // sums that grow side by side, each in the order of k
        uint32_t words[24][8];   // two neighbours of a row of a each, then of a column of b
        for (int lane = 0; lane < 32; ++lane) {
            const Part& mine = *static_cast<Part*>(lanes[lane]);
            const int r = lane / 4, c = lane % 4;
            for (int j = 0; j < 4; ++j) words[r + j % 2 * 8][c + j / 2 * 4] = mine.a[j];
            for (int j = 0; j < 2; ++j) words[16 + r][c + j * 4] = mine.b[j];
        }
        // rows of a that are all the same, as behind a tile's last, are multiplied once
        bool alike = true;
        for (int i = 1; i < 16; ++i) alike = alike && !std::memcmp(words[i], words[0], sizeof words[0]);
        const int different = alike ? ROWS : 16;
        float numbers[24][16];
        emulated::numbers_of_halves(&numbers[0][0], &words[0][0], different * 2);
        emulated::numbers_of_halves(&numbers[16][0], &words[16][0], 16);
        emulated::Floats b[16], sums[16] = {};
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 8; ++n) b[k][n] = numbers[16 + n][k];
        for (int i = 0; i < different; i += ROWS)
            for (int k = 0; k < 16; ++k)
                for (int j = 0; j < ROWS; ++j) sums[i + j] += numbers[i + j][k] * b[k];
        for (int i = 0; i < 16; ++i)
            for (int n = 0; n < 8; n += 2) {
                float* d = static_cast<Part*>(lanes[i % 8 * 4 + n / 2])->d + i / 8 * 2;
                d[0] += sums[alike ? 0 : i][n], d[1] += sums[alike ? 0 : i][n + 1];
            }
    });
}
