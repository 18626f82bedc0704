"""A stream beside the card's: what is launched on it in a graph runs beside what is launched after it.

Owns the stream and the events by which it leaves the card's stream and joins it again. PyCUDA's are not used: they
would have to be put away before its context.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloomery.gpu_worker.driver import Card, Library

_NON_BLOCKING, _DISABLE_TIMING = 1, 2
_EVENT_WAIT_DEFAULT = 0


class SideStream:
    """Ends with the card's context, in which it is made and used."""

    def __init__(self, card: Card, library: Library) -> None:
        self._library, self._main = library, ctypes.c_void_p(card.stream.handle)
        self._stream, self._left, self._done = (ctypes.c_void_p() for _ in range(3))
        library.call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))
        for event in (self._left, self._done):
            library.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_DISABLE_TIMING))
        self.away = False
        """Whether there is something on it that the card's stream has not waited for."""

    @property
    def handle(self) -> int:
        return self._stream.value or 0

    def leave(self) -> None:
        """What comes on this stream begins after all that is on the card's now has ended."""
        assert not self.away
        self._follow(self._main, self._stream, self._left)
        self.away = True

    def join(self) -> None:
        """What comes on the card's stream begins after all that is on this one has ended."""
        if self.away:
            self._follow(self._stream, self._main, self._done)
            self.away = False

    def _follow(self, first: ctypes.c_void_p, second: ctypes.c_void_p, event: ctypes.c_void_p) -> None:
        self._library.call("cuEventRecord", event, first)
        self._library.call("cuStreamWaitEvent", second, event, ctypes.c_uint(_EVENT_WAIT_DEFAULT))
