"""Constrained output: which tokens keep a text inside a grammar, JSON schema or regular expression.

Owns the way from a constraint to token masks; llguidance does the parsing and is imported when first needed. A schema
that uses what cannot be enforced, or that nothing satisfies, is refused, never half enforced. It knows no sampling.
"""

from __future__ import annotations

import bisect
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bloomery.runtime.errors import RequestError
from bloomery.runtime.gbnf import lark_grammar
from bloomery.runtime.json_schema import enforceable
from bloomery.runtime.requests import Constraint
from bloomery.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Row = NDArray[np.float32]

WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
"""Between the parts of a JSON text, if anything: without a bound, small models fill pages with blanks."""
_OPTIONS = "%llguidance"
_KEPT = 32  # compiled constraints that are remembered
_VOCABULARIES = 3  # sets of control tokens for which the vocabulary is kept
_SHOWN = 400  # characters of an error of llguidance
_WATCHED = 1 << 14  # bytes of text that are kept while no trigger has come


class ConstraintCompiler:
    """Constraints over one vocabulary. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabularies: OrderedDict[frozenset[int], LLTokenizer] = OrderedDict()
        self._compiled: OrderedDict[tuple[str, frozenset[int]], LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Does what the first constraint would have to do: reads the vocabulary, which keeps every other thread waiting
        (100,000 tokens: a fifth of a second)."""
        if self._tokenizer.end_tokens:
            self.start(Constraint(regex="a"))

    def start(self, constraint: Constraint, shown: Iterable[int] = ()) -> TokenConstraint:
        """The state of one text, at its beginning. RequestError("invalid_request") that names field and part. Control
        tokens are no text, except those that are `shown`."""
        check_constraint(constraint)
        if not self._tokenizer.end_tokens:
            raise RequestError(
                "unsupported",
                "constrained output needs an end token, and the vocabulary has none",
                "drop the constraint",
            )
        field, grammar = _grammar(constraint)
        spelt = frozenset(token for token in shown if not self._tokenizer.piece(token, special=False))
        with self._lock:
            vocabulary = self._vocabulary(spelt)
            matcher = self._compiled.get((grammar, spelt))
            if matcher is None:
                matcher = self._compiled[grammar, spelt] = self._matcher(field, grammar, vocabulary)
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end((grammar, spelt))
            copy = matcher.deep_copy()
        return TokenConstraint(copy, self._tokenizer, vocabulary.tokenize_bytes, constraint.triggers)

    def _vocabulary(self, spelt: frozenset[int]) -> LLTokenizer:
        from llguidance import LLTokenizer

        if spelt not in self._vocabularies:
            # no slices: they make the first mask of a wide grammar faster, and this call, under the GIL, much slower
            ends = sorted(self._tokenizer.end_tokens)
            wrapper: Any = _Wrapper(self._tokenizer, spelt)
            self._vocabularies[spelt] = LLTokenizer(wrapper, eos_token=ends, slices=[])
            if len(self._vocabularies) > _VOCABULARIES:
                self._vocabularies.popitem(last=False)
        self._vocabularies.move_to_end(spelt)
        return self._vocabularies[spelt]

    def _matcher(self, field: str, grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        problem = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
        if not problem and not _mask(matcher, self._tokenizer.vocabulary).any():
            problem = "no text satisfies it"
        if problem:
            raise RequestError(
                "invalid_request", f"{field}: {_readable(field, problem)}", f"correct {field}", field=field
            )
        return matcher


class TokenConstraint:
    """The constraint of one text, fed with its tokens. With triggers it sleeps until one of them appears in the text,
    and then holds for the text from the trigger on."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: Tokenizer,
        tokenise: Callable[[bytes], list[int]],
        triggers: tuple[str, ...] = (),
    ) -> None:
        self._matcher, self._tokenizer, self._tokenise = matcher, tokenizer, tokenise
        self._triggers = tuple(trigger.encode() for trigger in triggers)
        self._longest = max(map(len, self._triggers), default=0)
        self._text = b""  # while asleep: the end of the text, its tokens, where they begin
        self._tokens: list[int] = []
        self._starts: list[int] = []
        self.active = not triggers

    @property
    def finished(self) -> bool:
        """Whether the text is complete and cannot go on."""
        return self.active and self._matcher.is_stopped()

    def allows(self, token: int) -> bool:
        """Whether the text may go on with `token`; end tokens: whether it may end here."""
        if not self.active:
            return True
        if token in self._tokenizer.end_tokens:
            return self._matcher.is_accepting()
        return bool(self._matcher.validate_tokens([token]) == 1)

    def masked(self, logits: Row) -> Row:
        """A copy of the logits (float32, V) with minus infinity for what is not allowed."""
        if not self.active:
            return logits
        allowed = _mask(self._matcher, len(logits))
        if not allowed.any():
            problem = _first_line(self._matcher.get_error()) or "it has come to a dead end"
            raise RequestError(
                "invalid_request", f"the constraint allows no token here: {problem}", "simplify the grammar or schema"
            )
        row: Row = np.where(allowed, logits, np.float32(-np.inf))
        return row

    def accept(self, token: int) -> None:
        """The text goes on with `token`, which is allowed. After an end token comes nothing."""
        if token in self._tokenizer.end_tokens:
            return
        if not self.active:
            self._watch(token)
        elif not self._matcher.consume_token(token):
            problem = _first_line(self._matcher.get_error())
            raise RequestError("invalid_request", f"the constraint failed: {problem}", "simplify the grammar or schema")

    def _watch(self, token: int) -> None:
        """Wakes when the text has a trigger in it. A text that the grammar does not accept from there on leaves it
        asleep until the next one."""
        searched = max(0, len(self._text) - self._longest + 1)
        self._tokens.append(token)
        self._starts.append(len(self._text))
        self._text += self._tokenizer.piece(token)
        found = [place for trigger in self._triggers if (place := self._text.find(trigger, searched)) >= 0]
        if found:
            begun = self._matcher.deep_copy()
            if begun.consume_tokens(self._since(min(found))):
                self._matcher, self.active = begun, True
        elif len(self._text) > _WATCHED:
            self._text, self._tokens, self._starts = self._text[-self._longest :], [token], [0]
            self._starts[0] = len(self._text) - len(self._tokenizer.piece(token))

    def _since(self, place: int) -> list[int]:
        """The tokens of the text from `place` on; of one that begins before, its rest tokenised anew."""
        index = bisect.bisect_right(self._starts, place) - 1
        if index >= 0 and self._starts[index] == place:
            return self._tokens[index:]
        after = self._starts[index + 1] if index + 1 < len(self._starts) else len(self._text)
        return [*self._tokenise(self._text[place:after]), *self._tokens[index + 1 :]]


class _Wrapper:
    """The vocabulary as llguidance wants it: control tokens are special, except those `spelt` out in the text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, spelt: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        ends = tokenizer.end_tokens
        self.eos_token_id = tokenizer.eos if tokenizer.eos in ends else min(ends)
        self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.piece(token) for token in range(tokenizer.vocabulary)]
        shown = (tokenizer.piece(token, special=False) for token in range(tokenizer.vocabulary))
        special = {token for token, piece in enumerate(shown) if not piece} - spelt | ends
        self.special_token_ids = sorted(special)

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def _mask(matcher: LLMatcher, vocabulary: int) -> NDArray[np.bool_]:
    """Which tokens may come next; none if the text cannot go on and may not end."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        return np.zeros(vocabulary, dtype=np.bool_)
    return np.unpackbits(bits, bitorder="little", count=vocabulary).view(np.bool_)


def _readable(field: str, problem: str) -> str:
    """An error of llguidance without its listing of the grammar; with a place only where that is the client's own."""
    problem = re.split(r"\n\s*\d+ \| ", problem)[0]
    place = re.match(r"(?:at )?(\d+)\((\d+)\): (?:failed to compile JSON schema: )?", problem)
    if place:
        shown = f"line {int(place[1]) - 1}, column {place[2]}: " if field == "lark" else ""
        problem = shown + problem[place.end() :]
    return " ".join(problem.split())[:_SHOWN]


def _first_line(problem: str) -> str:
    return problem.partition("\n")[0][:_SHOWN]


def _grammar(constraint: Constraint) -> tuple[str, str]:
    """The field that is given, and its content as llguidance's grammar."""
    from llguidance import LLMatcher

    if constraint.grammar is not None:
        if constraint.grammar.startswith(_OPTIONS):  # as llama.cpp takes such a grammar
            return "grammar", _unforced("grammar", constraint.grammar)
        return "grammar", _unforced("grammar", lark_grammar(constraint.grammar))
    if constraint.lark is not None:
        return "lark", _unforced("lark", constraint.lark)
    if constraint.regex is not None:
        wrapped = json.loads(LLMatcher.grammar_from_regex(constraint.regex))
        return "regex", _unforced("regex", wrapped["grammars"][0]["lark_grammar"])
    schema = enforceable(constraint.json_schema)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return "json_schema", _unforced("json_schema", f"start: %json {json.dumps(schema)}\n")


def _unforced(field: str, lark: str) -> str:
    """The grammar with the search for forced text switched off. It is of no use here, and has no end where a grammar
    forces a text without end."""
    options: Any = {}
    if lark.startswith(_OPTIONS):
        line, _, lark = lark.partition("\n")
        try:
            options = json.loads(line.removeprefix(_OPTIONS))
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise RequestError("invalid_request", f"{field}: {_OPTIONS} needs a JSON object on its line", field=field)
    return f"{_OPTIONS} {json.dumps({**options, 'no_forcing': True})}\n{lark}"


def schema_problem(schema: dict[str, Any]) -> str:
    """Why the schema cannot be enforced; "" if it can be."""
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(enforceable(schema)))
    except RequestError as error:
        return error.message
    return " ".join(str(LLMatcher.validate_grammar(grammar)).split())[:_SHOWN]


def check_constraint(constraint: Constraint) -> None:
    """Raises RequestError("invalid_request") unless exactly one form is given, and of the right type."""
    texts = {name: getattr(constraint, name) for name in ("grammar", "lark", "regex")}
    given = [name for name, value in texts.items() if value is not None]
    for name in given:
        if not isinstance(texts[name], str) or not texts[name].strip():
            raise RequestError(
                "invalid_request", f"{name} must be a text that is not empty", f"give {name}", field=name
            )
    if constraint.json_schema is not None:
        given.append("json_schema")
        if not isinstance(constraint.json_schema, (dict, bool)):
            raise RequestError("invalid_request", "json_schema must be a map or a boolean", field="json_schema")
    if len(given) != 1:
        found = ", ".join(given) or "none of them"
        raise RequestError(
            "invalid_request",
            f"a constraint is one of grammar, json_schema, regex and lark, found {found}",
            "give exactly one",
            field="constraint",
        )
