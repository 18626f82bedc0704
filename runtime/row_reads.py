"""The two passes in which rows of tables are read from their files, compiled: without the GIL, so threads share them.

Compiled at the first call, and kept on disk (`compiled`). Rows are given as lines (site, row, address, status) of
int64: which file, which row of its table, where it goes; the status is for what comes of it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from bloomery.runtime.compiled import compiled
from bloomery.runtime.sync import long_system_call, system_call

SITE, ROW, TO, STATUS = range(4)
_SYS_PREAD: Final = 17
_SYS_FADVISE: Final = 221
_SYS_PREADV2: Final = 327
_WILLNEED: Final = 3
_NOWAIT: Final = 8
_INTERRUPTED: Final = -4


@compiled
def ask(lines: Any, files: Any, piece: Any) -> Any:
    """Copies what the page cache holds and asks the disk for the rest, of which STATUS becomes 1, of all others 0;
    returns how many those are. `files`: handles and first bytes of the tables by site, bytes of a row. `piece` (2) is
    private to the caller. Older kernels only say no to reads that do not wait."""
    handles, starts, row_bytes = files
    waiting = 0
    for index in range(lines.shape[0]):
        site = lines[index, SITE]
        offset = lines[index, ROW] * row_bytes + starts[site]
        piece[0], piece[1] = lines[index, TO], row_bytes
        lines[index, STATUS] = 0
        if long_system_call(_SYS_PREADV2, handles[site], piece.ctypes.data, 1, offset, 0, _NOWAIT) != row_bytes:
            lines[index, STATUS] = 1
            waiting += 1
            system_call(_SYS_FADVISE, handles[site], offset, row_bytes, _WILLNEED)
    return waiting


@compiled
def wait(lines: Any, files: Any) -> Any:
    """Waits for the rows whose STATUS is 1. The index of one that could not be read, whose STATUS becomes what the
    system said (-errno, or how many bytes were there); -1 if all could."""
    handles, starts, row_bytes = files
    for index in range(lines.shape[0]):
        if lines[index, STATUS] == 1:
            site = lines[index, SITE]
            got: Any = np.int64(_INTERRUPTED)
            while got == _INTERRUPTED:
                offset = lines[index, ROW] * row_bytes + starts[site]
                got = system_call(_SYS_PREAD, handles[site], lines[index, TO], row_bytes, offset)
            if got != row_bytes:
                lines[index, STATUS] = got
                return index
    return -1
