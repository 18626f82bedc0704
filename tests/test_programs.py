"""The programs as a person or a script meets them: exit status, one-line errors, stable JSON, a clean machine after.

One daemon with the shipped model serves the tests that use --endpoint; a few start private daemons.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, left_behind, program, start_daemon, stop_daemon, wait_until_gone

from bloomery.launcher.demo_model import demo_model_path

DEMO = demo_model_path("tiny-qwen3moe")
PROMPT = "func (r *Reader) Read"  # continued with wide margins, so that float noise changes no token
SECONDS = 280.0


def run(name: str, *arguments: str, text: str = "", seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(program(name, *arguments), input=text, capture_output=True, text=True, timeout=seconds)


def run_json(name: str, *arguments: str) -> dict[str, Any]:
    result = run(name, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def one_line_error(result: subprocess.CompletedProcess[str], name: str) -> str:
    assert result.returncode != 0
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(f"bloomery-{name}: ") and " -> " in lines[0], "message and next step"
    return lines[0]


# ---- bloomery-launch ----


def test_ready_line_tells_scripts_where_and_what(demo_daemon: Daemon) -> None:
    ready = demo_daemon.ready
    assert set(ready) >= {"endpoint", "control", "pid", "model", "plan", "ctx", "slots"}
    assert ready["pid"] == demo_daemon.process.pid
    assert (ready["plan"], ready["ctx"], ready["slots"]) == ("cpu", 1024, 2)
    assert Path(ready["endpoint"].removeprefix("ipc://")).is_socket()
    assert Path(ready["control"].removeprefix("ipc://")).is_socket()


def test_status_of_a_running_daemon(demo_daemon: Daemon) -> None:
    result = run("launch", "--status", "--endpoint", demo_daemon.endpoint)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["state"] == "ready"


def test_daemon_stops_when_told_and_leaves_nothing() -> None:
    before = left_behind()
    daemon = start_daemon("--demo", "tiny-qwen3moe", "--alias", "small", "--ctx", "64", "--parallel", "1")
    assert daemon.ready["ctx"] == 64
    result = run("launch", "--stop", "--endpoint", daemon.endpoint)
    assert result.returncode == 0, result.stderr
    assert daemon.process.wait(20) == 0
    stop_daemon(daemon)
    assert left_behind() <= before
    message = one_line_error(run("launch", "--status", "--endpoint", daemon.endpoint), "launch")
    assert daemon.endpoint in message


def test_interrupted_daemon_ends_with_its_workers() -> None:
    before = left_behind()
    daemon = start_daemon("--demo", "tiny-qwen3moe", "--ctx", "64", "--parallel", "1")
    workers = [
        int(pid) for pid in Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    ]
    assert workers, "the host executor runs in processes of its own"
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(20) in (0, 130)
    daemon.process.communicate()
    wait_until_gone(workers)
    assert left_behind() <= before


def test_unusable_model_is_one_line_with_a_next_step(tmp_path: Path) -> None:
    missing = one_line_error(run("launch", "-m", str(tmp_path / "missing.gguf")), "launch")
    assert "missing.gguf" in missing
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(DEMO).read_bytes()[:100_000])
    assert "broken.gguf" in one_line_error(run("launch", "-m", str(broken)), "launch")


def test_unknown_plan_is_refused() -> None:
    assert "b" in one_line_error(run("launch", "--plan", "nonsense"), "launch")


# ---- bloomery-generate ----


def test_generate_prints_one_object_and_repeats_itself(demo_daemon: Daemon) -> None:
    first = run_json("generate", "--endpoint", demo_daemon.endpoint, "--prompt", PROMPT, "-n", "12")
    again = run_json("generate", "--endpoint", demo_daemon.endpoint, "--prompt", PROMPT, "-n", "12")
    assert first == again
    assert len(first["tokens"]) == 12 and first["text"] and first["reason"] == "length"
    ids = ",".join(map(str, first["prompt_tokens"]))
    by_tokens = run_json("generate", "--endpoint", demo_daemon.endpoint, "--tokens", ids, "-n", "12")
    assert by_tokens == first


def test_generate_streams_plain_text(demo_daemon: Daemon) -> None:
    as_json = run_json("generate", "--endpoint", demo_daemon.endpoint, "--prompt", PROMPT, "-n", "8")
    plain = run("generate", "--endpoint", demo_daemon.endpoint, "--prompt", PROMPT, "-n", "8")
    assert (plain.returncode, plain.stdout) == (0, as_json["text"] + "\n")


def test_stored_logits_belong_to_the_tokens(demo_daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    answer = run_json(
        "generate", "--endpoint", demo_daemon.endpoint, "--prompt", PROMPT, "-n", "5", "--logits", str(path)
    )
    stored = np.load(path)
    prompt, tokens = answer["prompt_tokens"], answer["tokens"]
    assert stored["tokens"].dtype == np.int32 and stored["logits"].dtype == np.float32
    assert stored["tokens"].tolist() == prompt + tokens[:-1]
    assert stored["logits"].shape == (len(prompt) + 4, 8192)
    assert stored["logits"][len(prompt) - 1 :].argmax(axis=1).tolist() == tokens


def test_seeded_sampling_repeats_and_seeds_differ(demo_daemon: Daemon) -> None:
    options = ("--endpoint", demo_daemon.endpoint, "--prompt", PROMPT, "-n", "24", "--temp", "1.5", "--top-k", "0")
    texts = [run_json("generate", *options, "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_private_daemon_gives_the_same_and_leaves_nothing(demo_daemon: Daemon) -> None:
    before = left_behind()
    shared = run_json("generate", "--endpoint", demo_daemon.endpoint, "--prompt", PROMPT, "-n", "6")
    private = run_json(
        "generate", "-m", DEMO, "--plan", "cpu", "--threads", "1", "--ctx", "64", "--prompt", PROMPT, "-n", "6"
    )
    assert private == shared
    assert left_behind() <= before


def test_reference_executor_agrees_with_the_kernels(demo_daemon: Daemon) -> None:
    options = ("--prompt", PROMPT, "-n", "3")
    host = run_json("generate", "--endpoint", demo_daemon.endpoint, *options)
    reference = run_json("generate", "--demo", "tiny-qwen3moe", "--executor", "reference", "--ctx", "64", *options)
    assert reference == host


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompt", "x", "--tokens", "1"), "--tokens"),
        (("--tokens", "1,two"), "1,two"),
        (("--prompt", "x", "--no-such-option"), "--no-such-option"),
        (("--prompt", "x", "-m", "a.gguf", "--demo", "tiny"), "--demo"),
        (("--prompt", "x", "--endpoint", "ipc:///tmp/bloomery-nobody.sock"), "bloomery-nobody"),
        (("--file", "/nonexistent/prompt.txt"), "/nonexistent/prompt.txt"),
    ],
)
def test_generate_refuses_in_one_line(arguments: tuple[str, ...], named: str) -> None:
    assert named in one_line_error(run("generate", *arguments), "generate")


def test_options_of_a_private_daemon_are_refused_for_a_running_one(demo_daemon: Daemon) -> None:
    result = run("generate", "--endpoint", demo_daemon.endpoint, "--prompt", "x", "--plan", "cpu")
    assert "--plan" in one_line_error(result, "generate")


def test_token_outside_the_vocabulary_is_refused(demo_daemon: Daemon) -> None:
    result = run("generate", "--endpoint", demo_daemon.endpoint, "--tokens", "8192")
    assert "8192" in one_line_error(result, "generate")


def test_prompt_longer_than_the_context_is_refused_with_numbers(demo_daemon: Daemon) -> None:
    tokens = ",".join(["5"] * 1500)
    message = one_line_error(run("generate", "--endpoint", demo_daemon.endpoint, "--tokens", tokens), "generate")
    assert "1500" in message and "1024" in message


def test_reader_that_goes_away_is_no_error(demo_daemon: Daemon) -> None:
    command = program("generate", "--endpoint", demo_daemon.endpoint, "--prompt", PROMPT, "-n", "400", "--ignore-eos")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(SECONDS) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def test_interrupted_generate_ends_with_130_and_its_private_daemon_with_it() -> None:
    before = left_behind()
    command = program("generate", "--prompt", PROMPT, "--ctx", "8192", "-n", "8000", "--ignore-eos")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    wait_until_gone([int(pid) for pid in children])
    assert left_behind() <= before


# ---- bloomery-perplexity ----


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prose that is always here: the licence, a few hundred tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((Path(__file__).parent.parent / "LICENSE").read_text())
    return path


def test_perplexity_scores_the_second_half_of_each_chunk(demo_daemon: Daemon, text_file: Path, tmp_path: Path) -> None:
    endpoint = ("--endpoint", demo_daemon.endpoint)
    answer = run_json("perplexity", *endpoint, "-f", str(text_file), "--ctx", "64", "--chunks", "2")
    assert answer["tokens"] == 2 * 31, "positions 32 to 62 of each chunk of 64"
    assert answer["ppl"] == pytest.approx(np.exp(answer["nll"]))
    losses = []
    ids = run_json("generate", *endpoint, "--file", str(text_file), "-n", "0")["prompt_tokens"]
    for start in (0, 64):
        chunk = ids[start : start + 64]
        path = tmp_path / f"{start}.npz"
        run_json("generate", *endpoint, "--tokens", ",".join(map(str, chunk)), "-n", "1", "--logits", str(path))
        logits = np.load(path)["logits"].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += [-logprobs[position, chunk[position + 1]] for position in range(32, 63)]
    assert answer["nll"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_divergence_from_itself_is_zero_and_from_another_not(demo_daemon: Daemon, tmp_path: Path) -> None:
    endpoint = ("--endpoint", demo_daemon.endpoint)
    base = tmp_path / "base.npz"
    run_json("generate", *endpoint, "--prompt", PROMPT, "-n", "20", "--ignore-eos", "--logits", str(base))
    same = run_json("perplexity", *endpoint, "--kl-base", str(base))
    assert same["kld_mean"] == 0.0 and same["same_top"] == 1.0
    stored = np.load(base)
    moved = tmp_path / "moved.npz"
    logits = np.roll(stored["logits"], 1, axis=1)
    np.savez(moved, tokens=stored["tokens"], logits=logits)
    other = run_json("perplexity", *endpoint, "--kl-base", str(moved))
    assert other["kld_mean"] > 1.0 and other["same_top"] < 0.5


def test_text_shorter_than_a_chunk_is_refused(demo_daemon: Daemon, text_file: Path) -> None:
    result = run("perplexity", "--endpoint", demo_daemon.endpoint, "-f", str(text_file), "--ctx", "1024")
    assert "1024" in one_line_error(result, "perplexity")


def test_perplexity_without_work_is_refused(demo_daemon: Daemon) -> None:
    assert "-f" in one_line_error(run("perplexity", "--endpoint", demo_daemon.endpoint), "perplexity")


# ---- bloomery-chat ----


def test_chat_answers_each_line_of_standard_input(demo_daemon: Daemon) -> None:
    options = ("--endpoint", demo_daemon.endpoint, "--temp", "0", "-n", "10")
    both = run("chat", *options, text="Hello\n\nAnd now?\n")
    assert both.returncode == 0, both.stderr
    alone = run("chat", *options, "--prompt", "Hello")
    assert alone.returncode == 0 and alone.stdout
    assert both.stdout.startswith(alone.stdout)
    assert len(both.stdout) > len(alone.stdout)
    assert both.stderr == "", "only answers are printed"


def test_chat_remembers_until_reset(demo_daemon: Daemon) -> None:
    options = ("--endpoint", demo_daemon.endpoint, "--temp", "0", "-n", "10", "-v")
    result = run("chat", *options, text="Hello\nHello\n/reset\nHello\n/quit\nHello\n")
    assert result.returncode == 0, result.stderr
    reports = [line for line in result.stderr.splitlines() if line.startswith("[prompt ")]
    lengths = [int(line.split()[1]) for line in reports]
    assert len(lengths) == 3, "nothing is asked after /quit"
    assert lengths[1] > lengths[0] == lengths[2]
    assert all("tokens/s" in line for line in reports)


def test_chat_commands(demo_daemon: Daemon) -> None:
    options = ("--endpoint", demo_daemon.endpoint, "--temp", "0", "-n", "6", "-v")
    lines = "/regen\n/help\n/nonsense\n/system Be brief.\nHello\n/regen\n"
    result = run("chat", *options, text=lines)
    assert result.returncode == 0, result.stderr
    assert "nothing was asked yet" in result.stderr
    assert "/nonsense is not a command" in result.stderr
    assert result.stderr.count("/reset") == 2
    assert result.stderr.count("[prompt ") == 2


def test_chat_without_arguments_says_what_the_demo_model_is() -> None:
    before = left_behind()
    result = run("chat", "--prompt", "How do I open a file?", "-n", "8")
    assert result.returncode == 0, result.stderr
    assert "knows nothing" in result.stderr
    assert result.stdout.strip()
    assert left_behind() <= before


def test_plain_chat_continues_the_text_of_all_turns(demo_daemon: Daemon) -> None:
    options = ("--endpoint", demo_daemon.endpoint, "-n", "8")
    chat = run("chat", *options, "--plain", "--temp", "0", text=f"{PROMPT}\nimport os\n")
    first = run_json("generate", *options, "--prompt", PROMPT)["text"]
    second = run_json("generate", *options, "--prompt", f"{PROMPT}{first}\n\nimport os")["text"]
    assert chat.stdout == f"{first}\n{second}\n"


def test_interrupt_ends_the_answer_and_not_the_chat(demo_daemon: Daemon) -> None:
    command = program("chat", "--endpoint", demo_daemon.endpoint, "--temp", "0", "-n", "900", "-v")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [*command, "--logit-bias", "8187=-inf", "--logit-bias", "8189=-inf"], text=True, env=environment, **pipes
    )  # type: ignore[call-overload]
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write("Hello\n")
    process.stdin.flush()
    process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().endswith("; aborted]\n")
    process.stdin.write("/quit\n")
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()
    process.stderr.close()
