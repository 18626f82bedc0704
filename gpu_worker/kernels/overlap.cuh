// Overlap of neighbouring launches (programmatic dependent launch, sm_90 and newer; elsewhere nothing).
//
// A kernel lets the next one be placed on the card as soon as its own blocks are, and itself waits for the end of the
// one before it, whose writes it then sees. Every kernel must wait, also one that reads nothing of its predecessor:
// whoever waits for it relies on all earlier ones being done. Weights and parameters may be read before the wait.
#pragma once

__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void begin() { let_next_begin(), await_previous(); }
