"""The memory and disk probe: real pinned processes, figures against simpler measurements, errors, and the plot."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from bloomery.launcher import plots, probe
from bloomery.launcher.tables import new_console
from bloomery.runtime import probe_kernels
from bloomery.runtime.bandwidth_probe import (
    LEAST_BUFFER,
    BandwidthReport,
    buffer_bytes,
    probe_bandwidth,
    process_counts,
)
from bloomery.runtime.disk_probe import cached_share, disk_read_rate, made_file
from bloomery.runtime.errors import BloomeryError, WorkerLost
from bloomery.runtime.probe_process import Reader
from bloomery.runtime.topology import default_processes

MIB = 1 << 20


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BandwidthReport:
    return probe_bandwidth(folder=tmp_path_factory.mktemp("probe"))


def test_the_loops_read_every_word_and_visit_every_line() -> None:
    words = probe_kernels.fresh_buffer(MIB // 16)
    words[:] = np.random.default_rng(5).integers(0, 2**63, words.size, dtype=np.uint64)
    assert int(probe_kernels.read_all(words)) == int(words.sum())
    probe_kernels.link_lines(words, 5)
    lines = words.size // probe_kernels.LINE_WORDS
    places = {int(probe_kernels.chase(words, 0, steps)) for steps in range(lines)}
    assert len(places) == lines and int(probe_kernels.chase(words, 0, lines)) == 0


def test_counts_reach_the_most() -> None:
    assert process_counts(1) == [1] and process_counts(3) == [1, 2, 3]
    assert process_counts(96)[15:] == [16, 24, 32, 48, 64, 96] and process_counts(100)[-2:] == [96, 100]


def test_buffers_are_beyond_the_cache_but_within_memory() -> None:
    assert buffer_bytes(0, 1, 64 << 30) == LEAST_BUFFER and buffer_bytes(32 * MIB, 2, 64 << 30) == 512 * MIB
    assert buffer_bytes(100 * MIB, 2, 64 << 30) == 1024 * MIB and buffer_bytes(384 * MIB, 2, 64 << 30) == 1536 * MIB
    assert buffer_bytes(384 * MIB, 96, 64 << 30) * 96 <= 16 << 30
    with pytest.raises(BloomeryError, match="96 probe processes"):
        buffer_bytes(384 * MIB, 96, 300 * MIB)


def test_figures_are_this_machines(report: BandwidthReport) -> None:
    assert [rate.processes for rate in report.reads] == process_counts(default_processes())
    assert all(len(set(rate.cpus)) == rate.processes for rate in report.reads)
    assert {cpu for rate in report.reads for cpu in rate.cpus} <= os.sched_getaffinity(0)
    assert sum(node.processes for node in report.nodes) == default_processes()
    words = np.ones(report.buffer_bytes // 8, dtype=np.uint64)
    seconds = []
    for _ in range(3):
        begin = time.thread_time()  # not the time that others ran here
        words.sum()
        seconds.append(time.thread_time() - begin)
    simple = words.nbytes / min(seconds)
    # Whatever else runs here, one reader is neither ten times slower nor ten times faster than NumPy's sum.
    assert simple / 10 < report.reads[0].bytes_per_second < simple * 10
    assert all(20e-9 < node.latency_seconds < 5e-6 for node in report.nodes), "not a memory latency"
    assert report.disk is not None and report.disk.bytes_per_second > 1e6 and report.seconds < 30
    assert not Path(report.disk.path).exists() and report.disk.nbytes > 0
    assert not multiprocessing.active_children(), "probe processes are left"


def test_readers_are_pinned_and_end_with_their_prober() -> None:
    cpu = max(os.sched_getaffinity(0))
    with Reader(cpu, 2 * MIB) as reader:
        assert reader.answer(60) == "ready"
        child = psutil.Process(reader.pid)
        assert child.cpu_affinity() == [cpu]
        reader.ask(("read", time.monotonic(), 0.01))
        nbytes, seconds, busy = reader.answer(60)
        # it reads up to `begin` + 0.01 s but starts a little after `begin`
        assert nbytes % (2 * MIB) == 0 and nbytes > 0 and seconds > 0 and 0 < busy <= seconds + 0.1
    assert not child.is_running()


def test_a_killed_reader_is_an_error_not_a_hang() -> None:
    with Reader(min(os.sched_getaffinity(0)), MIB) as reader:
        assert reader.answer(60) == "ready"
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="status -9"):
            reader.answer(30)


def test_a_reader_that_cannot_be_pinned_is_an_error() -> None:
    with Reader(10**5, MIB) as reader, pytest.raises(WorkerLost, match="CPU 100000"):
        reader.answer(60)


def test_cached_pages_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(16 * MIB))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.read(descriptor, 16 * MIB)
        assert cached_share(descriptor, 16 * MIB) > 0.9, "what was just read is not seen as cached"
        rate = disk_read_rate(path)
        assert rate.nbytes == 16 * MIB and rate.seconds > 0
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        after = cached_share(descriptor, 16 * MIB)
    finally:
        os.close(descriptor)
    # A file system in memory cannot drop pages; then the share says so.
    assert rate.cached_share == pytest.approx(after, abs=0.1)


def test_disk_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, text in (("empty", "is empty"), ("none", "No such file")):
        with pytest.raises(BloomeryError, match=text) as caught:
            disk_read_rate(tmp_path / name)
        assert str(tmp_path / name) in caught.value.message
    with made_file(tmp_path) as path:
        assert path.stat().st_size > 0
    assert not path.exists()


def test_a_folder_without_write_access_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the memory is measured; os.access is replaced since the tests may run as root, who may write anywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    begin = time.monotonic()
    with pytest.raises(BloomeryError, match="no file can be made here") as caught:
        probe_bandwidth(folder=tmp_path)
    assert "--no-disk" in caught.value.hint and time.monotonic() - begin < 1


def test_plot_draws_a_picture(report: BandwidthReport, tmp_path: Path) -> None:
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        probe.plot_bandwidth(tmp_path / f"p{suffix}", report)
        assert (tmp_path / f"p{suffix}").read_bytes().startswith(magic)


def test_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert probe.main(["bandwidth", "--plot", "p.png"]) == 1
    assert "pip install 'bloomery[plot]'" in capsys.readouterr().err


def test_tables_and_json_of_the_program(report: BandwidthReport, capsys: pytest.CaptureFixture[str]) -> None:
    probe.show_bandwidth(new_console(), report)
    output = capsys.readouterr().out
    assert "GB/s" in output and "posix_fadvise" in output and " ns" in output
    assert json.loads(json.dumps(report.as_dict()))["reads"][0]["processes"] == 1
    assert probe.main(["topology"]) == 0 and "pinned to CPUs" in capsys.readouterr().out
    assert probe.main(["topology", "--json"]) == 0
    topology = json.loads(capsys.readouterr().out)
    assert topology["default_processes"] == default_processes() and len(topology["pin_order"]) == len(topology["cores"])


def test_the_program_from_outside(tmp_path: Path) -> None:
    """--json is one object on standard output, errors one line and a status."""
    command = [sys.executable, "-m", "bloomery.launcher.probe"]
    arguments = ["bandwidth", "--json", "--no-disk", "--processes", "1"]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0 and result.stdout.count("\n") == 1, result.stderr
    found = json.loads(result.stdout)
    assert len(found["reads"]) == 1 and found["disk"] is None and found["reads"][0]["bytes_per_second"] > 1e8
    missing = str(tmp_path / "no")
    for wrong in (["bandwidth", "--disk-file", missing], ["bandwidth", "--plot", "x.bmp"], ["nothing"], []):
        result = subprocess.run([*command, *wrong], capture_output=True, text=True, timeout=60)
        assert result.returncode != 0 and result.stdout == "" and result.stderr.count("\n") == 1, result.stderr
