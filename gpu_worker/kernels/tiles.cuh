// A product of 128 rows with 128 rows, both f16 and along their elements, on tensor cores: 256 threads, 64 elements at a time.
//
// Every sum runs over the elements in ascending order, 16 at a time as the tensor cores add them, in f32; which rows
// share a tile does not matter to any of them.
#pragma once
#include "common.cuh"

constexpr int TILE = 128;
constexpr int TILE_THREADS = 256;
constexpr int DEPTH = 64;
constexpr int DEEP = 3;  // steps on their way
constexpr int TILE_BYTES = TILE * DEPTH * 2;
constexpr int TILE_MEMORY = DEEP * 2 * TILE_BYTES;

// Where 16 bytes of a row lie in a tile whose rows are 128 bytes: no bank serves two rows of a matrix load.
DEVICE int tile_place(int row, int chunk) { return row * (DEPTH * 2) + ((chunk ^ (row & 7)) * 16); }

// sums[i][j]: of rows 16 i of the warp's half and columns 8 j of its quarter, in the layout of mma.m16n8k16.
// row_a(r), row_b(r): where rows 0..127 of each side begin, 16-byte aligned; `width` is a multiple of 64.
template <class RowA, class RowB>
DEVICE void multiply_tile(uint8_t* memory, int width, RowA row_a, RowB row_b, float (&sums)[4][4][4]) {
    const int chunk = threadIdx.x & 7, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const __half *from_a[4], *from_b[4];
    int to[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = threadIdx.x / 8 + 32 * i;
        from_a[i] = row_a(row) + 8 * chunk, from_b[i] = row_b(row) + 8 * chunk;
        to[i] = tile_place(row, chunk);
    }
    const int steps = width / DEPTH;
    int fetched = 0, into = 0;
    auto fetch = [&]() {
        if (fetched < steps) {
            uint8_t* stage = memory + into * (2 * TILE_BYTES);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                copy_async(stage + to[i], from_a[i]), copy_async(stage + TILE_BYTES + to[i], from_b[i]);
                from_a[i] += DEPTH, from_b[i] += DEPTH;
            }
            into = into == DEEP - 1 ? 0 : into + 1;
        }
        ++fetched;
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < DEEP - 1; ++i) fetch();
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;

    const int half = warp / 4 * 64 + (lane & 15), quarter = warp % 4 * 32 + (lane & 7) + (lane >> 4) * 8;
    int out_of = 0;
    for (int step = 0; step < steps; ++step) {
        await_copies<DEEP - 2>();
        __syncthreads();
        fetch();
        const uint8_t* stage = memory + out_of * (2 * TILE_BYTES);
        out_of = out_of == DEEP - 1 ? 0 : out_of + 1;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) {
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load_matrices<false>(a[i], stage + tile_place(half + 16 * i, 2 * k + (lane >> 4)));
#pragma unroll
            for (int j = 0; j < 2; ++j)
                load_matrices<false>(b[j], stage + TILE_BYTES + tile_place(quarter + 16 * j, 2 * k + ((lane >> 3) & 1)));
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) multiply_f16(sums[i][j], a[i], b[j / 2][2 * (j & 1)], b[j / 2][2 * (j & 1) + 1]);
        }
    }
    await_copies<0>();
}

// emit(row, column, i, j, e) for what this thread holds: sums[i][j][e] and the one after it, in the next column.
template <class Emit>
DEVICE void each_pair(Emit emit) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 4; e += 2)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                emit(warp / 4 * 64 + 16 * i + lane / 4 + 4 * e, warp % 4 * 32 + 8 * j + 2 * (lane & 3), i, j, e);
}
