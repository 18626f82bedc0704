"""Drafts from the command line to the daemon: llama-server's spellings, refusals, and what a daemon tells of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from oracle_data import f32_file, trained_file

from bloomery.launcher.command_line import add_daemon_options, daemon_config, program_parser
from bloomery.launcher.demo_model import demo_model_path
from bloomery.launcher.draft_options import llama_kind
from bloomery.runtime.client import Client, ControlClient, new_request_id
from bloomery.runtime.daemon_config import DaemonConfig
from bloomery.runtime.drafts.start import draft_kind, draft_limits
from bloomery.runtime.drafts.vocabulary_check import shared_vocabulary
from bloomery.runtime.errors import ModelFileError, PlanError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.private_daemon import PrivateDaemon
from bloomery.runtime.requests import GenerationRequest, SamplingParameters


def config_of(*arguments: str) -> DaemonConfig:
    parser = program_parser("program", "", ())
    add_daemon_options(parser)
    return daemon_config(parser.parse_args(arguments), "model.gguf")


def test_llama_servers_spellings() -> None:
    ours = config_of("--model-draft", "d.gguf", "--draft-max", "9", "--draft-min", "2", "--draft-p-min", "0.5")
    theirs = config_of(
        "-md", "d.gguf", "--spec-draft-n-max", "9", "--spec-draft-n-min", "2", "--spec-draft-p-min", "0.5"
    )
    assert ours == theirs and draft_kind(ours) == "model"
    assert draft_limits(ours).most == 9 and draft_limits(ours).least == 2
    assert (
        draft_kind(config_of("--spec-type", "ngram-simple")) == "lookup" == draft_kind(config_of("--draft", "lookup"))
    )
    assert draft_limits(config_of("--draft", "lookup", "--draft-max", "64")).most == 15, "as many as a step can check"
    assert llama_kind("ngram-mod,draft-simple") == "model"
    with pytest.raises(argparse.ArgumentTypeError, match="ngram"):
        llama_kind("draft-eagle3")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--draft", "model"), "without a draft model file"),
        (("--draft", "lookup", "--model-draft", "d.gguf"), "with a draft model file"),
        (("--draft", "lookup", "--draft-p-min", "2"), "least chance"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        draft_kind(config_of(*arguments))


def test_another_vocabulary_is_refused_by_the_first_token_that_differs() -> None:
    files = (demo_model_path("tiny-qwen3moe"), trained_file("tiny-deepseek2-Q3_K_M"), f32_file("llama"))
    demo, other, llama = (ModelFile.open(path) for path in files)
    with demo, other, llama:
        with pytest.raises(ModelFileError, match=r"cannot draft for .*: token \d+ is '.*', the model's '.*'"):
            shared_vocabulary(demo, other)
        with pytest.raises(ModelFileError, match=r"cannot draft for .*: (its tokenizer is|token|it has)"):
            shared_vocabulary(demo, llama)
        assert shared_vocabulary(demo, demo) == 8192


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_a_daemon_with_drafts_says_the_same_and_counts(kind: str) -> None:
    path = str(Path(demo_model_path("tiny-qwen3moe")))
    given = {"draft_model": path} if kind == "model" else {"draft": kind}
    config = DaemonConfig(path, context=256, slots=1, processes=1, prompt_block=64, draft_fixed=True, **given)  # type: ignore[arg-type]
    with PrivateDaemon(config) as daemon, Client(daemon.endpoint) as client, ControlClient(daemon.control) as control:

        def ask(draft_tokens: int | None) -> tuple[tuple[int, ...], int, int]:
            sampling = SamplingParameters(temperature=0.7, seed=3)
            request = GenerationRequest(
                new_request_id(), text="aaa bbb aaa bbb", max_tokens=40, sampling=sampling, draft_tokens=draft_tokens
            )
            done = client.complete(request)
            return done.tokens, done.final.draft_tokens, done.final.draft_accepted

        plain, drafted = ask(0), ask(None)
        assert plain[0] == drafted[0] and plain[1] == 0
        assert drafted[1] > 0 and (kind == "lookup" or drafted[2] > 5)
        assert client.facts.draft == kind
        metrics, status = control.metrics(), control.status()
    assert (metrics["draft_tokens"], metrics["draft_accepted"]) == drafted[1:]
    assert status["draft"] == kind == status["engine"]["draft"]["kind"]
    assert (status["memory"].get("draft", 0) > 1e6) == (kind == "model")
