"""Opens model files one after the other as a program would, in a process of its own with little address space.

Reads one path a line on standard input and answers each with a JSON line: the outcome, the error's text, seconds, and
the greatest number of bytes that Python and NumPy had allocated meanwhile.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
import tracemalloc

import psutil

from bloomery.runtime.architectures import build_program
from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Tokenizer

ROOM = 256 << 20  # bytes of address space beyond what the started interpreter has
TEXT = "hello world, hello <|im_end|> wörld 1234\n"
DEADLINE = 10  # seconds for one file; SIGALRM ends the process


def use(path: str) -> None:
    """Everything that a start touches in the file: the program, the tokenizer, every tensor's values."""
    with ModelFile.open(path) as model:
        assert build_program(model).vocabulary > 0
        tokenizer = Tokenizer.from_model_file(model)
        tokens = tokenizer.encode(TEXT)
        assert all(0 <= token < tokenizer.vocabulary for token in tokens)
        tokenizer.decode(tokens)
        for token in range(tokenizer.vocabulary):
            assert isinstance(tokenizer.piece(token), bytes)
        for tensor in model.tensors.values():
            assert tensor.dequantise().shape == tensor.shape[::-1]


def answer(path: str) -> dict[str, object]:
    signal.alarm(DEADLINE)
    tracemalloc.start()
    begin = time.monotonic()
    report: dict[str, object] = {"outcome": "harmless"}
    try:
        use(path)
    except ModelFileError as error:
        report = {"outcome": "refused", "message": error.message, "hint": error.hint, "text": str(error)}
    except BaseException as error:
        report = {"outcome": f"{type(error).__name__}: {error}"}
    report |= {"seconds": time.monotonic() - begin, "peak": tracemalloc.get_traced_memory()[1]}
    tracemalloc.stop()
    signal.alarm(0)
    return report


def main() -> None:
    limit = psutil.Process().memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)


if __name__ == "__main__":
    main()
