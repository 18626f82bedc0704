"""Many clients at once for a few seconds; `load_run.py` does the same for minutes, with a bound on /health.

Planted once and seen to fail: a stream whose client has gone goes on; one sequence gets another's results.
"""

from __future__ import annotations

import asyncio

from load_run import load
from serving import serving


def test_streams_are_their_solo_runs_and_nothing_leaks() -> None:
    with serving(
        "--demo", "tiny-qwen3moe", "--threads", "1", "--parallel", "6", "-c", "6144", "--queue", "64", "--metrics"
    ) as server:
        figures = asyncio.run(load(server.port, server.process.pid, clients=20, seconds=3, kinds=8))
    assert figures["failures"] == []
    assert figures["finished"] and figures["left"] and figures["health_asked"] > 3 and not figures["refused"]
