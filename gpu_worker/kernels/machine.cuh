// What CUDA C++ has no names for: overlap of launches, asynchronous copies, matrix instructions. sm_80 and newer.
//
// Overlap (programmatic dependent launch, sm_90 and newer; elsewhere nothing): a kernel lets the next one be placed on
// the card as soon as its own blocks are, and itself waits for the end of the one before it, whose writes it then sees.
// Every kernel must wait, also one that reads nothing of its predecessor: whoever waits for it relies on all earlier ones
// being done. (A block that touches nothing may leave before, if others wait.) Weights and parameters may be read before the wait.
//
// tests/card_kit/emulator.h has these functions for a host compiler.
#pragma once
#include <stdint.h>

#ifndef EMULATED
#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif
#define DYNAMIC_SHARED(TYPE, NAME) extern __shared__ __align__(16) TYPE NAME[]

DEVICE void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void begin() { let_next_begin(), await_previous(); }

// Brings the 128 bytes around an address to the second-level cache.
DEVICE void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// 16 bytes from global to shared memory, past the first-level cache; zeros if not `present`.
DEVICE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
}
DEVICE void copy_async(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from),
                 "r"(present ? 16 : 0)
                 : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// c and the products of four unsigned bytes with four signed ones.
DEVICE int dot_unsigned(uint32_t a, int b, int c) {
    int sum;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Four matrices of 8 x 8 halves: lane l brings the address of row l % 8 of matrix l / 8 and gets of each the elements
// (l / 4, 2 (l % 4)) and the next one; transposed: (2 (l % 4), l / 4) and the one below.
template <bool TRANSPOSED>
DEVICE void load_matrices(uint32_t (&out)[4], const void* row) {
    const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
}

// A matrix of 8 x 8 halves, of which lane l has the elements (l / 4, 2 (l % 4)) and the next one: what it has of the
// transposed one.
DEVICE uint32_t transpose_matrix(uint32_t x) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

// d (16 x 8, f32) += a (16 x 16, f16) * b (16 x 8, f16), in the layout of mma.m16n8k16.
DEVICE void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
