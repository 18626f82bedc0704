"""What a person sees of long work: how often, with what rate and time left, on a terminal and elsewhere."""

from __future__ import annotations

import io

from bloomery.launcher.progress import ProgressDisplay


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_is_not_mentioned() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay("bloomery-x", stream, clock) as display:
        for done in range(11):
            display("compile kernels", done, 10)
            clock.now += 0.05
    assert stream.getvalue() == ""


def test_long_work_shows_rate_and_time_left_in_a_few_lines() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay("bloomery-x", stream, clock) as display:
        for done in range(0, 41):
            display("chunks", done, 40)
            clock.now += 0.5
    lines = stream.getvalue().splitlines()
    assert lines == [
        "bloomery-x: chunks 2 of 40, 2/s, 19 s left",
        "bloomery-x: chunks 12 of 40, 2/s, 14 s left",
        "bloomery-x: chunks 22 of 40, 2/s, 9 s left",
        "bloomery-x: chunks 32 of 40, 2/s, 4 s left",
        "bloomery-x: chunks 40 of 40, 2/s, took 20 s",
    ]


def test_stages_of_a_daemon_are_said_in_words() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay("bloomery-x", stream, clock) as display:
        display("compile", 0, 18)
        clock.now += 2.0
        display("compile", 4, 18)
    assert stream.getvalue() == "bloomery-x: compile kernels for this CPU 4 of 18, 2/s, 7 s left\n"


def test_work_that_was_half_done_before_counts_only_what_is_new() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay("bloomery-x", stream, clock) as display:
        display("load", 50, 100)
        clock.now += 2.0
        display("load", 60, 100)
    assert stream.getvalue() == "bloomery-x: load 60 of 100, 5/s, 8 s left\n"


def test_bytes_are_shown_as_mebibytes_and_long_times_in_hours() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay("bloomery-x", stream, clock) as display:
        display("load weights", 0, 40 << 30)
        clock.now += 10.0
        display("load weights", 64 << 20, 40 << 30)
    assert stream.getvalue() == "bloomery-x: load weights 64 MiB of 40960 MiB, 6 MiB/s, 1 h 46 min left\n"


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end() -> None:
    clock, stream = Clock(), Terminal()
    with ProgressDisplay("bloomery-x", stream, clock) as display:
        for done in range(4):
            display("load weights", done, 10)
            clock.now += 1.0
        assert "load weights 1 of 10, 1/s, 9 s left" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K"), "the bar's line is erased"
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"
