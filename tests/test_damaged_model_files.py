"""Damaged model files end in an error that says what is wrong and where: no crash, no hang, no undue allocation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from damaged_gguf import REFUSED, Case, damaged_cases
from gguf_bytes import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Blocks, Draft, Key
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.runtime.errors import ModelFileError
from bloomery.runtime.model_file import ModelFile

WORKER = Path(__file__).with_name("model_file_worker.py")
ALLOWED_FACTOR, ALLOWED_BYTES = 10, 4 << 20  # traced peak of a refused file; opened ones also dequantise every tensor
SLOWEST = 5.0  # seconds for one file of under a megabyte on a busy machine


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, dict[str, object]]]:
    """Every case opened in one process of its own; a crash shows as a missing answer."""
    root = tmp_path_factory.mktemp("damaged")
    cases = list(damaged_cases())
    paths = []
    for number, case in enumerate(cases):
        folder = root / f"{number:03d}"
        folder.mkdir()
        paths.append(str(case.write(folder)))
    result = subprocess.run(
        [sys.executable, str(WORKER)], input="\n".join(paths) + "\n", capture_output=True, text=True, timeout=280
    )
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    at = cases[min(len(answers), len(cases) - 1)].name
    crashed = f"the process ended with status {result.returncode} at case {at}"
    assert result.returncode == 0 and len(answers) == len(cases), crashed + result.stderr[-2000:]
    return list(zip(cases, answers))


def test_the_set_has_its_size_and_every_name_once() -> None:
    cases = list(damaged_cases())
    assert Counter(case.outcome for case in cases)["refused"] == REFUSED == 100
    assert len({case.name for case in cases}) == len(cases)
    again = {case.name: case.files for case in damaged_cases()}
    assert all(again[case.name] == case.files for case in cases), "the seed does not fix the set"


def test_refused_cases_end_in_an_error_that_names_the_place(outcomes: list[tuple[Case, dict[str, object]]]) -> None:
    wrong = []
    for case, answer in outcomes:
        if case.outcome == "refused":
            text = str(answer.get("text"))
            named = [mention for mention in (*case.mentions, "small") if mention not in text]
            if answer["outcome"] != "refused" or named or not answer["hint"] or "\n" in text:
                wrong.append((case.name, named, answer))
    assert not wrong, "\n".join(map(str, wrong))


def test_harmless_damage_opens_and_behaves(outcomes: list[tuple[Case, dict[str, object]]]) -> None:
    allowed = {"refused": ("refused",), "harmless": ("harmless",), "either": ("harmless", "refused")}
    wrong = [(case.name, answer) for case, answer in outcomes if answer["outcome"] not in allowed[case.outcome]]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_case_takes_long_or_allocates_more_than_its_file_justifies(
    outcomes: list[tuple[Case, dict[str, object]]],
) -> None:
    for case, answer in outcomes:
        assert float(str(answer["seconds"])) < SLOWEST, (case.name, answer)
        if answer["outcome"] == "refused":
            assert int(str(answer["peak"])) < ALLOWED_FACTOR * case.size + ALLOWED_BYTES, (case.name, answer)


def tiny_file() -> bytes:
    """A few hundred bytes, so that most of them are structure."""
    keys = (
        Key("general.architecture", STRING, "llama"),
        Key("a.numbers", (ARRAY, INT32), [1, 2, 3]),
        Key("a.flags", (ARRAY, BOOL), [0, 1]),
        Key("a.texts", (ARRAY, STRING), ["x", "yz", ""]),
        Key("a.float", FLOAT32, 1.5),
        Key("general.alignment", UINT32, 32),
    )
    tensors = (Blocks("t", (32, 2), 8, b"\0" * 68), Blocks("u", (3, 1, 2, 2), 0, b"\0" * 48))
    return Draft(keys, tensors).build()


@settings(max_examples=500, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("sid"), st.integers(0, len(tiny_file()) - 1), st.binary(min_size=1, max_size=9)),
        min_size=1,
        max_size=4,
    )
)
def test_any_damage_is_an_error_or_of_no_consequence(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int, bytes]]
) -> None:
    """Bytes set, inserted or deleted anywhere: nothing but ModelFileError, and what opens can be read."""
    data = bytearray(tiny_file())
    for kind, position, piece in edits:
        end = position + (0 if kind == "i" else len(piece))
        data[position:end] = b"" if kind == "d" else piece
    path = tmp_path_factory.getbasetemp() / "edited.gguf"
    path.write_bytes(data)
    try:
        model = ModelFile.open(path)
    except ModelFileError as error:
        assert error.hint and "edited.gguf" in error.message
        return
    with model:
        for tensor in model.tensors.values():
            assert tensor.offset + tensor.nbytes <= len(data)
            if tensor.quant_type.dequantisable:
                assert tensor.dequantise().size == tensor.elements


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, text in ((tmp_path, "regular file"), (tmp_path / "pipe", "regular file"), (tmp_path / "no", "opened")):
        with pytest.raises(ModelFileError, match=text):
            ModelFile.open(path)
