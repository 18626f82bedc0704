"""bloomery-tokenize and bloomery-detokenize as a script uses them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from vocabularies import cases, pairs, path_of


def run(program: str, data: str | bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", f"bloomery.launcher.{program}", *arguments],
        input=data.encode() if isinstance(data, str) else data,
        capture_output=True,
        timeout=60,
    )


def answer(program: str, data: str | bytes, *arguments: str) -> bytes:
    done = run(program, data, *arguments)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout


def error(program: str, data: str | bytes, *arguments: str) -> str:
    done = run(program, data, *arguments)
    assert done.returncode != 0
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"bloomery-{program}: ")
    return lines[0]


def model(name: str) -> tuple[str, str]:
    return "-m", str(path_of(name))


@pytest.mark.parametrize("name", ["deepseek-coder", "llama-spm"])
def test_json_lines_both_ways(name: str) -> None:
    tests = [*pairs(name), ("", [])]
    lines = "".join(json.dumps(text) + "\n" for text, _ in tests)
    ids = [
        json.loads(line) for line in answer("tokenize", lines, *model(name), "--json-lines", "--no-bos").splitlines()
    ]
    assert ids == [expected for _, expected in tests]
    lines = "".join(json.dumps(row) + "\n\n" for row in ids)  # empty lines are passed over
    texts = answer("detokenize", lines, *model(name), "--json-lines", "--no-bos").decode().splitlines()
    assert [json.loads(line) for line in texts] == [text for text, _ in tests]


def test_one_text() -> None:
    spm = model("llama-spm")
    assert json.loads(answer("tokenize", "Hello</s>\n", *spm, "--json")) == [1, 15043, 829, 29879, 29958, 13]
    assert json.loads(answer("tokenize", "Hello</s>", *spm, "--json", "--parse-special")) == [1, 15043, 2]
    assert json.loads(answer("tokenize", "Hello", *spm, "--json", "--no-bos")) == [15043]
    assert answer("tokenize", "Hello\n", *spm).decode().splitlines() == [
        "     1 -> '<s>'",
        " 15043 -> ' Hello'",
        "    13 -> '\\n'",
    ]


@pytest.mark.parametrize("name", ["llama-spm", "tiny-deepseek2"])
def test_detokenize_is_the_reverse(name: str) -> None:
    text = "\n".join(text for text, _, _ in cases(name, 50)).replace("▁", "")  # in SentencePiece that is a space
    data = text.encode() + b"\xff\xe2\x82\n"
    ids = answer("tokenize", data, *model(name), "--json", "--parse-special")
    back = answer("detokenize", ids, *model(name))
    if name == "llama-spm":  # spells raw bytes; a special token puts a space before what follows it
        assert back.endswith(b"\xff\xe2\x82\n")
        plain = answer("tokenize", data, *model(name), "--json")
        assert answer("detokenize", plain, *model(name)) == data
    else:
        assert back == data[:-4] + "\ufffd\ufffd\ufffd\n".encode()


def test_forms_of_ids() -> None:
    spm = model("llama-spm")
    for text in ("1 15043 2", "1,15043, 2\n", "[1, 15043, 2]"):
        assert answer("detokenize", text, *spm) == b"Hello</s>"
    assert answer("detokenize", "", *spm) == b""
    assert answer("detokenize", "1 15043 2", *spm, "--hide-special") == b"Hello"
    assert answer("detokenize", "1 15043 2", *spm, "--no-bos") == b"<s> Hello</s>"
    assert json.loads(answer("detokenize", "[1, 243, 162]", *spm, "--json")) == "\ufffd"


def test_errors_are_one_line() -> None:
    spm = model("llama-spm")
    assert "line 2" in error("tokenize", '"a"\n5\n', *spm, "--json-lines")
    assert "line 1" in error("tokenize", "a\n", *spm, "--json-lines")
    assert "32000" in error("detokenize", "[32000]", *spm)
    assert "'x'" in error("detokenize", "1 x", *spm) or "1 x" in error("detokenize", "1 x", *spm)
    assert "line 1" in error("detokenize", "[true]\n", *spm, "--json-lines")
    assert "/nowhere" in error("tokenize", "a", "-m", "/nowhere")
    assert "--nonsense" in error("tokenize", "a", *spm, "--nonsense")


def test_answers_come_line_by_line() -> None:
    """A script may keep the program running and wait for each answer."""
    command = [sys.executable, "-m", "bloomery.launcher.tokenize", *model("llama-spm"), "--json-lines"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for text, ids in (("Hello", [1, 15043]), ("a", [1, 263])):
                process.stdin.write(json.dumps(text).encode() + b"\n")
                process.stdin.flush()
                assert json.loads(process.stdout.readline()) == ids
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_help_has_examples() -> None:
    for program in ("tokenize", "detokenize"):
        text = answer(program, "", "--help").decode()
        assert "examples:" in text
        assert "--json-lines" in text
