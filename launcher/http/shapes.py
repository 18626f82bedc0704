"""What an answer looks like on the wire: the interface of all shapes, and llama-server's own.

A shape gets the steps of the generations and gives back server-sent events, or the whole body at the end. It does not
know sockets, nor where steps come from.
"""

from __future__ import annotations

import secrets
import string
import time
from typing import Any, Protocol

from bloomery.launcher.http.errors import error_object
from bloomery.launcher.http.generation import Answer, Begun, Ended, Grown, Processed, Step
from bloomery.runtime.errors import RequestError
from bloomery.runtime.facts import ModelFacts

Event = tuple[str, dict[str, Any]]
"""Name of a server-sent event ("" for none) and its data."""

_ID_LETTERS = string.ascii_letters + string.digits


def random_id(prefix: str) -> str:
    """`prefix` and 32 letters and digits."""
    return prefix + "".join(secrets.choice(_ID_LETTERS) for _ in range(32))


class Shape(Protocol):
    show_prompt: bool
    """Whether the prompt's text is needed."""

    last_words: tuple[str, ...]
    """Data that ends a stream, after the last event."""

    def events(self, step: Step) -> list[Event]: ...

    def whole(self, answers: list[Answer]) -> Any: ...

    def failure(self, error: RequestError) -> Event:
        """An error that comes when the stream has begun."""


class NativeShape:
    """llama-server's /completion."""

    show_prompt = True
    last_words: tuple[str, ...] = ()

    def __init__(self, model: str, facts: ModelFacts) -> None:
        self._model, self._facts = model, facts

    def events(self, step: Step) -> list[Event]:
        answer = step.answer
        values = answer.job.values
        match step:
            case Begun():
                return []
            case Processed():
                return (
                    [("", self._partial(answer, "", ()) | self._progress(answer))] if values["return_progress"] else []
                )
            case Grown(text=text, tokens=tokens, probabilities=probabilities):
                body = self._partial(answer, text, tokens)
                if probabilities:
                    body["completion_probabilities"] = list(probabilities)
                if values["timings_per_token"]:
                    body["timings"] = answer.timings()
                return [("", body)]
            case Ended():
                return [("", self.final(answer, streamed=True))]

    def whole(self, answers: list[Answer]) -> Any:
        bodies = [self.final(answer, streamed=False) for answer in answers]
        return bodies[0] if len(bodies) == 1 else bodies

    def failure(self, error: RequestError) -> Event:
        return "", {"error": error_object(error)}

    def _partial(self, answer: Answer, text: str, tokens: tuple[int, ...]) -> dict[str, Any]:
        return {
            "index": answer.job.index,
            "content": text,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": answer.slot,
            "tokens_predicted": answer.generated,
            "tokens_evaluated": answer.prompt_tokens,
        }

    def _progress(self, answer: Answer) -> dict[str, Any]:
        timed = answer.job.values["timings_per_token"]
        return {"prompt_progress": answer.progress()} | ({"timings": answer.timings()} if timed else {})

    def final(self, answer: Answer, *, streamed: bool) -> dict[str, Any]:
        """The last event of a stream (without what the others have brought), or the whole answer."""
        values, final = answer.job.values, answer.final
        assert final is not None
        body = {
            "index": answer.job.index,
            "content": "" if streamed else answer.text,
            "tokens": answer.tokens if values["return_tokens"] and not streamed else [],
            "id_slot": answer.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": answer.generated,
            "tokens_evaluated": answer.prompt_tokens,
            "generation_settings": answer.job.settings(final.seed, self._facts.end_tokens),
            "prompt": answer.prompt,
            "has_new_line": "\n" in answer.text,
            "truncated": answer.truncated,
            "stop_type": answer.stop_type,
            "stopping_word": final.stop,
            "tokens_cached": answer.prompt_tokens + max(0, answer.generated - 1),
            "timings": answer.timings(),
        }
        if not streamed and answer.probabilities:
            body["completion_probabilities"] = answer.probabilities
        return chosen_fields(body, values["response_fields"])


def chosen_fields(body: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The fields asked for; "a/b" is field b of a, shown under that name. All fields if none are named."""
    if not names:
        return body
    chosen: dict[str, Any] = {}
    for name in names:
        value: Any = body
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            chosen[name] = value
    return chosen


def usage(answers: list[Answer]) -> dict[str, Any]:
    """OpenAI's usage of one or several choices of one prompt, or of several prompts."""
    prompts = {id(answer.job.tokens): answer for answer in answers}
    prompt, completion = sum(a.prompt_tokens for a in prompts.values()), sum(a.generated for a in answers)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached for answer in prompts.values())},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
    }


class OpenAIShape:
    """What OpenAI's two completion shapes share: the envelope, and when usage and timings appear."""

    object_name = ""
    chunk_name = ""
    id_prefix = "chatcmpl-"
    last_words: tuple[str, ...] = ("[DONE]",)

    def __init__(self, model: str, facts: ModelFacts, fingerprint: str, *, verbose: bool, include_usage: bool) -> None:
        self._model, self._fingerprint = model, fingerprint
        self._include_usage = include_usage
        self.show_prompt = self._verbose = verbose
        self._native = NativeShape(model, facts)
        self.id, self._created = random_id(self.id_prefix), int(time.time())
        self._ended: list[Answer] = []

    def failure(self, error: RequestError) -> Event:
        return "", {"error": error_object(error)}

    def envelope(self, choices: list[dict[str, Any]], name: str) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": self._created,
            "id": self.id,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "object": name,
        }

    def last_chunks(self, answer: Answer, jobs: int) -> list[dict[str, Any]]:
        """After the finish chunk of the last choice: usage, if asked for."""
        self._ended.append(answer)
        if len(self._ended) < jobs or not self._include_usage:
            return []
        return [self.envelope([], self.chunk_name) | {"usage": usage(self._ended)}]

    def body(self, choices: list[dict[str, Any]], answers: list[Answer]) -> dict[str, Any]:
        body = self.envelope(choices, self.object_name) | {"usage": usage(answers)}
        if self._verbose:
            body["__verbose"] = self._native.final(answers[0], streamed=False)
        body["timings"] = answers[0].timings()
        return body

    def verbose(self, answer: Answer) -> dict[str, Any]:
        return {"__verbose": self._native.final(answer, streamed=True)} if self._verbose else {}


class TextShape(OpenAIShape):
    """OpenAI's /v1/completions."""

    object_name = chunk_name = "text_completion"

    def __init__(
        self,
        model: str,
        facts: ModelFacts,
        fingerprint: str,
        *,
        verbose: bool,
        include_usage: bool,
        jobs: int,
        echo: str = "",
    ) -> None:
        super().__init__(model, facts, fingerprint, verbose=verbose, include_usage=include_usage)
        self._jobs = jobs

    def events(self, step: Step) -> list[Event]:
        answer = step.answer
        values = answer.job.values
        chunks: list[dict[str, Any]] = []
        if isinstance(step, Processed) and values["return_progress"]:
            chunks = [self._chunk(answer, "", None) | {"prompt_progress": answer.progress()}]
        elif isinstance(step, Grown):
            chunks = [self._chunk(answer, step.text, list(step.probabilities) or None)]
        elif isinstance(step, Ended):
            finish = "stop" if answer.stopped else "length"
            choice = {"text": "", "index": answer.job.index, "logprobs": None, "finish_reason": finish}
            chunks = [self.envelope([choice], self.chunk_name) | self.verbose(answer)]
            chunks += self.last_chunks(answer, self._jobs)
            if chunks[-1].get("usage") is None:
                chunks[-1]["usage"] = usage([answer])
        if chunks and (isinstance(step, Ended) or values["timings_per_token"]):
            chunks[-1]["timings"] = answer.timings()
        return [("", chunk) for chunk in chunks]

    def whole(self, answers: list[Answer]) -> Any:
        choices = [
            {
                "text": answer.text,
                "index": answer.job.index,
                "logprobs": {"content": answer.probabilities} if answer.probabilities else None,
                "finish_reason": "stop" if answer.stopped else "length",
            }
            for answer in answers
        ]
        return self.body(choices, answers)

    def _chunk(self, answer: Answer, text: str, probabilities: list[dict[str, Any]] | None) -> dict[str, Any]:
        logprobs = {"content": probabilities} if probabilities else None
        choice = {"text": text, "index": answer.job.index, "logprobs": logprobs, "finish_reason": None}
        return self.envelope([choice], self.chunk_name)
