"""OpenAI's /v1/chat/completions. Does not know how text is split into content, reasoning and tool calls."""

from __future__ import annotations

from typing import Any

from bloomery.launcher.chat_output import ChatOutput, Delta, Message, OutputFormat
from bloomery.launcher.http.generation import Answer, Begun, Ended, Grown, Processed, Step
from bloomery.launcher.http.shapes import Event, OpenAIShape
from bloomery.runtime.facts import ModelFacts


class Reader:
    """The output of each choice: its parser and its message so far."""

    def __init__(self, format: OutputFormat) -> None:
        self._format = format
        self._readers: dict[int, ChatOutput] = {}
        self.messages: dict[int, Message] = {}

    def read(self, step: Grown | Ended) -> list[Delta]:
        index = step.answer.job.index
        if index not in self._readers:
            self._readers[index], self.messages[index] = self._format.reader(), Message()
        reader = self._readers[index]
        deltas = reader.push(step.text) if isinstance(step, Grown) else reader.finish()
        for delta in deltas:
            self.messages[index].add(delta)
        return deltas

    def message(self, answer: Answer) -> Message:
        """The whole message of an answer whose steps have not been read."""
        reader, message = self._format.reader(), Message()
        for delta in [*reader.push(answer.text), *reader.finish()]:
            message.add(delta)
        return message


def finish_reason(answer: Answer, message: Message) -> str:
    if not answer.stopped:
        return "length"
    return "tool_calls" if message.tool_calls else "stop"


class ChatShape(OpenAIShape):
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        facts: ModelFacts,
        fingerprint: str,
        format: OutputFormat,
        *,
        verbose: bool,
        include_usage: bool,
        jobs: int,
    ) -> None:
        super().__init__(model, facts, fingerprint, verbose=verbose, include_usage=include_usage)
        self._reader = Reader(format)
        self._jobs = jobs
        self._greeted: set[int] = set()
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of tokens whose text has not left the reader yet

    def events(self, step: Step) -> list[Event]:
        answer = step.answer
        values = answer.job.values
        match step:
            case Begun():
                return []
            case Processed():
                if not values["return_progress"]:
                    return []
                self._greeted.add(answer.job.index)
                chunk = self._chunk(answer, {"role": "assistant", "content": None})
                chunk["prompt_progress"] = answer.progress()
                if values["timings_per_token"]:
                    chunk["timings"] = answer.timings()
                return [("", chunk)]
            case Grown() | Ended():
                return [("", chunk) for chunk in self._text_chunks(step)]

    def _text_chunks(self, step: Grown | Ended) -> list[dict[str, Any]]:
        answer = step.answer
        chunks = []
        if answer.job.index not in self._greeted or (isinstance(step, Grown) and answer.text == step.text):
            if answer.job.index not in self._greeted:
                chunks.append(self._chunk(answer, {"role": "assistant", "content": None}))
            self._greeted.add(answer.job.index)
        texts = [self._chunk(answer, delta_object(delta)) for delta in self._reader.read(step)]
        if isinstance(step, Grown):
            self._logprobs.setdefault(answer.job.index, []).extend(step.probabilities)
        if texts:
            if logprobs := self._logprobs.pop(answer.job.index, None):
                texts[-1]["choices"][0]["logprobs"] = {"content": logprobs}
            if answer.job.values["timings_per_token"]:
                texts[-1]["timings"] = answer.timings()
        chunks += texts
        if isinstance(step, Ended):
            message = self._reader.messages[answer.job.index]
            last = self._chunk(answer, {}, finish_reason(answer, message)) | self.verbose(answer)
            chunks += [last, *self.last_chunks(answer, self._jobs)]
            chunks[-1]["timings"] = answer.timings()
        return chunks

    def whole(self, answers: list[Answer]) -> Any:
        choices = []
        for answer in answers:
            message = self._reader.message(answer)
            choice: dict[str, Any] = {
                "finish_reason": finish_reason(answer, message),
                "index": answer.job.index,
                "message": message_object(message),
            }
            if answer.probabilities:
                choice["logprobs"] = {"content": answer.probabilities}
            choices.append(choice)
        return self.body(choices, answers)

    def _chunk(self, answer: Answer, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"finish_reason": finish, "index": answer.job.index, "delta": delta}
        return self.envelope([choice], self.chunk_name)


def delta_object(delta: Delta) -> dict[str, Any]:
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning}
    if call := delta.tool_call:
        head = {"id": call.id, "type": "function"} if call.id else {}
        name = {"name": call.name} if call.name else {}
        return {"tool_calls": [{"index": call.index, **head, "function": {**name, "arguments": call.arguments}}]}
    return {"content": delta.content}


def message_object(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body
