"""Languages of constraints: what GBNF and JSON schemas mean token by token, and what is refused with which words.

Planted once and seen to fail: GBNF classes not negated, repetitions without a bound. What is generated under a
constraint is `test_constraint`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_data import trained_file

from bloomery.runtime.constraint import ConstraintCompiler
from bloomery.runtime.errors import RequestError
from bloomery.runtime.gbnf import lark_grammar
from bloomery.runtime.json_schema import enforceable
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.requests import Constraint
from bloomery.runtime.tokenizer import Tokenizer


@functools.cache
def tokenizer() -> Tokenizer:
    with ModelFile.open(trained_file("tiny-qwen3moe-Q4_K_M")) as model:
        return Tokenizer.from_model_file(model)


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer())


def accepts(compiler: ConstraintCompiler, constraint: Constraint, text: str) -> bool:
    """Whether the text, token by token, may be said and may end."""
    state = compiler.start(constraint)
    for token in tokenizer().encode(text, add_special=False, parse_special=False):
        if not state.allows(token):
            return False
        state.accept(token)
    return state.allows(min(tokenizer().end_tokens))


def refused(constraint: Constraint, compiler: ConstraintCompiler) -> RequestError:
    with pytest.raises(RequestError) as caught:
        compiler.start(constraint)
    assert caught.value.code == "invalid_request"
    return caught.value


GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('root ::= [a-z]* "x"', ["x", "abcx", "xx"], ["", "abc", "Ax"]),
    ('root ::= "a"?', ["", "a"], ["aa"]),
    ('root ::= "(" root ")" | [a-z/\\"]+', ["a", '((a/"))'], ["(a", "()", "A"]),
    ("root ::= . .", ["\né", "ab"], ["a", "abc"]),
    ('root ::= [^\\n\\]] "\\U0001F600" "\\x41\\u00e9"', ["x😀Aé"], ["]😀Aé", "\n😀Aé"]),
    ('root ::= "a"{2} "b"{1,2} "c"{2,} "d"{,1}', ["aabcc", "aabbcccd"], ["abcc", "aabbbcc", "aabc", "aabccdd"]),
    ('root ::= a | # one\n  b\na ::= (\n  "x"\n  "y" )\nb ::= [0-9-]', ["xy", "5", "-"], ["x", "y"]),
    ('root ::= (("ab" | "a") "b")+ ""', ["ab", "abb", "abab"], ["a", "b"]),
]


@pytest.mark.parametrize("source, good, bad", GRAMMARS, ids=lambda value: str(value)[:30])
def test_gbnf_means_what_it_says(compiler: ConstraintCompiler, source: str, good: list[str], bad: list[str]) -> None:
    constraint = Constraint(grammar=source)
    assert [text for text in good if not accepts(compiler, constraint, text)] == []
    assert [text for text in bad if accepts(compiler, constraint, text)] == []


BAD_GRAMMARS = [
    ("root ::= x", "line 1, column 10: there is no rule named 'x'"),
    ('top ::= "a"', "there is no rule named 'root'"),
    ('root ::= "a"\n\nroot ::= "b"', "line 3, column 1: the rule 'root' is given twice"),
    ("root := 1", "line 1, column 6: expected '::='"),
    ('root ::= "a', "line ends inside a literal"),
    ("root ::= [b-a]", "a range ends before it begins"),
    ("root ::= []", "matches nothing"),
    ("root ::= *", "'*' has nothing to repeat"),
    ('root ::= ("a"', "expected ')'"),
    ('root ::= "a" )', "expected the end of the rule"),
    ('root ::= "a"{3,1}', "second number not less"),
    ('root ::= "a"{9999999999999}', "at most 2000"),
    ('root ::= "a"{x}', "expected {n}"),
    ('root ::= "\\q"', "unknown escape sequence \\q"),
    ('root ::= "\\ud800"', "is no character"),
    ("root ::= <[5]>", "token references are not supported"),
    ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested more than 100 deep"),
    ("root ::= root", "no text satisfies"),
    ('root ::= "a" b\nb ::= "c" root | b', "no text satisfies"),
]


@pytest.mark.parametrize("source, message", BAD_GRAMMARS, ids=lambda value: str(value)[:30])
def test_bad_gbnf_is_refused_with_its_place(compiler: ConstraintCompiler, source: str, message: str) -> None:
    error = refused(Constraint(grammar=source), compiler)
    assert message in error.message and error.details["field"] == "grammar"


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='root :=()[]"|*+?{},.\\-^a1\n#', max_size=40))
def test_no_text_breaks_the_gbnf_reader(text: str) -> None:
    for source in (text, "root ::= " + text):
        try:
            lark_grammar(source)
        except RequestError as error:
            assert error.code == "invalid_request"


REFUSED: list[tuple[Any, str]] = [
    (False, "schema is false"),
    ({"type": "foo"}, "Invalid type: foo"),
    ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    ({"if": {}, "then": {}}, "Unimplemented keys"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"$ref": "#/nope"}, "/nope"),
    ({"$ref": "http://localhost/x"}, "http://localhost/x"),
    ({"enum": []}, "anyOf is empty"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "^a{3}$", "maxLength": 2}, "Unsatisfiable"),
    ({"type": "string", "format": "hostnamex"}, "Unknown format: hostnamex"),
    (
        {"type": "object", "properties": {"a": {"contentEncoding": "base64"}}},
        "json_schema.properties.a.contentEncoding",
    ),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a'"),
    ({"type": "object", "minProperties": 2, "properties": {"a": {}}}, "minProperties"),
]


@pytest.mark.parametrize("schema, message", REFUSED, ids=lambda value: str(value)[:40])
def test_schemas_that_cannot_be_enforced_are_refused(compiler: ConstraintCompiler, schema: Any, message: str) -> None:
    error = refused(Constraint(json_schema=schema), compiler)
    assert message in error.message or ("axProperties" in error.message and "minP" in message)
    assert error.details["field"] == "json_schema" and "llguidance" not in error.message


SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    ({}, ["1", '[1, {"a": null}]', '"x"'], ["x", "[1,]", "[1,   2]"]),
    ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, ["[1,1]", "[]"], ['["a"]']),
    ({"oneOf": [{"const": 1}, {"const": "b"}]}, ["1", '"b"'], ["2"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["12", '"b"'], ["null"]),
    ({"const": {"oneOf": [1]}}, ['{"oneOf": [1]}'], ["1"]),
    (
        {"properties": {"default": {"type": "integer"}}, "required": ["default"]},
        ['{"default": 1}'],
        ['{"default": "a"}'],
    ),
    (
        {
            "$defs": {
                "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
            },
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        },
        ['{"kind": "cat"}', '{"kind": "dog"}'],
        ['{"kind": "cow"}', "{}"],
    ),
    (
        {
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
            "$ref": "#/$defs/node",
        },
        ["{}", '{"next": {"next": {}}}'],
        ['{"next": 1}'],
    ),
]


@pytest.mark.parametrize("schema, good, bad", SCHEMAS, ids=lambda value: str(value)[:40])
def test_schemas_mean_what_they_say(compiler: ConstraintCompiler, schema: Any, good: list[str], bad: list[str]) -> None:
    constraint = Constraint(json_schema=schema)
    assert [text for text in good if not accepts(compiler, constraint, text)] == []
    assert [text for text in bad if accepts(compiler, constraint, text)] == []


def test_one_of_stays_where_alternatives_overlap() -> None:
    overlapping = [
        [{"type": "integer"}, {"type": "number"}],
        [{"enum": [1, 2]}, {"enum": [2, 3]}],
        [{"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object", "properties": {"a": {"const": 2}}}],
        [{}, {"type": "string"}],
        [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 5}],
    ]
    for alternatives in overlapping:
        assert "oneOf" in enforceable({"oneOf": alternatives})
    deep: Any = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested more than 64"):
        enforceable(deep)


@pytest.mark.parametrize(
    "constraint, message",
    [
        (Constraint(), "one of grammar, json_schema, regex and lark, found none"),
        (Constraint(regex="a", grammar="b"), "found grammar, regex"),
        (Constraint(regex=" "), "regex must be a text that is not empty"),
        (Constraint(regex="(a"), "regex: "),
        (Constraint(lark="start: nothing"), "lark: "),
        (Constraint(lark="start: /a/\nx: ?"), "lark: line 2, column 4: "),
        (Constraint(lark="start: @"), "lark: "),
        (Constraint(lark="start: start"), "lark: no text satisfies it"),
        (Constraint(lark="%llguidance 5\nstart: /a/"), "lark: %llguidance needs a JSON object"),
    ],
)
def test_other_mistakes_are_named(compiler: ConstraintCompiler, constraint: Constraint, message: str) -> None:
    assert message in refused(constraint, compiler).message
