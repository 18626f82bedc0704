"""Looks for scales that are not finite in a sample of the blocks of every tensor of a file.

Owns which blocks are sampled and how the disk is asked for them. Which bytes of a block are scales is known by
`quant_types`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.gguf_reader import DAMAGED_HINT, Container, TensorEntry

WHOLE_BYTES: Final = 256 << 10  # tensors of up to this size are checked whole
RUNS, RUN_BYTES = 4, 8 << 10  # of greater ones a few runs of two or three pages each
SEED: Final = 20240229


def check_scales(container: Container) -> None:
    """Raises ModelFileError naming tensor and block if a sampled scale is NaN or infinite; the sample is always the
    same."""
    mapping = container.mapping
    data: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
    runs = list(_runs(container.entries))
    # All runs are asked for at once, and nothing around them: a cold file of hundreds of gigabytes on a disk would
    # otherwise be read in thousands of steps, one after the other, each with the kernel's read-ahead.
    if runs:
        mapping.madvise(mmap.MADV_RANDOM)
        for entry, start, count in runs:
            first = (entry.offset + start * entry.quant_type.block_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            end = entry.offset + (start + count) * entry.quant_type.block_bytes
            mapping.madvise(mmap.MADV_WILLNEED, first, end - first)
        mapping.madvise(mmap.MADV_NORMAL)
    for entry, start, count in runs:
        _check_run(container, data, entry, start, count)


def _runs(entries: tuple[TensorEntry, ...]) -> Iterator[tuple[TensorEntry, int, int]]:
    """Tensor, first block and number of blocks of each run."""
    generator = np.random.default_rng(SEED)
    for entry in entries:
        blocks = entry.nbytes // entry.quant_type.block_bytes
        if entry.nbytes <= WHOLE_BYTES:
            yield entry, 0, blocks
        else:
            count = RUN_BYTES // entry.quant_type.block_bytes
            for start in (0, *generator.integers(0, blocks - count, RUNS - 1).tolist()):
                yield entry, start, count


def _check_run(container: Container, data: npt.NDArray[np.uint8], entry: TensorEntry, start: int, count: int) -> None:
    size = entry.quant_type.block_bytes
    first = entry.offset + start * size
    bad = entry.quant_type.non_finite(data[first : first + count * size].reshape(count, size))
    if bad.any():
        block = start + int(bad.argmax())
        what = "an element" if entry.quant_type.block_elements == 1 else "a scale"
        raise ModelFileError(
            f"{container.path}: tensor {entry.name} ({entry.quant_type.name}) has {what} that is not finite in block"
            f" {block} of {entry.nbytes // size} (byte {entry.offset + block * size}), expected finite numbers",
            DAMAGED_HINT,
        )
