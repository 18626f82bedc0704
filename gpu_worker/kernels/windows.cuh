// What attention over a window of positions and over group rows reads: the places of a row's keys.
#pragma once
#include "halves.cuh"

struct Ring {
    const void* rows;
    word slot_stride, row_stride, count, span;
};
struct Groups {
    const void* rows;  // null: a window alone
    word slot_stride, row_stride, ratio;
    const int* chosen;  // null: all that are visible
    word chosen_row, most;
};

// How many numbers of an ascending list, which ends with -1, are no less than 0. Called by all threads of a block of 256.
DEVICE int listed(const int* list, int most) {
    __shared__ int counts[8];
    int mine = 0;
    for (int i = threadIdx.x; i < most; i += 256) mine += list[i] >= 0;
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) mine += __shfl_xor_sync(~0u, mine, distance);
    if ((threadIdx.x & 31) == 0) counts[threadIdx.x / 32] = mine;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < 8; ++w) all += counts[w];
    return all;
}

// Where the f16 keys of a row lie, by number: those of the window first, of which there are `in_window`.
struct RowKeys {
    const __half *of_window, *of_groups;
    const int* chosen;
    word window_stride, groups_stride;
    int first, ring, in_window, count;

    // Any row where there is no key of that number.
    DEVICE const __half* key(int number) const {
        if (number < in_window) {
            const int place = first + number;
            return of_window + (place < ring ? place : place - ring) * window_stride;
        }
        if (number >= count) return of_window;
        return of_groups + word(chosen ? chosen[number - in_window] : number - in_window) * groups_stride;
    }
};

// Called by all threads of a block of 256.
DEVICE RowKeys keys_of(const Ring& window, const Groups& groups, int row, int slot, int position) {
    RowKeys keys;
    const int start = max(0, position + 1 - int(window.span));
    keys.of_window = static_cast<const __half*>(window.rows) + slot * window.slot_stride;
    keys.of_groups = static_cast<const __half*>(groups.rows) + slot * groups.slot_stride;
    keys.chosen = groups.chosen ? groups.chosen + row * groups.chosen_row : nullptr;
    keys.window_stride = window.row_stride, keys.groups_stride = groups.row_stride;
    keys.ring = int(window.count), keys.first = start % keys.ring, keys.in_window = position + 1 - start;
    int in_groups = groups.rows ? (position + 1) / int(groups.ratio) : 0;
    if (groups.rows && keys.chosen) in_groups = listed(keys.chosen, int(groups.most));
    keys.count = keys.in_window + in_groups;
    return keys;
}

// COUNT keys from number `from` on their way to shared memory (half_place of WIDTH), zeros for those that are not there.
template <int WIDTH, int COUNT>
DEVICE void fetch_keys(uint8_t* to, const RowKeys& keys, int from) {
    constexpr int ACROSS = WIDTH / 8;
#pragma unroll
    for (int i = 0; i < COUNT * ACROSS / 256; ++i) {
        const int at = threadIdx.x + 256 * i, key = at / ACROSS, chunk = at % ACROSS;
        copy_async(to + half_place<WIDTH>(key, chunk), keys.key(from + key) + 8 * chunk, from + key < keys.count);
    }
    commit_copies();
}
