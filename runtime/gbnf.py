"""GBNF grammars (llama.cpp's notation) read and written again in the notation of llguidance.

Owns the syntax: rules `name ::= ...`, alternatives, groups, repetitions, literals, character classes, `.` and comments.
What a rule that does not lead back to itself describes is one lexeme, so a grammar without recursion keeps exactly its
language. Where a grammar has recursion, its other rules, literals and classes are lexemes that are matched as far as
they go. It does not know tokens or requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from bloomery.runtime.errors import RequestError

MAX_DEPTH = 100  # of groups
MAX_REPEATS = 2000
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class Characters:
    """One character: of `ranges` (first and last code point), or of none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True)
class Literal:
    text: str


@dataclass(frozen=True)
class Reference:
    name: str
    place: int


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    item: Node
    least: int
    most: int | None


Node: TypeAlias = Characters | Literal | Reference | Sequence | Choice | Repeat
Rules: TypeAlias = dict[str, Node]


def lark_grammar(source: str) -> str:
    """The grammar in llguidance's notation. RequestError("invalid_request") that names line and column otherwise."""
    rules = _Parser(source).rules()
    if "root" not in _productive(rules):
        raise RequestError(
            "invalid_request", "grammar: no text satisfies it", "give every rule an end", field="grammar"
        )
    recursive = _recursive(rules)
    names = {name: f"r{index}" if name in recursive else f"R{index}" for index, name in enumerate(sorted(rules))}
    lines = [f"{names[name]}: {_written(node, names)}" for name, node in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines]) + "\n"


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0

    def rules(self) -> Rules:
        rules: Rules = {}
        self._skip(lines=True)
        while self._at < len(self._source):
            place = self._at
            name = self._name()
            self._skip(lines=False)
            self._expect("::=")
            self._skip(lines=True)
            if name in rules:
                self._at = place
                self._fail(f"the rule {name!r} is given twice")
            rules[name] = self._choice(nested=False)
            self._skip(lines=False)
            if self._at < len(self._source) and self._peek() not in "\r\n":
                self._fail("expected the end of the rule")
            self._skip(lines=True)
        if "root" not in rules:
            self._fail("there is no rule named 'root'")
        for node in rules.values():
            for reference in _references(node):
                if reference.name not in rules:
                    self._at = reference.place
                    self._fail(f"there is no rule named {reference.name!r}")
        return rules

    def _fail(self, message: str) -> NoReturn:
        line = self._source.count("\n", 0, self._at) + 1
        column = self._at - self._source.rfind("\n", 0, self._at)
        raise RequestError(
            "invalid_request",
            f"grammar, line {line}, column {column}: {message}",
            "correct the GBNF grammar",
            field="grammar",
        )

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _expect(self, text: str) -> None:
        if not self._source.startswith(text, self._at):
            self._fail(f"expected {text!r}")
        self._at += len(text)

    def _skip(self, lines: bool) -> None:
        """Blanks and comments, and ends of lines too if `lines`."""
        while (char := self._peek()) and (char in " \t" or char == "#" or (lines and char in "\r\n")):
            if char == "#":
                while self._peek() and self._peek() not in "\r\n":
                    self._at += 1
            else:
                self._at += 1

    def _name(self) -> str:
        found = _NAME.match(self._source, self._at)
        if not found:
            self._fail("expected the name of a rule")
        self._at = found.end()
        return found.group()

    def _choice(self, nested: bool) -> Node:
        items = [self._sequence(nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip(lines=True)
            items.append(self._sequence(nested))
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        while True:
            char = self._peek()
            if char == '"':
                items.append(self._literal())
            elif char == "[":
                items.append(self._characters())
            elif char == "(":
                items.append(self._group())
            elif char == ".":
                self._at += 1
                items.append(Characters((), negated=True))
            elif char and _NAME.match(char):
                place = self._at
                items.append(Reference(self._name(), place))
            elif char and char in "*+?{":
                if not items:
                    self._fail(f"{char!r} has nothing to repeat")
                items[-1] = self._repeat(items[-1])
            elif char in ("<", "!"):
                self._fail("token references are not supported; write the token's text")
            else:
                return items[0] if len(items) == 1 else Sequence(tuple(items))
            self._skip(lines=nested)

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep")
        self._at += 1
        self._skip(lines=True)
        node = self._choice(nested=True)
        self._expect(")")
        self._depth -= 1
        return node

    def _repeat(self, item: Node) -> Node:
        char = self._peek()
        if char != "{":
            self._at += 1
            return Repeat(item, 1 if char == "+" else 0, 1 if char == "?" else None)
        found = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}").match(self._source, self._at)
        if not found or not (found[1] or found[3]):
            self._fail("expected {n}, {n,}, {,n} or {m,n}")
        least = int(found[1][:9] or 0)
        most = int(found[3][:9]) if found[3] else None if found[2] else least
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            self._fail(f"repetitions must be at most {MAX_REPEATS}, and the second number not less than the first")
        self._at = found.end()
        return Repeat(item, least, most)

    def _character(self) -> int:
        char = self._peek()
        if not char or char in "\r\n":
            self._fail("the line ends inside a literal or class")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        self._at += 1
        if kind in _ESCAPES and kind:
            return ord(_ESCAPES[kind])
        digits = self._source[self._at : self._at + _HEX.get(kind, 0)]
        if not digits or len(digits) < _HEX[kind] or not re.fullmatch("[0-9a-fA-F]+", digits):
            self._at -= 2
            self._fail(f"unknown escape sequence \\{kind}{digits}")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._fail(f"\\{kind}{digits} is no character")
        return code

    def _literal(self) -> Node:
        self._at += 1
        codes = []
        while self._peek() != '"':
            codes.append(self._character())
        self._at += 1
        return Literal("".join(map(chr, codes)))

    def _characters(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            first = last = self._character()
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character()
            if last < first:
                self._fail("a range ends before it begins")
            ranges.append((first, last))
        if not ranges and not negated:
            self._fail("a class without characters matches nothing")
        self._at += 1
        return Characters(tuple(ranges), negated)


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence(items) | Choice(items):
            return items
        case Repeat(item):
            return (item,)
    return ()


def _references(node: Node) -> Iterable[Reference]:
    if isinstance(node, Reference):
        yield node
    for child in _children(node):
        yield from _references(child)


def _recursive(rules: Rules) -> set[str]:
    """The rules that can reach a rule which reaches itself."""
    direct = {name: {reference.name for reference in _references(node)} for name, node in rules.items()}
    regular: set[str] = set()
    while found := {name for name, used in direct.items() if name not in regular and used <= regular}:
        regular |= found
    return set(rules) - regular


def _productive(rules: Rules) -> set[str]:
    """The rules that some text satisfies."""
    found: set[str] = set()
    while new := {name for name, node in rules.items() if name not in found and _has_text(node, found)}:
        found |= new
    return found


def _has_text(node: Node, productive: set[str]) -> bool:
    match node:
        case Reference(name):
            return name in productive
        case Sequence(items):
            return all(_has_text(item, productive) for item in items)
        case Choice(items):
            return any(_has_text(item, productive) for item in items)
        case Repeat(item, least):
            return least == 0 or _has_text(item, productive)
    return True


def _written(node: Node, names: dict[str, str]) -> str:
    match node:
        case Reference(name):
            return names[name]
        case Literal(text):
            return f"/{''.join(_escaped(ord(char)) for char in text)}/" if text else '""'
        case Characters(ranges, negated):
            if not ranges:
                return "/(?s:.)/"
            inside = "".join(
                _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}" for first, last in ranges
            )
            return f"/[{'^' if negated else ''}{inside}]/"
        case Sequence(items):
            return "(" + " ".join(_written(item, names) for item in items) + ")" if items else '""'
        case Choice(items):
            return "(" + " | ".join(_written(item, names) for item in items) + ")"
        case Repeat(item, least, most):
            bounds = f"{{{least},{'' if most is None else most}}}"
            short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most), bounds)
            return f"({_written(item, names)}){short}"


def _escaped(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"
