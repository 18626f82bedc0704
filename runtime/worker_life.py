"""The life of a worker process, whatever it does: signals left to others, gone with its parent, errors reported.

A worker that the coordinator no longer wants is told so through its link or the arena; one whose coordinator is gone
removes the names that it left.
"""

from __future__ import annotations

import faulthandler
import signal
import traceback
from collections.abc import Callable
from typing import Protocol

import psutil

from bloomery.runtime.process_tree import watch_parent
from bloomery.runtime.runtime_files import unlink_owned
from bloomery.runtime.worker_link import Link
from bloomery.runtime.worker_messages import WorkerStart, error_fields


class Server(Protocol):
    """What a worker process is made for."""

    def serve_until_told(self) -> None: ...


def live(start: WorkerStart, begin: Callable[[Link], Server], pin: int | None = None) -> int:
    """Serves with what `begin` makes, on the CPU `pin` alone if one is named. Returns the exit status."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to whole groups: what they mean is the coordinator's affair
        signal.signal(number, signal.SIG_IGN)
    watch_parent(start.parent, lambda: unlink_owned(start.owner))
    if pin is not None:
        psutil.Process().cpu_affinity([pin])
    link = Link(start)
    try:
        begin(link).serve_until_told()
        return 0
    except Exception as error:
        traceback.print_exc()
        link.send("error", **error_fields(error))
        return 1
    finally:
        link.close()
