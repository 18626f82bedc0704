"""N-gram rows for steps ahead: card and compiled host code tell each other tokens and rows, without Python between.

Owns the memory that both see and its registration with the driver. What is read, and the
words' order, is `quick_rows`'s.

A step ahead ends by writing its tokens into this memory and its number to TOLD (release, system scope). A thread, which
has no need of the GIL, polls TOLD, numbers and reads the rows of these tokens, and writes the step's number to
FLAG. The next step runs its layers meanwhile, and waits for FLAG where it first needs a table's row.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.gpu_worker.launches import MAX_ROWS, AheadAddresses
from bloomery.runtime.quick_rows import FLAG, LINE, RELEASED, STOP, TOLD, QuickRows

_TOKENS: Final = 3 * LINE
_ROWS: Final = 4 * LINE


class Mapped(Protocol):
    def address_of(self, address: int) -> int: ...

    def close(self) -> None: ...


class RowsAhead:
    """One for an executor. `tables` are names of weights in the order of `quick`'s sites."""

    def __init__(
        self,
        quick: QuickRows,
        tables: tuple[str, ...],
        register: Callable[[int, int], Mapped],
        thread: ThreadPoolExecutor,
    ) -> None:
        """`register(address, bytes)` makes memory of this process known to the card; `thread` is where it is served."""
        sites, rows, row_bytes = quick.shape
        each = rows * row_bytes
        assert each % 16 == 0 and MAX_ROWS * 4 <= LINE
        self._memory = mmap.mmap(-1, _ROWS + sites * each + LINE)
        area: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._words = area[:_TOKENS].view(np.int64)
        self._tokens = area[_TOKENS:_ROWS].view(np.int32)
        self._quick, self._start = quick, area.ctypes.data
        self._outs = self._start + _ROWS + each * np.arange(sites)
        self._mapped = register(self._start, len(area))
        self._thread = thread

        def seen(offset: int) -> int:
            return self._mapped.address_of(self._start + offset)

        places = {name: seen(_ROWS + index * each) for index, name in enumerate(tables)}
        words = (seen(TOLD * LINE), seen(FLAG * LINE), seen(_TOKENS))
        self.addresses = AheadAddresses(*words, places, each // MAX_ROWS)

    @contextlib.contextmanager
    def serving(self, history: NDArray[np.int64], laps: int) -> Iterator[None]:
        """Rows for `history` (R, longest; newest first) are there at once, those of `laps` more steps as they come: for
        the launches inside, which are waited for inside, too. Raises TableReadError when they have ended, if rows could
        not be read."""
        self._words[:] = 0
        self._quick.bring(history, self._outs)
        arguments = (self._start, self._tokens, laps, history, self._outs)
        served: Future[None] = self._thread.submit(self._quick.serve, *arguments)
        try:
            yield
        except BaseException:
            self._words[STOP * LINE // 8] = 1
            with contextlib.suppress(Exception):  # what the caller ends with says more
                served.result()
            raise
        served.result()

    def close(self) -> None:
        self._words[STOP * LINE // 8], self._words[FLAG * LINE // 8] = 1, RELEASED
        self._mapped.close()
