"""docs/protocol.md against the code: every table, every byte, and the client that the page prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import left_behind

from bloomery.launcher.demo_model import demo_model_path
from bloomery.runtime import facts, messages, utility_calls
from bloomery.runtime.client import Client, new_request_id
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.error_table import ERROR_TABLE
from bloomery.runtime.field_types import REQUIRED, Field, Schema
from bloomery.runtime.private_daemon import PrivateDaemon
from bloomery.runtime.protocol import MAX_FRAMES, MAX_NESTING, Kind
from bloomery.runtime.requests import GenerationRequest, SamplingParameters

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "protocol.md").read_text()
SCHEMAS: dict[str, Schema] = {
    **{kind.name: schema for kind, schema in messages.SCHEMAS.items() if schema.fields},
    **{
        schema.name: schema
        for schema in (
            messages.SAMPLING_SCHEMA,
            messages.CONSTRAINT_SCHEMA,
            messages.REASONING_SCHEMA,
            messages.END_REASONING_SCHEMA,
            messages.LOGPROB_SCHEMA,
            messages.ARRAY_SCHEMA,
            facts.MODEL_SCHEMA,
            facts.PLAN_SCHEMA,
            facts.LIMITS_SCHEMA,
            utility_calls.TOKENIZE_SCHEMA,
            utility_calls.DETOKENIZE_SCHEMA,
            utility_calls.TEMPLATE_SCHEMA,
            utility_calls.PIECES_SCHEMA,
            utility_calls.SLOT_SCHEMA,
        )
    },
}


def section(title: str) -> str:
    """What is below a heading, up to the next one."""
    match = re.search(rf"^#+ {re.escape(title)}$\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, f"no section {title!r}"
    return match[1]


def table(text: str) -> list[list[str]]:
    """Rows of the first table of a text, without head and rule."""
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif rows:
            break
    return rows[2:]


def documented_default(field: Field) -> str:
    if field.default is REQUIRED:
        return "required"
    if field.name == "sampling":
        return "`{}`"
    return "`nil`" if field.default is None else f"`{json.dumps(field.default)}`"


@pytest.mark.parametrize("name", SCHEMAS)
def test_field_tables(name: str) -> None:
    rows = table(section(name))
    expected = [[f"`{field.name}`", field.type.label, documented_default(field)] for field in SCHEMAS[name].fields]
    assert [row[:3] for row in rows] == expected
    assert all(len(row) == 4 and row[3] for row in rows), "every field has a meaning"


def test_kinds_table() -> None:
    rows = [row[:2] for row in table(section("3. Kinds"))]
    assert rows == [[kind.name, f"`{kind:02x}`"] for kind in Kind]


def test_error_table() -> None:
    rows = table(section("9. Errors"))
    assert rows == [
        [f"`{row.code}`", str(row.status), row.meaning, ", ".join(f"`{name}`" for name in row.details)]
        for row in ERROR_TABLE
    ]


def test_numbers_in_the_text() -> None:
    assert f"at most {MAX_NESTING} levels" in PAGE and f"from 0; at most {MAX_FRAMES - 4}" in PAGE
    assert messages.CREDIT_UNIT_BYTES == 1 << 20 and "1 more for each whole MiB" in PAGE


@pytest.mark.parametrize("kind", Kind)
def test_dumps_are_the_recorded_bytes(kind: Kind) -> None:
    frames: list[bytearray] = []
    for line in section(f"bytes of {kind.name}").splitlines():
        if match := re.match(r"    (\d| )  ((?:[0-9a-f]{2} ?)+)", line):
            if match[1] != " ":
                assert int(match[1]) == len(frames)
                frames.append(bytearray())
            frames[-1] += bytes.fromhex(match[2])
    recorded = json.loads((ROOT / "tests" / "data" / "protocol" / f"{kind.name.lower()}.json").read_text())
    assert [frame.hex() for frame in frames] == recorded["frames"]


# ---- the printed client against a real daemon ----


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    before = left_behind()
    config = DaemonConfig(demo_model_path("tiny-qwen3moe"), executor="reference", context=256, slots=2, prompt_block=32)
    with PrivateDaemon(config) as started:
        yield started
    assert left_behind() <= before


@pytest.fixture(scope="module")
def printed_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    match = re.search(r"^```python\n(.*?)^```", section("13. A client in forty lines"), re.MULTILINE | re.DOTALL)
    assert match
    lines = [line for line in match[1].splitlines() if line.strip()]
    assert len(lines) <= 45, "forty lines, give or take"
    path = tmp_path_factory.mktemp("printed") / "client.py"
    path.write_text(match[1])
    return path


def run_client(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_printed_client_prints_what_the_model_says(daemon: PrivateDaemon, printed_client: Path) -> None:
    prompt, count = "Once upon a time", 20
    result = run_client(printed_client, daemon.endpoint, prompt, str(count))
    assert (result.returncode, result.stderr) == (0, f"\n[length, {count} tokens]\n"), result.stderr
    with Client(daemon.endpoint) as client:
        greedy = SamplingParameters(temperature=0)
        request = GenerationRequest(new_request_id(), text=prompt, max_tokens=count, sampling=greedy)
        assert result.stdout == client.complete(request, timeout=60).text != ""


def test_printed_client_reports_errors(daemon: PrivateDaemon, printed_client: Path) -> None:
    result = run_client(printed_client, daemon.endpoint, "x" * 5000, "1")
    assert result.returncode == 1
    assert result.stderr.startswith("exceed_context_size: ") and result.stdout == ""
