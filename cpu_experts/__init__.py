"""Host executor: Numba kernels and the pinned worker processes that run programs on the CPU."""
