// The router of softplus.cuh, where no product beside it takes it in.
#include "softplus.cuh"

// Grid rows, 128 threads; dynamic shared memory 8 * experts bytes.
extern "C" __global__ void __launch_bounds__(128)
    softplus_router(const float* logits, word logits_row, word experts, SoftplusChoice how) {
    begin();
    DYNAMIC_SHARED(float, scores);
    softplus_row(logits + blockIdx.x * logits_row, blockIdx.x, how, int(experts), scores);
}
