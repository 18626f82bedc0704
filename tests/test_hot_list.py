"""Hot lists: the text format, its errors, and the daemon that is handed one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import program as command
from test_placement import CONFIG, PLENTY

from bloomery.launcher.command_line import HOT_LIST_VARIABLE, Parser, add_daemon_options, daemon_config
from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime.architectures import build_program
from bloomery.runtime.hot_list import HotList, HotListError, check_hot_list, model_name, read_hot_list, routed_layers
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.placement import make_plan
from bloomery.runtime.program import Program

HEADER = "# bloomery hot list 1\n# model a name of words layers 3 experts 4\n"
GOOD = HEADER + "# corpus prose.txt\n\n1: 2=9 0=4 3=4\n2: 3=8 2=7 1=1 0=0\n"


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with ModelFile.open(demo_model_path("tiny-qwen3moe")) as model:
        yield build_program(model)


def written(folder: Path, text: str) -> Path:
    path = folder / "list.txt"
    path.write_text(text)
    return path


def demo_list() -> HotList:
    with ModelFile.open(demo_model_path("tiny-qwen3moe")) as model:
        made = build_program(model)
        counts = {layer: list(range(experts)) for layer, experts in routed_layers(made).items()}
        return HotList.of_counts(model_name(model), made.layers, counts, ["made for a test"])


def test_reads_what_it_writes(tmp_path: Path) -> None:
    found = read_hot_list(written(tmp_path, GOOD))
    assert (found.model, found.layers, found.experts) == ("a name of words", 3, 4)
    assert found.ranks == {1: (2, 0, 3), 2: (3, 2, 1, 0)}
    assert found.counts == {1: (9, 4, 4), 2: (8, 7, 1, 0)}
    assert found.comments == ("corpus prose.txt",)
    assert found.order(1) == (2, 0, 3, 1), "who is not listed comes last"
    assert found.order(0) == (0, 1, 2, 3)
    again = read_hot_list(written(tmp_path, found.text()))
    assert again == found
    plain = read_hot_list(written(tmp_path, HEADER + "0: 3 1\n"))
    assert plain.counts == {} and plain.ranks == {0: (3, 1)}
    assert read_hot_list(written(tmp_path, plain.text())) == plain


def test_ranks_by_count_then_by_id() -> None:
    made = HotList.of_counts("m", 2, {1: [4, 9, 4, 0]}, [])
    assert made.ranks == {1: (1, 0, 2, 3)} and made.counts == {1: (9, 4, 4, 0)} and made.experts == 4


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "does not begin with"),
        ("1: 2 3\n", 1, "does not begin with"),
        ("# bloomery hot list 2\n", 1, "does not begin with"),
        ("# bloomery hot list 1\n1: 2\n", 2, "'# model NAME layers L experts E'"),
        (HEADER, 2, "no layer"),
        (HEADER + "1 2 3\n", 3, "'layer: id id ...'"),
        (HEADER + "x: 2 3\n", 3, "'layer: id id ...'"),
        (HEADER + "3: 0\n", 3, "layer 3, but the list is for 3 layers"),
        (HEADER + "0: 0 4\n", 3, "expert 4, but the list is for 4 experts"),
        (HEADER + "0: 0 -1\n", 3, "'-1' is neither"),
        (HEADER + "0: 0 1.5\n", 3, "'1.5' is neither"),
        (HEADER + "0:\n", 3, "layer 0 has no expert"),
        (HEADER + "0: 0 1 0\n", 3, "expert 0 stands there twice"),
        (HEADER + "0: 0=3 1\n", 3, "some experts have counts"),
        (HEADER + "0: 0=3 1=4\n", 3, "the counts do not fall"),
        (HEADER + "0: 0=3\n1: 1\n", 4, "some lines have counts"),
        (HEADER + "0: 0\n1: 1=2\n", 4, "some lines have counts"),
        (HEADER + "1: 0\n# between\n1: 1\n", 5, "layer 1 stands after layer 1"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(HotListError) as caught:
        read_hot_list(path)
    assert caught.value.message.startswith(f"{path}: line {line}: ") and what in caught.value.message
    assert "bloomery-trace" in caught.value.hint


def test_what_is_no_text_file(tmp_path: Path) -> None:
    with pytest.raises(HotListError, match="cannot be read"):
        read_hot_list(tmp_path / "missing")
    with pytest.raises(HotListError, match="cannot be read"):
        read_hot_list(tmp_path)
    with pytest.raises(HotListError, match="is not text"):
        read_hot_list(demo_model_path("tiny-qwen3moe"))


def test_a_list_of_another_model_is_refused(tmp_path: Path, program: Program) -> None:
    check_hot_list(demo_list(), program)
    lines = demo_list().text().splitlines()
    assert lines[1] == "# model tiny-qwen3moe layers 4 experts 32"
    for changed, what in (
        ([lines[0], lines[1].replace("32", "64"), *lines[2:]], "is for 4 layers of 64 experts .*has 4 layers of 32"),
        ([lines[0], lines[1].replace("layers 4", "layers 5"), *lines[2:]], "is for 5 layers"),
        (lines[:-1], "has no line for layer 3"),
    ):
        with pytest.raises(HotListError, match=what):
            check_hot_list(read_hot_list(written(tmp_path, "\n".join(changed))), program)


def test_plan_cpu_is_the_same_with_a_list(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="bloomery")
    assert make_plan(CONFIG, program, PLENTY, demo_list()) == make_plan(CONFIG, program, PLENTY)
    assert "changes nothing" in caplog.text and "WARNING" not in caplog.text


def test_option_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = Parser()
    add_daemon_options(parser)
    monkeypatch.delenv(HOT_LIST_VARIABLE, raising=False)
    assert daemon_config(parser.parse_args([]), "m").hot_list == ""
    monkeypatch.setenv(HOT_LIST_VARIABLE, "from-variable")
    assert daemon_config(parser.parse_args([]), "m").hot_list == "from-variable"
    assert daemon_config(parser.parse_args(["--hot-list", "from-option"]), "m").hot_list == "from-option"


@pytest.mark.parametrize("name", ["generate", "serve"])
def test_a_daemon_refuses_a_list_of_another_model(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, GOOD)
    options = ["--demo", "tiny-qwen3moe", *(["-n", "1", "--prompt", "x"] if name == "generate" else ["--port", "0"])]
    given = {**os.environ, HOT_LIST_VARIABLE: str(path)}
    ended = subprocess.run(command(name, *options), capture_output=True, text=True, timeout=60, env=given)
    assert ended.returncode == 1, ended
    [line] = ended.stderr.strip().splitlines()
    assert line.startswith(f"bloomery-{name}: {path}: is for 3 layers of 4 experts") and "-> use a list" in line


def test_a_daemon_takes_a_list_of_its_model(tmp_path: Path) -> None:
    path = written(tmp_path, demo_list().text())
    options = [
        "--demo",
        "tiny-qwen3moe",
        "--hot-list",
        str(path),
        "-n",
        "2",
        "--prompt",
        "func (r *Reader) Read",
        "--ctx",
        "64",
    ]
    ended = subprocess.run(command("generate", *options), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0 and "list" not in ended.stderr, "quiet"
