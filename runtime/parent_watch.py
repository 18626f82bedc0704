"""Ending with the parent process, also when it is killed.

Owns noticing a parent's death through a pidfd, which unlike PR_SET_PDEATHSIG does not depend on which thread of the
parent started this process. It does not know how this process ends itself.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

LAST_RESORT_S = 10.0
_POLL_S = 0.5


def end_with_parent(parent: int, stop: Callable[[], None]) -> None:
    """Calls `stop` in a thread once the process `parent` is gone (at once if it is no longer our parent); if this
    process is still there LAST_RESORT_S later, kills it."""
    threading.Thread(target=_watch, args=(parent, stop), name="bloomery-parent-watch", daemon=True).start()


def _watch(parent: int, stop: Callable[[], None]) -> None:
    _await_death(parent)
    stop()
    time.sleep(LAST_RESORT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _await_death(parent: int) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    except OSError:
        descriptor = -1  # no pidfd on this kernel: look at the parent's id from time to time
    if os.getppid() == parent and descriptor >= 0:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    while os.getppid() == parent:
        time.sleep(_POLL_S)
