"""Damaged model files end in an error that says what is wrong and where: no crash, no hang, no undue allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from damaged_gguf import REFUSED, Case, damaged_cases

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
        [sys.executable, str(WORKER)], input="\n".join(paths) + "\n", capture_output=True, text=True, timeout=100
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
