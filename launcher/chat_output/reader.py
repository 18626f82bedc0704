"""One answer's text taken apart while it streams: reasoning, content, tool calls.

Owns the order of the parts and the rule for text that is not what a form says: what has been told is not taken back,
and everything else is content, so that no character is lost. White space around reasoning and around calls is dropped.
It does not know the forms of calls (`tool_formats.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bloomery.launcher.chat_output.calls import Calls
from bloomery.launcher.chat_output.deltas import Delta
from bloomery.launcher.chat_output.source import BLANKS, Mismatch, Reading, Source, Wait
from bloomery.launcher.chat_output.tool_formats import ToolFormat


class Reader:
    """A ChatOutput. `tags` open and close reasoning, None: there is none to look for; `opened`: the prompt has opened
    it already. `legacy` leaves reasoning in the content too. Without `form` no calls are looked for."""

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Iterable[Mapping[str, Any]],
        tags: tuple[str, str] | None,
        *,
        opened: bool = False,
        legacy: bool = False,
    ) -> None:
        self._source = Source()
        self._calls = Calls(tools)
        self._form, self._tags, self._opened, self._legacy = form, tags, opened, legacy
        self._steps: Iterator[Delta | Wait] = self._read()

    def push(self, text: str) -> list[Delta]:
        self._source.feed(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        self._source.ended = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        deltas: list[Delta] = []
        for step in self._steps:
            if isinstance(step, Wait):
                break
            deltas.append(step)
        return deltas

    def _read(self) -> Reading[None]:
        blanks = (yield from self._reasoning(*self._tags)) if self._tags else ""
        if self._form is not None:
            yield from self._content(self._form, blanks)
        else:
            if blanks:
                yield Delta(content=blanks)
            for piece in self._source.pieces_until(()):
                yield piece if isinstance(piece, Wait) else Delta(content=piece)

    def _reasoning(self, opening: str, closing: str) -> Reading[str]:
        """Returns the blanks before the content, where there is no reasoning."""
        source = self._source
        blanks = yield from source.blanks()
        found = yield from source.optional(opening)
        if not found and not self._opened:
            return blanks
        if self._legacy and found:
            yield Delta(content=found)
        held = ""
        begun = False
        for piece in source.pieces_until((closing,)):
            if isinstance(piece, Wait):
                yield piece
                continue
            if self._legacy:
                yield Delta(content=piece)
            text = held + (piece if begun else piece.lstrip(BLANKS))
            shown = text.rstrip(BLANKS)
            held = text[len(shown) :]
            if shown:
                begun = True
                yield Delta(reasoning=shown)
        if (yield from source.optional(closing)) and self._legacy:
            yield Delta(content=closing)
        blanks = yield from source.blanks()
        if self._legacy and blanks:
            yield Delta(content=blanks)
        return ""

    def _content(self, form: ToolFormat, held: str) -> Reading[None]:
        source = self._source
        held += yield from source.blanks()
        after_call = False
        if form.starts and (yield from source.begins_with(form.starts)):
            after_call = yield from self._block(form, form.starts, held)
            held = ""
        while True:
            for piece in source.pieces_until(form.openers):
                if isinstance(piece, Wait):
                    yield piece
                    continue
                text = held + piece
                shown = text.rstrip(BLANKS)
                held = text[len(shown) :]
                if shown:
                    yield Delta(content=shown.lstrip(BLANKS) if after_call else shown)
                    after_call = False
            if not source.rest:
                break
            after_call = (yield from self._block(form, form.openers, held)) or (after_call and not held)
            held = ""
        if held and not after_call:
            yield Delta(content=held)

    def _block(self, form: ToolFormat, beginnings: tuple[str, ...], before: str) -> Reading[bool]:
        """Reads a block of calls; whether it told of one. If not, its beginning is content, like the blanks before."""
        source, begun = self._source, self._calls.started
        told = False
        source.mark()
        try:
            for step in form.block(source, self._calls):
                told = told or isinstance(step, Delta)
                yield step
        except Mismatch:
            if not told:
                source.rewind()
                opener = yield from source.expect(*beginnings)
                yield Delta(content=before + opener)
        source.release()
        return self._calls.started > begun
