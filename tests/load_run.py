"""Many streaming clients at once, a third of which go away at random: what leaks, what differs, how late /health is.

    python tests/load_run.py --seconds 120 --clients 64
    python tests/load_run.py --seconds 10 --server http://127.0.0.1:9931 --pid 4711   (started with --metrics)

Without --server it starts `bloomery-serve` with the demo model. Every stream that ends by itself must have the tokens
of its solo run; at the end no slot is busy, and memory, open files and /dev/shm are what they were. Prints one JSON
object; exit status 1 if something differs or leaks, or if /health was later than --health-ms at the 99th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

WORDS = ("the", "of", "iron", "water", "said", "old", "history", "river", "open", "door", "light", "error", "file")
WARM_SECONDS = 0.35  # of the run: memory is compared from here on
RESIDENT_MARGIN = 24 << 20


@dataclass
class Outcome:
    finished: int = 0
    left: int = 0
    refused: int = 0
    tokens: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


def requests_of(kinds: int) -> list[dict[str, Any]]:
    """Different prompts (some share their beginning), lengths and ways to sample, each with its seed."""
    chosen = random.Random(7)
    stem = " ".join(chosen.choices(WORDS, k=30))
    bodies = []
    for kind in range(kinds):
        own = " ".join(chosen.choices(WORDS, k=chosen.choice([3, 10, 60])))
        sampling = {"temperature": 0.0} if kind % 3 == 0 else {"temperature": 0.8, "seed": kind}
        length = chosen.choice([8, 24, 48, 96])
        prompt = f"{stem} {own}" if kind % 2 else own
        bodies.append({"prompt": prompt, "n_predict": length, "ignore_eos": True, "stream": True, **sampling})
    return bodies


async def post(port: int, body: dict[str, Any], leave_after: int | None = None) -> list[int] | int | None:
    """The tokens of a streamed answer; None if it was left after so many bytes; a status other than 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        received = bytearray()
        while part := await reader.read(65536):
            received += part
            if leave_after is not None and len(received) > leave_after:
                return None
        status = int(received[9:12])
        if status != 200:
            return status
        tokens: list[int] = []
        ended = False
        for line in received.split(b"\n"):
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                tokens += event.get("tokens", [])
                ended |= bool(event.get("stop"))
        if not ended:
            raise RuntimeError(f"a stream ended without its last event: {bytes(received[-200:])!r}")
        return tokens
    finally:
        writer.close()


async def get(port: int, path: str) -> tuple[float, bytes]:
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        data = await reader.read()
    finally:
        writer.close()
    if not data.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{path}: {data[:200]!r}")
    return time.perf_counter() - begun, data.partition(b"\r\n\r\n")[2]


async def client(number: int, port: int, bodies: list[dict[str, Any]], solo: list[Any], end: float, o: Outcome) -> None:
    chosen = random.Random(number)
    while time.monotonic() < end:
        which = chosen.randrange(len(bodies))
        leave = chosen.randrange(200, 6000) if number % 3 == 0 else None
        try:
            body = bodies[which] if leave is None else {**bodies[which], "n_predict": -1}  # it does not end before
            found = await post(port, body, leave)
        except Exception as error:
            o.errors.append(f"{type(error).__name__}: {error}")
            return
        if found is None:
            o.left += 1
        elif isinstance(found, int):
            o.refused += 1
            await asyncio.sleep(0.2)
        else:
            o.finished += 1
            o.tokens += len(found)
            # an answer that was to be left may have come whole, as far as the context reaches
            if (found if leave is None else found[: len(solo[which])]) != solo[which]:
                o.wrong.append({"request": bodies[which], "found": found, "solo": solo[which]})


async def watch_health(port: int, end: float, o: Outcome) -> None:
    while time.monotonic() < end:
        seconds, _ = await get(port, "/health")
        o.health.append(seconds)
        await asyncio.sleep(0.02)


def held(pid: int) -> dict[str, Any]:
    """What the server's processes and the machine hold of ours."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        "resident": sum(process.memory_info().rss - process.memory_info().shared for process in processes),
        "files": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
        "processes": len(processes),
        "shared_memory": sorted(path.name for path in Path("/dev/shm").glob(f"bloomery-{processes[-1].ppid()}-*")),
    }


async def idle(port: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        slots = json.loads((await get(port, "/slots"))[1])
        if not any(slot["is_processing"] for slot in slots):
            return True
        await asyncio.sleep(0.05)
    return False


async def aborted_requests(port: int) -> int:
    found = re.search(rb'outcome="aborted"} (\d+)', (await get(port, "/metrics"))[1])
    return int(found[1]) if found else 0


async def load(port: int, pid: int, clients: int, seconds: float, kinds: int) -> dict[str, Any]:
    """Runs the load; the figures of the run, "failures" among them."""
    bodies = requests_of(kinds)
    solo = [await post(port, body) for body in bodies]
    outcome, aborted = Outcome(), await aborted_requests(port)
    await asyncio.gather(*(get(port, "/health") for _ in range(20)))
    begun = time.monotonic()
    end = begun + seconds
    running = [asyncio.create_task(client(n, port, bodies, solo, end, outcome)) for n in range(clients)]
    running.append(asyncio.create_task(watch_health(port, end, outcome)))
    await asyncio.sleep(WARM_SECONDS * seconds)
    before = held(pid)
    await asyncio.gather(*running)
    elapsed = time.monotonic() - begun
    freed = await idle(port)
    await asyncio.sleep(0.5)
    after = held(pid)
    aborted = await aborted_requests(port) - aborted
    health = sorted(outcome.health)
    failures = list(dict.fromkeys(outcome.errors))
    if outcome.wrong:
        failures.append(f"{len(outcome.wrong)} streams differ from their solo runs, the first: {outcome.wrong[0]}")
    if aborted != outcome.left:
        failures.append(f"{outcome.left} clients left, {aborted} requests were aborted")
    if not freed:
        failures.append("slots are still busy")
    for name in ("files", "threads", "processes"):
        if after[name] > before[name]:
            failures.append(f"{name}: {before[name]} under load, {after[name]} afterwards")
    if after["shared_memory"] != before["shared_memory"]:
        failures.append(f"shared memory: {before['shared_memory']} became {after['shared_memory']}")
    if after["resident"] > before["resident"] + RESIDENT_MARGIN:
        failures.append(f"resident bytes grew from {before['resident']} to {after['resident']}")
    again = [await post(port, body) for body in bodies]
    if again != solo:
        failures.append("solo runs after the load differ from those before")
    return {
        "seconds": round(elapsed, 1),
        "clients": clients,
        "finished": outcome.finished,
        "left": outcome.left,
        "refused": outcome.refused,
        "tokens_per_second": round(outcome.tokens / elapsed, 1),
        "health_ms": {
            name: round(1e3 * health[min(len(health) - 1, int(share * len(health)))], 1)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "health_asked": len(health),
        "before": before,
        "after": after,
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--kinds", type=int, default=24, help="different requests")
    parser.add_argument("--health-ms", type=float, default=50, help="what /health may take at the 99th percentile")
    parser.add_argument("--server", help="URL of a running server, with --pid")
    parser.add_argument("--pid", type=int)
    parser.add_argument("arguments", nargs="*", help="more of bloomery-serve's, after --")
    args = parser.parse_args()
    if args.server:
        port = int(re.search(r":(\d+)", args.server.removeprefix("http:"))[1])  # type: ignore[index]
        figures = asyncio.run(load(port, args.pid, args.clients, args.seconds, args.kinds))
    else:
        from serving import serving

        demo = ("--demo", "tiny-qwen3moe", "--metrics")
        flags = (*demo, "--parallel", "16", "-c", "8192", "--queue", "128", *args.arguments)
        with serving(*flags) as server:
            figures = asyncio.run(load(server.port, server.process.pid, args.clients, args.seconds, args.kinds))
    late = figures["health_ms"]["p99"] > args.health_ms
    print(json.dumps(figures, indent=2))
    return 1 if figures["failures"] or late else 0


if __name__ == "__main__":
    sys.exit(main())
