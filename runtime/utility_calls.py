"""Calls that need tokenizer or template but no model step: tokenize, detokenize, apply_template, pieces.

Owns their arguments, results and bounds, and the thread that runs them and prepares prompts. It knows no sockets.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from bloomery.runtime.errors import BloomeryError, RequestError
from bloomery.runtime.field_types import Field, Schema, array, choice, flag, integer, mapping, text, token_array

if TYPE_CHECKING:
    from bloomery.runtime.chat_template import ChatTemplate
    from bloomery.runtime.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PENDING_LIMIT = 1024
RESERVED_VARIABLES = ("messages", "self", "add_generation_prompt")

TOKENIZE_SCHEMA = Schema(
    "tokenize",
    (
        Field("text", text()),
        Field("add_special", flag(), True),
        Field("parse_special", flag(), True),
        Field("pieces", flag(), False),
    ),
)
PIECES_SCHEMA = Schema("pieces", (Field("tokens", token_array()), Field("special", flag(), True)))
SPECIAL_TOKENS_SCHEMA = Schema("special_tokens", ())
DETOKENIZE_SCHEMA = Schema("detokenize", (Field("tokens", token_array()), Field("special", flag(), False)))
TEMPLATE_SCHEMA = Schema(
    "apply_template",
    (
        Field("messages", array(mapping(), 1 << 16)),
        Field("add_generation_prompt", flag(), True),
        Field("template_variables", mapping(), {}),
        Field("template", text(), ""),
    ),
)
TEMPLATES_KEPT = 8
SLOT_SCHEMA = Schema(
    "slot",
    (
        Field("action", choice("save", "restore", "erase")),
        Field("slot", integer(0, 2**31 - 1)),
        Field("name", text(), ""),
    ),
)
SlotCall = Callable[[str, int, str], "Future[dict[str, Any]]"]


Answer = dict[str, Any] | Future[dict[str, Any]]


class UtilityCalls:
    """The methods of the client socket by name. Runs in whatever thread calls it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, slot_call: SlotCall | None = None) -> None:
        """`slot_call(action, slot, name)` begins something that ends when the slot is idle."""
        self._tokenizer = tokenizer
        self._slot_call = slot_call
        self._template = template
        self._others: dict[str, ChatTemplate] = {}  # the last few templates that calls have brought
        self._methods: dict[str, tuple[Schema, Callable[..., Answer]]] = {
            "tokenize": (TOKENIZE_SCHEMA, self._tokenize),
            "detokenize": (DETOKENIZE_SCHEMA, self._detokenize),
            "pieces": (PIECES_SCHEMA, self._pieces),
            "slot": (SLOT_SCHEMA, self._slot),
            "special_tokens": (SPECIAL_TOKENS_SCHEMA, self._special_tokens),
            "apply_template": (TEMPLATE_SCHEMA, self._apply_template),
        }

    def run(self, method: str, arguments: dict[str, Any]) -> Answer:
        """Value of a call, or a future of it. Raises RequestError: "not_found", "invalid_request", "unsupported"."""
        if method not in self._methods:
            names = ", ".join(self._methods)
            raise RequestError(
                "not_found", f"no method {method[:60]!r} on this socket; there are {names}", method=method[:60]
            )
        schema, function = self._methods[method]
        return function(**schema.read(arguments, "arguments"))

    def _tokenize(self, text: str, add_special: bool, parse_special: bool, pieces: bool) -> dict[str, Any]:
        tokens = self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        value: dict[str, Any] = {"tokens": tokens}
        if pieces:
            value["pieces"] = [self._tokenizer.piece(token) for token in tokens]
        return value

    def _pieces(self, tokens: tuple[int, ...], special: bool) -> dict[str, Any]:
        self._check(tokens)
        return {"pieces": [self._tokenizer.piece(token, special=special) for token in tokens]}

    def _slot(self, action: str, slot: int, name: str) -> Answer:
        if self._slot_call is None:
            raise RequestError("unsupported", "this daemon cannot save slots")
        return self._slot_call(action, slot, name)

    def _special_tokens(self) -> dict[str, Any]:
        return {"tokens": dict(self._tokenizer.special)}

    def _detokenize(self, tokens: tuple[int, ...], special: bool) -> dict[str, Any]:
        self._check(tokens)
        return {"text": self._tokenizer.decode(tokens, special=special)}

    def _check(self, tokens: tuple[int, ...]) -> None:
        vocabulary = self._tokenizer.vocabulary
        for index, token in enumerate(tokens):
            if token >= vocabulary:
                field = f"arguments.tokens[{index}]"
                raise RequestError(
                    "invalid_request", f"field {field}: token {token} of a vocabulary of {vocabulary}", field=field
                )

    def _apply_template(
        self,
        messages: tuple[dict[str, Any], ...],
        add_generation_prompt: bool,
        template_variables: dict[str, Any],
        template: str,
    ) -> dict[str, Any]:
        chosen = self._other_template(template) if template else self._template
        if chosen is None:
            raise RequestError("unsupported", "the model file has no chat template", "send text or tokens")
        for name in template_variables:
            if name in RESERVED_VARIABLES:
                field = "arguments.template_variables"
                raise RequestError("invalid_request", f"field {field}: the name {name} is reserved", field=field)
        rendered = chosen.render(list(messages), add_generation_prompt=add_generation_prompt, **template_variables)
        return {"text": rendered}

    def _other_template(self, source: str) -> ChatTemplate:
        """A template of the caller's, compiled once while it is in use."""
        found = self._others.pop(source, None)
        if found is None:
            from bloomery.runtime.chat_template import ChatTemplate

            found = ChatTemplate(source, self._tokenizer)
        while len(self._others) >= TEMPLATES_KEPT:
            del self._others[next(iter(self._others))]
        self._others[source] = found
        return found


class Workbench:
    """One thread that does, in order, what would keep the socket's thread from its messages."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(PENDING_LIMIT)
        self._thread = threading.Thread(target=self._run, name="bloomery-utility", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Raises RequestError("overloaded") when too much is waiting already."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            raise RequestError(
                "overloaded",
                f"{PENDING_LIMIT} calls are waiting",
                "try again later",
                retry_after_s=1,
                limit=PENDING_LIMIT,
            ) from None

    def close(self) -> None:
        """Finishes what is queued."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while task := self._tasks.get():
            try:
                task()
            except Exception:
                log.exception("a task of the utility thread failed")


def as_request_error(error: Exception) -> RequestError:
    """What a client is told about an exception: its own text if it is meant for people, else "internal"."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BloomeryError):
        return RequestError("internal", error.message, error.hint)
    log.error("unexpected failure", exc_info=error)
    return RequestError("internal", f"{type(error).__name__}: {error}", "the daemon's log has the trace")
