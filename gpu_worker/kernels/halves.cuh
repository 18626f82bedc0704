// Rows of f16 in shared memory, as the tensor cores load them.
#pragma once
#include "common.cuh"

DEVICE uint32_t two_halves(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    uint32_t bits;
    memcpy(&bits, &both, 4);
    return bits;
}

// Where eight of a row's 32 lie, for rows that are loaded eight at a time.
DEVICE int short_place(int row, int eight) { return row * 64 + ((eight ^ ((row >> 1) & 3)) * 16); }

// Where 16 bytes of a row of WIDTH elements lie, WIDTH a multiple of 64: no bank serves two of eight neighbouring rows.
template <int WIDTH>
DEVICE int half_place(int row, int chunk) { return row * (WIDTH * 2) + ((chunk ^ (row & 7)) * 16); }
