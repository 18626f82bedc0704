"""The arena: one layout for all, validated on attach; nothing that cannot fit; leftovers swept, the living kept."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bloomery.runtime import arena as arena_module
from bloomery.runtime import runtime_files
from bloomery.runtime.arena import Arena, ArenaError, ArenaLayout, ArenaShape, Lowered, segment_path
from bloomery.runtime.cache_types import CacheType
from bloomery.runtime.errors import BloomeryError, PlanError
from bloomery.runtime.program import Buffer, CacheState, GroupState, Program, RingState
from bloomery.runtime.slot_states import SlotStates

SHAPE = ArenaShape(context=40, slots=3, max_rows=16, max_out_rows=5, processes=2, cache_type="f16")
LOWERED = Lowered(scratch=(("experts", 1000), ("quantised", 77)), stages=9)


def make_program(width: int = 100) -> Program:
    return Program(
        architecture="none",
        buffers={
            "x": Buffer("x", width),
            "ids": Buffer("ids", 6, dtype="i32"),
            "logits": Buffer("logits", 33, rows="out"),
            "argmax": Buffer("argmax", 1, rows="out", dtype="i32"),
        },
        states={"keys": CacheState("keys", 24), "values": CacheState("values", 7)},
        weights={},
        ops=(),
        vocabulary=33,
        context_length=40,
        layers=1,
    )


@pytest.fixture
def prefix() -> Iterator[str]:
    name = f"{runtime_files.owner_name()}-test{time.monotonic_ns()}"
    yield name
    arena_module.unlink(name)


@pytest.fixture
def layout() -> ArenaLayout:
    return ArenaLayout(make_program(), SHAPE, LOWERED)


def test_layout_is_the_same_everywhere_and_differs_for_any_difference(layout: ArenaLayout) -> None:
    assert ArenaLayout(make_program(), SHAPE, LOWERED).digest == layout.digest
    others = [ArenaLayout(make_program(101), SHAPE, LOWERED)]
    changes: tuple[dict[str, Any], ...] = (
        {"context": 41},
        {"slots": 4},
        {"max_rows": 17},
        {"max_out_rows": 6},
        {"processes": 3},
        {"cache_type": "f32"},
    )
    for change in changes:
        others.append(ArenaLayout(make_program(), replace(SHAPE, **change), LOWERED))
    others.append(ArenaLayout(make_program(), SHAPE, replace(LOWERED, stages=10)))
    others.append(ArenaLayout(make_program(), SHAPE, replace(LOWERED, scratch=(("experts", 1000), ("quantised", 78)))))
    digests = {other.digest for other in others} | {layout.digest}
    assert len(digests) == len(others) + 1


def test_regions_are_aligned_apart_and_inside_their_segments(layout: ArenaLayout) -> None:
    for segment, nbytes in layout.segments.items():
        regions = sorted((r.offset, r.nbytes) for r in layout.regions.values() if r.segment == segment)
        end = 0
        for offset, size in regions:
            assert offset % 128 == 0 and offset >= end
            end = offset + size
        assert end <= nbytes


def test_every_process_sees_the_same_bytes(prefix: str, layout: ArenaLayout) -> None:
    rng = np.random.default_rng(11)
    owner = Arena.create(prefix, layout)
    other = Arena.attach(prefix, ArenaLayout(make_program(), SHAPE, LOWERED))
    for name in layout.regions:
        assert owner.address(name) % 128 == 0 and owner.address(name) != other.address(name)
        assert not owner.memory(name).any()
    x = rng.standard_normal((16, 100)).astype(np.float32)
    owner.buffer("x")[:] = x
    np.testing.assert_array_equal(other.buffer("x"), x)
    assert other.buffer("x").strides[0] % 64 == 0 and other.buffer("logits").shape == (5, 33)
    keys = rng.standard_normal((3, 40, 24)).astype(np.float16)
    other.state("keys")[:] = keys
    np.testing.assert_array_equal(owner.state("keys"), keys)
    assert not owner.state("values").any()
    assert segment_path(prefix, "cache").stat().st_mode & 0o777 == 0o600


def test_states_lie_apart_in_their_own_types(prefix: str) -> None:
    """Rings have room for the greatest step beyond their span, groups a row for each; f32, i32 whatever the caches."""
    states = {
        state.name: state
        for state in (
            CacheState("keys", 24),
            RingState("window", 7, 4),
            RingState("sums", 5, 2, "f32"),
            RingState("tokens", 1, 3, "i32"),
            GroupState("groups", 9, 3),
        )
    }
    layout = ArenaLayout(replace(make_program(), states=states), SHAPE, LOWERED)
    arena = Arena.create(prefix, layout)
    found = {name: arena.state(name) for name in states}
    assert {name: (array.shape, array.dtype.name) for name, array in found.items()} == {
        "keys": ((3, 40, 24), "float16"),
        "window": ((3, 20, 7), "float16"),
        "sums": ((3, 18, 5), "float32"),
        "tokens": ((3, 19, 1), "int32"),
        "groups": ((3, 14, 9), "float16"),
    }
    for number, array in enumerate(found.values()):
        array[...] = number + 1
    for number, (name, array) in enumerate(found.items()):
        assert (array == number + 1).all()
        start = array.ctypes.data - arena.address(f"state:{name}")
        assert start == 0 and layout.regions[f"state:{name}"].nbytes == 3 * array.strides[0]


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_heads_of_a_state_lie_apart_and_travel_as_whole_rows(prefix: str, cache_type: CacheType) -> None:
    """In memory [slot][head][row]; snapshots and copies are those of a state whose rows lie whole."""
    shape = replace(SHAPE, cache_type=cache_type)
    whole = {"keys": CacheState("keys", 96)}
    apart = {"keys": CacheState("keys", 96, heads=3)}
    layout = ArenaLayout(replace(make_program(), states=apart), shape, LOWERED)
    arena = Arena.create(prefix, layout)
    keys = arena.state("keys")
    dtype, width = layout.state_dtype("keys"), layout.state_width("keys")
    assert keys.shape == (3, 40, 3, width // 3)
    generator = np.random.default_rng(13)
    plain = generator.integers(0, 100, (3, 40, width)).astype(dtype)
    keys[...] = plain.reshape(keys.shape)
    stored = arena.memory("state:keys").view(dtype)
    for slot, head in ((0, 0), (1, 2), (2, 1)):
        start = (slot * layout.slot_stride("keys") + head * layout.head_stride("keys")) // dtype.itemsize
        rows = stored[start:][: 40 * width // 3].reshape(40, width // 3)
        np.testing.assert_array_equal(rows, plain[slot, :, head * width // 3 :][:, : width // 3])
    sizes = {"slots": 3, "context": 40, "spare": 16}
    found, expected = SlotStates(apart, {"keys": keys}, **sizes), SlotStates(whole, {"keys": plain}, **sizes)
    for states in (found, expected):
        states.copy_prefix(2, 0, 13)
        assert states.snapshot_bytes(20) == 20 * width * dtype.itemsize
    np.testing.assert_array_equal(keys.reshape(plain.shape), plain)
    snapshot = found.snapshot(1, 20)
    in_pieces = found.snapshot_pieces(1, 20)
    with pytest.raises(StopIteration) as end:
        while True:
            next(in_pieces)
    np.testing.assert_array_equal(end.value.value.rows["keys"], snapshot.rows["keys"])
    np.testing.assert_array_equal(snapshot.rows["keys"], expected.snapshot(1, 20).rows["keys"])
    for states in (found, expected):
        states.restore(2, snapshot)
    np.testing.assert_array_equal(keys.reshape(plain.shape), plain)


def test_copies_of_a_prefix_take_that_prefix_and_nothing_else(prefix: str, layout: ArenaLayout) -> None:
    rng = np.random.default_rng(12)
    arena = Arena.create(prefix, layout)
    arrays = {name: arena.state(name) for name in layout.states}
    before = {}
    for name, array in arrays.items():
        array[:] = rng.standard_normal(array.shape)
        before[name] = array.copy()
    SlotStates(layout.states, arrays, slots=3, context=40, spare=16).copy_prefix(2, 0, 13)
    for name, old in before.items():
        expected = old.copy()
        expected[0, :13] = old[2, :13]
        np.testing.assert_array_equal(arena.state(name), expected)


@pytest.mark.parametrize(
    ("field", "offset", "value"),
    [("magic", 0, b"NOTARENA"), ("layout version", 8, b"\x63\0\0\0"), ("layout digest", 24, b"\0" * 8)],
)
def test_attach_names_what_is_wrong_with_a_header(
    prefix: str, layout: ArenaLayout, field: str, offset: int, value: bytes
) -> None:
    Arena.create(prefix, layout)
    path = segment_path(prefix, "activations")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)
    with pytest.raises(ArenaError, match=f"{path}: {field} is .*, expected"):
        Arena.attach(prefix, layout)


def test_attach_refuses_another_layout_a_short_file_and_a_missing_one(prefix: str, layout: ArenaLayout) -> None:
    Arena.create(prefix, layout)
    other = ArenaLayout(make_program(), replace(SHAPE, processes=1), LOWERED)
    with pytest.raises(ArenaError, match="expected"):
        Arena.attach(prefix, other)
    path = segment_path(prefix, "cache")
    os.truncate(path, 5000)
    with pytest.raises(ArenaError, match=re.escape(f"{path}: file bytes is 5000")):
        Arena.attach(prefix, layout)
    os.truncate(path, 3)
    with pytest.raises(ArenaError, match="too short"):
        Arena.attach(prefix, layout)
    path.unlink()
    with pytest.raises(ArenaError, match="No such file"):
        Arena.attach(prefix, layout)


def test_an_arena_greater_than_memory_is_refused_before_it_is_made(prefix: str) -> None:
    positions = psutil.virtual_memory().total // 48
    layout = ArenaLayout(make_program(), replace(SHAPE, context=positions), LOWERED)
    with pytest.raises(PlanError, match=r"the arena needs .* GiB \(.*cache .* GiB\), but .* are free -> .*--ctx"):
        raise_again(lambda: Arena.create(prefix, layout))
    assert not segment_path(prefix, "control").exists()


def test_a_full_shared_memory_is_an_error_with_numbers_and_leaves_nothing(prefix: str) -> None:
    """A limit on file sizes makes posix_fallocate fail on the second segment as a full /dev/shm does."""
    layout = ArenaLayout(make_program(50_000), SHAPE, LOWERED)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(PlanError, match=r"the activations segment .* needs 3\.1 MiB, but /dev/shm has .* free of"):
            Arena.create(prefix, layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(runtime_files.SHARED_MEMORY.glob(f"{prefix}*"))


def raise_again(action: object) -> None:
    """Runs the action and raises its BloomeryError with the whole printed line as message."""
    try:
        action()  # type: ignore[operator]
    except BloomeryError as error:
        raise type(error)(str(error)) from error


def dead_owner() -> str:
    child = subprocess.run(
        [sys.executable, "-c", "from bloomery.runtime.runtime_files import owner_name; print(owner_name())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return child.stdout.strip()


def test_sweep_takes_what_the_dead_left_and_nothing_else(prefix: str, layout: ArenaLayout) -> None:
    owner = dead_owner()
    shared, sockets = runtime_files.SHARED_MEMORY, runtime_files.runtime_directory()
    Arena.create(prefix, layout)
    abandoned = [shared / f"{owner}-pool0-cache", shared / f"{owner}-pool0-control", sockets / f"{owner}-status.json"]
    for path in abandoned:
        path.write_bytes(b"left")
    dead_socket, live_socket = sockets / f"{owner}-a.sock", sockets / f"{owner}-b.sock"
    foreign = [shared / f"bloomery-test-{os.getpid()}", sockets / "notes.txt"]
    for path in foreign:
        path.write_bytes(b"somebody's")
    held = Arena.create(f"{owner}-held", layout)  # as if from another pid namespace, where the owner lives
    with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as alive:
        gone.bind(str(dead_socket))
        gone.close()
        alive.bind(str(live_socket))
        alive.listen()
        try:
            swept = runtime_files.sweep()
            assert {path.name for path in [*abandoned, dead_socket]} <= set(swept)
            assert not any(path.exists() for path in [*abandoned, dead_socket])
            assert all(path.exists() for path in [*foreign, live_socket])
            assert segment_path(prefix, "cache").exists() and segment_path(f"{owner}-held", "cache").exists()
        finally:
            for path in [*foreign, live_socket]:
                path.unlink()
    held.close()
    assert f"{owner}-held-cache" in runtime_files.sweep()
    assert not segment_path(f"{owner}-held", "cache").exists()


def test_a_pid_used_again_is_another_owner() -> None:
    name = runtime_files.owner_name()
    assert runtime_files.owner_is_alive(f"{name}-x")
    pid, start = name.split("-")[1:]
    assert not runtime_files.owner_is_alive(f"bloomery-{pid}-{int(start) + 1}-x")


def test_runtime_directory_is_private_and_refuses_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    place = tempfile.TemporaryDirectory(prefix="run-")  # whose name is short: sockets' paths must be
    monkeypatch.setenv("XDG_RUNTIME_DIR", place.name)
    runtime_files.runtime_directory.cache_clear()
    try:
        directory = runtime_files.runtime_directory()
        assert directory == Path(place.name) / "bloomery" and directory.stat().st_mode & 0o777 == 0o700
        assert runtime_files.socket_path("a.sock").name == f"{runtime_files.owner_name()}-a.sock"
        with pytest.raises(BloomeryError, match=r"\d+ bytes, the system allows 107"):
            runtime_files.socket_path("a" * 100)
        runtime_files.runtime_directory.cache_clear()
        directory.rmdir()
        directory.symlink_to("/tmp")
        with pytest.raises(BloomeryError, match="is not a directory of user"):
            runtime_files.runtime_directory()
        directory.unlink()
        directory.write_text("a file")
        with pytest.raises(BloomeryError, match="cannot use the runtime directory"):
            runtime_files.runtime_directory()
    finally:
        runtime_files.runtime_directory.cache_clear()
