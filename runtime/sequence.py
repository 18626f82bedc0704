"""One request on its way from prompt to last token: its tokens, its text, its events.

Owns what a request asks for, checked, and what it has produced. Knows no other sequence, no step and no thread: the
engine tells it which of its rows have been computed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import RequestError
from bloomery.runtime.pooling import POOLINGS, Pool
from bloomery.runtime.reasoning import ReasoningWatch, check_reasoning
from bloomery.runtime.requests import Admitted, Chunk, Event, Failed, Final, FinishReason, GenerationRequest, Progress
from bloomery.runtime.sampling import Sampler, token_logprobs
from bloomery.runtime.sampling_checks import check_integer, check_list, check_sampling, invalid
from bloomery.runtime.sampling_tools import SamplingTools
from bloomery.runtime.slots import Slot
from bloomery.runtime.stop_strings import StopStrings
from bloomery.runtime.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from bloomery.runtime.chat_template import ChatTemplate

Sink = Callable[[Event], None]
TokenList: TypeAlias = tuple[object, ...] | list[object] | list[int]
Why: TypeAlias = RequestError | Literal["aborted"]

_texts = itertools.count()


class Sequence:
    """`tokens[:length]` are the known tokens (prompt, then generated); the slot's record is the same array, and
    `slot.count` of them are in the cache. `ended` is the event that ends the request, once it is known."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        context: int,
        slots: int,
        tools: SamplingTools,
    ) -> None:
        """Checks the request and tokenises its prompt. Raises RequestError."""
        self.request, self.sink = request, sink
        self.submitted = self.admitted = self.prompt_done = time.perf_counter()
        check_request(request, tokenizer.vocabulary, slots)
        prompt = prompt_tokens(request, tokenizer, template)
        self.prompt_length = len(prompt)
        if self.prompt_length > context:
            raise RequestError(
                "exceed_context_size",
                f"the prompt has {self.prompt_length} tokens, a slot's context {context}",
                "shorten the prompt or start the daemon with a larger --ctx",
                prompt_tokens=self.prompt_length,
                context=context,
            )
        room = context + 1 - self.prompt_length  # the last token needs no place in the cache
        if request.context_shift:
            room = max(context, request.max_tokens)
        self._limit = room if request.max_tokens < 0 else min(request.max_tokens, room)
        self._limit_reason: FinishReason = "length" if self._limit == request.max_tokens else "context"
        self.tokens = np.empty(self.prompt_length + self._limit, dtype=np.int32)
        self.tokens[: self.prompt_length] = prompt
        self.length = self.prompt_length
        self.shifted = 0  # tokens forgotten: they are in neither `tokens` nor the slot any more
        self.text = next(_texts)  # another number whenever `tokens` is not what it was and more (Wanted)
        self._forced: int | None = None
        self.checked = (0, 0)  # guessed tokens of the last step that had any, and how many were accepted
        self.draft_tokens = self.draft_accepted = 0
        self._context = context
        self._ends = frozenset(request.stop_tokens)
        if not request.ignore_eos:
            self._ends |= tokenizer.end_tokens
        excluded = tokenizer.end_tokens if request.ignore_eos else frozenset()
        self._excluded = excluded
        self.sampler = Sampler(request.sampling, excluded, tools.breakers)
        self._constraint = (
            tools.constraints.start(request.constraint, request.shown_tokens) if request.constraint else None
        )
        self._reasoning = ReasoningWatch(request.reasoning, tokenizer, prompt) if request.reasoning else None
        self._detokenizer = Detokenizer(tokenizer, shown=frozenset(request.shown_tokens))
        self._stops = StopStrings(request.stop)
        self._pool = Pool(request.embeddings) if request.embeddings != "none" else None
        pooled = self._pool is not None and self._pool.needs_all_rows
        self._all_rows = request.score_prompt or request.logits == "all" or pooled
        self.slot: Slot | None = None
        self.cached = 0
        self.on_hold = False
        self.interrupted: Why | None = None  # set by any thread; the engine's ends the request then
        self.ended: Final | Failed | None = None

    @property
    def request_id(self) -> bytes:
        return self.request.request_id

    @property
    def generated(self) -> int:
        return self.length + self.shifted - self.prompt_length

    @property
    def reuse(self) -> bool:
        """Whether a cached prefix may stand for prompt rows: not if something is asked of every row."""
        return self.request.cache_prompt and not self._all_rows

    @property
    def held(self) -> bool:
        return self.on_hold or self.interrupted is not None

    @property
    def rows_left(self) -> int:
        assert self.slot is not None
        return self.length - self.slot.count

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not yet in the cache."""
        assert self.slot is not None
        return 0 if self.shifted else max(0, self.prompt_length - self.slot.count)

    @property
    def cache_slot(self) -> int:
        assert self.slot is not None
        return self.slot.index

    @property
    def known(self) -> NDArray[np.int32]:
        return self.tokens[: self.length]

    @property
    def seed(self) -> int:
        return self.sampler.seed

    @property
    def guess_room(self) -> int:
        """How many tokens behind the last known one a step could check: as many as leave one more to generate, and as
        their rows find place for."""
        if self._pool or self.prompt_left or self.rows_left != 1:
            return 0
        wanted = self.request.draft_tokens
        room = min(self._limit - self.generated - 1, self._context - self.length)
        return max(0, room if wanted is None else min(room, wanted))

    @property
    def ahead_room(self) -> int:
        """How many steps may follow its next one without a look, on the greedy tokens: none if it chooses otherwise."""
        if self._pool or self.prompt_left or self.rows_left != 1 or self._constraint or not self.sampler.takes_greatest:
            return 0
        return max(0, min(self._limit - self.generated - 1, self._context - self.length))

    def guess(self, tokens: List[int], accepted: int | None) -> None:
        """Its next rows check these tokens, at most `guess_room`. `accepted` of them are taken whatever the model says,
        and no more, if that is not None (synthetic acceptance)."""
        self._forced = accepted
        self.tokens[self.length : self.length + len(tokens)] = tokens

    def status(self) -> dict[str, int | str]:
        """What `Engine.status` says of it; `position` is the number of tokens known so far."""
        return {
            "request": self.request_id.hex(),
            "phase": "prompt" if self.prompt_left else "generate",
            "position": self.length,
            "prompt_tokens": self.prompt_length,
            "cached_tokens": self.cached,
            "generated_tokens": self.generated,
            "draft_tokens": self.draft_tokens,
            "draft_accepted": self.draft_accepted,
        }

    def out_rows(self, rows: int) -> int:
        """How many of the next `rows` rows need logits."""
        if self._all_rows or rows > self.rows_left:
            return rows
        return 1 if rows and rows == self.rows_left and (self._limit or self._pool) else 0

    def start(self, slot: Slot, cached: int) -> Admitted:
        self.slot, self.cached, self.admitted = slot, cached, time.perf_counter()
        return Admitted(self.request_id, slot.index, self.prompt_length, cached)

    def accept(
        self,
        rows: int,
        logits: NDArray[np.float32],
        greedy: NDArray[np.int32],
        hidden: NDArray[np.float32] | None = None,
    ) -> Iterator[Event]:
        """Takes the results of its next `rows` rows: logits (float32, out_rows(rows) x V, valid during this call),
        their argmax and what they were made of. Yields events; the last ends the request if it sets `ended`."""
        assert self.slot is not None
        if rows > self.rows_left:
            yield from self._check_guess(rows - 1, logits, greedy)
            return
        first, last = self.slot.count, self.slot.count + rows
        self.slot.count = last
        if first < self.prompt_length and not self.shifted:
            now = time.perf_counter()
            yield Progress(self.request_id, last, self.prompt_length, self.cached, now - self.admitted)
            self.prompt_done = now
        if self._pool:
            yield from self._pooled(hidden)
            return
        scores: tuple[float, ...] = ()
        if self.request.score_prompt and first < self.prompt_length - 1:
            targets = self.tokens[first + 1 : min(last + 1, self.prompt_length)]
            scores = tuple(token_logprobs(logits[: len(targets)], targets).tolist())
        rows_of_logits = logits.copy() if self.request.logits == "all" else None
        if last < self.length or not self._limit:
            if scores or rows_of_logits is not None:
                yield Chunk(self.request_id, prompt_logprobs=scores, logits=rows_of_logits)
            if last == self.length:
                self.ended = self.final("length")
                yield self.ended
            return
        if self.request.logits == "generated":
            rows_of_logits = logits[-1:].copy()
        yield from self._generate(logits[-1], int(greedy[-1]), scores, rows_of_logits)

    def accept_ahead(self, logits: NDArray[np.float32], greedy: NDArray[np.int32]) -> Iterator[Event]:
        """Takes the results of its next row and of the steps that followed it on greedy tokens, one after the other, as
        long as those are the tokens that it chooses and nothing ends it. What later steps left in the slot is not
        counted, and computed again."""
        assert self.slot is not None
        for row, fed in enumerate(greedy.tolist()):
            self.slot.count += 1
            shown = logits[row : row + 1].copy() if self.request.logits != "none" else None
            place = self.length
            yield from self._generate(logits[row], fed, (), shown)
            if self.ended or self.interrupted or self.tokens[place] != fed:
                return

    def _check_guess(self, guessed: int, logits: NDArray[np.float32], greedy: NDArray[np.int32]) -> Iterator[Event]:
        """Takes the row of the last token and those of guessed ones, one after the other, as if each had had a step of
        its own, as long as the tokens chosen are the guessed ones. What the other rows left in the slot is not counted,
        and computed again."""
        assert self.slot is not None
        tokens, forced = self.tokens[self.length : self.length + guessed].tolist(), self._forced
        self.checked = (guessed, 0)
        self.draft_tokens += guessed
        for row in range(1 + guessed):
            self.slot.count += 1
            shown = logits[row : row + 1].copy() if self.request.logits != "none" else None
            place, take = self.length, tokens[row] if forced is not None and row < forced else None
            events = self._generate(logits[row], int(greedy[row]), (), shown, take)
            right = False
            for event in events:
                if isinstance(event, Chunk) and row < guessed:
                    right = bool(self.tokens[place] == tokens[row]) and (forced is None or take is not None)
                    self.checked = (guessed, row + right)
                    self.draft_accepted += right
                yield event
            if not right or self.ended or self.interrupted:
                return

    def _pooled(self, hidden: NDArray[np.float32] | None) -> Iterator[Event]:
        assert self._pool is not None
        if hidden is None:
            raise RequestError("unsupported", "this model's program has no hidden states to show")
        if len(hidden):
            self._pool.add(hidden)
        if not self.rows_left:
            yield Chunk(self.request_id, logits=self._pool.result())
            self.ended = self.final("length")
            yield self.ended

    def _generate(
        self,
        logits: NDArray[np.float32],
        greedy: int,
        scores: tuple[float, ...],
        rows: NDArray[np.float32] | None,
        take: int | None = None,
    ) -> Iterator[Event]:
        token = self._choose(logits, greedy, take)
        logprobs = (self.sampler.logprob(logits, token),) if self.request.sampling.logprobs else ()
        self.tokens[self.length] = token
        self.length += 1
        reason: FinishReason | None = None
        if token in self._ends:
            text, reason = "", "stop"
        else:
            text = self._stops.push(self._detokenizer.push(token))
            if self._constraint and self._constraint.finished and self.request.ignore_eos:
                reason = "stop"  # it can only end here, by a token that is excluded
        if not reason and not self._stops.found and self.generated == self._limit:
            reason = self._limit_reason
        if reason:
            text += self._rest()
        if self._stops.found:
            reason = "stop"
        yield Chunk(self.request_id, (token,), text, logprobs, scores, rows)
        if reason:
            self.ended = self.final(reason)
            yield self.ended
        elif self.length > self._context:
            self._shift()

    def _shift(self) -> None:
        """Forgets tokens of the middle; the slot keeps the first ones, those behind the gap are computed again."""
        assert self.slot is not None
        keep = min(self.request.keep, self._context - 4)
        discard = min(self.request.discard or (self.length - keep) // 2, self.length - keep - 1)
        self.tokens[keep : self.length - discard] = self.tokens[keep + discard : self.length].copy()
        self.length -= discard
        self.shifted += discard
        self.text = next(_texts)
        self.slot.count = self.slot.usable(keep)

    def _choose(self, logits: NDArray[np.float32], greedy: int, take: int | None = None) -> int:
        """The next token. As in llama.cpp, one is chosen freely first, and again among the allowed ones if the
        constraint refuses it: a random number more, and no mask for all the tokens that need none. `take` is taken in
        place of the one chosen first unless it would end the text. A token that ends reasoning is the only one."""
        history = self.tokens[: self.length]
        forced = self._forced_token()
        if forced is not None:
            token = self.sampler.force(forced, len(logits), history)
        else:
            token = self.sampler.choose(logits, greedy, history)
            if take is not None and take not in self._ends and take not in self._excluded:
                token = take
        if self._constraint and not self._constraint.allows(token):
            allowed = self._constraint.masked(logits)
            token = self.sampler.choose(allowed, int(allowed.argmax()), history)
        if self._reasoning and token not in self._ends:
            self._reasoning.accept(token)
        # what reasoning says of calls does not begin one
        if self._constraint and (self._constraint.active or not (self._reasoning and self._reasoning.inside)):
            self._constraint.accept(token)
        return token

    def _forced_token(self) -> int | None:
        forced = self._reasoning.forced if self._reasoning else None
        if forced is None or self._constraint is None or self._constraint.allows(forced):
            return forced
        assert self._reasoning is not None
        self._reasoning.give_way()  # a form that has no place for it counts for more
        return None

    def end_reasoning(self) -> bool:
        """Brings reasoning to its end with the next token; whether there is any. For any thread."""
        return self._reasoning is not None and self._reasoning.end()

    def _rest(self) -> str:
        """The text still held back: an incomplete character, the beginning of a stop string that did not come."""
        text = self._stops.push(self._detokenizer.flush())
        return text + self._stops.finish()

    def interrupt(self, why: Why) -> Iterator[Event]:
        """Ends the request before its time."""
        if isinstance(why, RequestError):
            self.ended = Failed(self.request_id, why.code, why.message, why.hint, why.details)
        else:
            if text := self._rest():
                yield Chunk(self.request_id, text=text)
            self.ended = self.final(why)
        yield self.ended

    def final(self, reason: FinishReason) -> Final:
        now = time.perf_counter()
        started = self.admitted if self.slot else now
        prompt_done = now if self.slot is None or self.prompt_left else self.prompt_done
        return Final(
            self.request_id,
            reason,
            self._stops.found,
            self.prompt_length,
            self.cached,
            self.generated,
            self.sampler.seed,
            queue_seconds=started - self.submitted,
            prompt_seconds=prompt_done - started,
            generate_seconds=now - prompt_done,
            shifted_tokens=self.shifted,
            draft_tokens=self.draft_tokens,
            draft_accepted=self.draft_accepted,
            reasoning_tokens=self._reasoning.tokens if self._reasoning else 0,
        )


def check_request(request: GenerationRequest, vocabulary: int, slots: int) -> None:
    """Raises RequestError("invalid_request") that names the first field out of its range."""
    check_sampling(request.sampling, vocabulary)
    check_integer("max_tokens", request.max_tokens, -1, 2**31 - 1)
    for stop in check_list("stop", request.stop):
        if not isinstance(stop, str) or not stop:
            raise invalid("stop", stop, "strings that are not empty")
    for field in ("stop_tokens", "shown_tokens"):
        for token in check_list(field, getattr(request, field)):
            check_integer(field, token, 0, vocabulary - 1)
    if request.slot is not None:
        check_integer("slot", request.slot, 0, slots - 1)
    if request.draft_tokens is not None:
        check_integer("draft_tokens", request.draft_tokens, 0, 2**31 - 1)
    if request.reasoning is not None:
        check_reasoning(request.reasoning)
    if request.embeddings not in POOLINGS:
        raise invalid("embeddings", request.embeddings, f"one of {', '.join(POOLINGS)}")
    if request.embeddings != "none" and (request.max_tokens or request.score_prompt or request.logits != "none"):
        raise invalid("embeddings", request.embeddings, "none unless max_tokens is 0 and nothing else is asked for")
    if request.context_shift and (request.score_prompt or request.logits != "none"):
        raise invalid("context_shift", True, "false together with score_prompt or logits")
    if request.logits not in ("none", "generated", "all"):
        raise invalid("logits", request.logits, '"none", "generated" or "all"')


def prompt_tokens(request: GenerationRequest, tokenizer: Tokenizer, template: ChatTemplate | None) -> NDArray[np.int32]:
    """The prompt's tokens (int32)."""
    tokens: TokenList
    if request.tokens is not None:
        field, tokens = "tokens", check_list("tokens", request.tokens)
    elif request.text is not None:
        if not isinstance(request.text, str):
            raise invalid("text", request.text, "a string")
        field, tokens = (
            "text",
            tokenizer.encode(request.text, add_special=request.add_special, parse_special=request.parse_special),
        )
    else:
        assert request.messages is not None
        if template is None:
            raise RequestError("unsupported", "the model file has no chat template", "send text or tokens instead")
        variables = request.template_variables
        if not all(isinstance(name, str) and name not in ("messages", "self") for name in variables):
            raise invalid("template_variables", list(variables), "names other than messages and self")
        field, tokens = "messages", template.render_tokens(request.messages, **variables)
    if not tokens:
        raise invalid(field, "empty", "at least one token")
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError):
        array = np.empty(0)
    if array.ndim != 1 or array.dtype.kind != "i" or array.min() < 0 or array.max() >= tokenizer.vocabulary:
        for token in tokens:
            check_integer(field, token, 0, tokenizer.vocabulary - 1)
    return array.astype(np.int32)
