"""Random rows in the hollow n-gram tables of a synthetic file, at the places that given texts look up.

Tables of true row count are holes of 42 GB each, which read as zeros and never touch a disk. Whoever wants rows with
something in them, or real reads, writes those that the tokens of a test need.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bloomery.runtime.architectures import build_program
from bloomery.runtime.engram_hash import histories
from bloomery.runtime.engram_record import engram_tables
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.synthetic_blocks import random_blocks


def write_rows(path: Path, texts: Iterable[Sequence[int]], *, deviation: float = 1.0, seed: int = 7) -> int:
    """Writes every table row that the token sequences look up, each of random blocks of its own; returns how many
    there are. The same seed and texts give the same bytes."""
    with ModelFile.open(path) as model:
        program = build_program(model)
        assert program.engram is not None, f"{path} has no n-gram tables"
        contexts = np.concatenate([program.engram.contexts(histories(text, program.engram.longest)) for text in texts])
        written = 0
        with open(path, "r+b", buffering=0) as file:
            for table in engram_tables(program):
                tensor = program.weights[table.weight]
                ids = np.unique(program.engram.rows_of_contexts(table.site, contexts)).astype(np.int64)
                generator = np.random.default_rng([seed, table.site])
                blocks = random_blocks(generator, tensor.quant_type, len(ids) * tensor.shape[0], deviation)
                for number, row in zip(ids.tolist(), blocks.reshape(len(ids), -1), strict=True):
                    os.pwrite(file.fileno(), row.tobytes(), tensor.offset + number * table.row_bytes)
                written += len(ids)
    return written
