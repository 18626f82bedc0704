"""Chat templates: what they see, what they cannot do, and the tokens that come out."""

from __future__ import annotations

import functools
import time
from datetime import datetime
from typing import Any

import pytest
from vocabularies import path_of

from bloomery.runtime.chat_template import CHATML, ChatTemplate
from bloomery.runtime.errors import RequestError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 1 < 2 & \"3\" > '2'?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "日本語?"},
]
HI = [{"role": "user", "content": "hi"}]


@functools.cache
def opened(name: str) -> tuple[Tokenizer, ChatTemplate]:
    with ModelFile.open(path_of(name)) as model:
        tokenizer = Tokenizer.from_model_file(model)
        return tokenizer, ChatTemplate.from_model_file(model, tokenizer)


def template(text: str, name: str = "qwen2") -> ChatTemplate:
    return ChatTemplate(text, opened(name)[0])


def rendered(text: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return template(text).render(HI if messages is None else messages, **variables)


def failure(text: str, messages: list[dict[str, Any]] | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        rendered(text, messages)
    assert caught.value.code == "invalid_request"
    assert caught.value.hint
    return caught.value.message


def test_the_files_own_template() -> None:
    _, ours = opened("tiny-qwen3moe")
    assert ours.source == "file"
    assert ours.render(CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs 1 < 2 & \"3\" > '2'?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\n日本語?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ours.render(HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_file_without_template_gets_chatml_and_says_so() -> None:
    _, ours = opened("llama-spm")
    assert (ours.source, ours.text) == ("chatml", CHATML)
    assert ours.render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_bos_is_not_doubled() -> None:
    tokenizer, ours = opened("tiny-deepseek2")  # adds BOS, and its template writes it
    assert tokenizer.add_bos
    assert tokenizer.bos is not None
    tokens = ours.render_tokens(CHAT)
    assert tokens.count(tokenizer.bos) == 1
    assert tokens[0] == tokenizer.bos
    assert tokenizer.decode(tokens, special=True) == ours.render(CHAT)
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", tokenizer)  # does not write it
    assert plain.render_tokens(HI) == tokenizer.encode("hi")
    assert plain.render_tokens(HI)[0] == tokenizer.bos
    qwen, chat = opened("tiny-qwen3moe")  # neither adds nor writes
    assert chat.render_tokens(HI) == qwen.encode(chat.render(HI), add_special=False)


def test_special_tokens_are_parsed() -> None:
    tokenizer, ours = opened("tiny-qwen3moe")
    assert ours.render_tokens(HI)[0] == tokenizer.token_id("<|im_start|>")


def test_variables_pass_through() -> None:
    text = "{{bos_token}}|{{eos_token}}|{{ tools|length }}|{{ enable_thinking }}|{{ add_generation_prompt }}|{{ x.y }}"
    answer = rendered(text, tools=[{"type": "function"}], enable_thinking=False, x={"y": 3})
    assert answer == "<|endoftext|>|<|endoftext|>|1|False|True|3"
    assert rendered("{{ tools is defined }}") == "False"


def test_tojson_is_plain_json() -> None:
    value = {"b": ["<é>", "'&'", None, True], "a": 1.5}
    assert rendered("{{ x | tojson }}", x=value) == '{"b": ["<é>", "\'&\'", null, true], "a": 1.5}'
    assert rendered("{{ x | tojson(indent=2, sort_keys=true) }}", x={"b": 1, "a": 2}) == '{\n  "a": 2,\n  "b": 1\n}'
    assert rendered("{{ x | tojson(separators=(',', ':'), ensure_ascii=true) }}", x={"é": 1}) == '{"\\u00e9":1}'


def test_extras_of_chat_templates() -> None:
    assert rendered("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert rendered("{% generation %}a{% endgeneration %}b") == "ab"
    assert rendered("{% if true %}\n  {% set a = 1 %}\nx\n{% endif %}\n") == "x\n"
    assert rendered("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}") == "1/1True"
    assert failure("{{ raise_exception('roles must alternate') }}").endswith(": roles must alternate")


def test_contents_given_as_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rendered("{% for m in messages %}{{ m.content }}{% endfor %}", parts) == "a\nb"
    reads = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    assert rendered(reads, parts) == "(a)(b)"
    assert rendered(reads) == "hi"
    only_parts = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
    assert rendered(only_parts) == "(hi)"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    assert "image_url" in failure("{% for m in messages %}{{ m.content }}{% endfor %}", image)


def test_null_content() -> None:
    show = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert rendered(show, [{"role": "assistant", "content": None}]) == "[]"
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert rendered("{{ messages[0].content is none }}", calls) == "True"


def test_errors_name_the_template_and_the_line() -> None:
    assert "line 2" in failure("a\n{{ messages[0].content.nothing.at_all }}")
    assert "'nowhere' is undefined" in failure("{{ nowhere.x }}")
    assert "line 1: " in failure("{% if %}")  # does not compile: found at the first use, the file still loads
    assert "ZeroDivisionError" in failure("{{ 1 // 0 }}")
    assert "TypeError" in failure("{{ 'a' + 1 }}")


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_reach_nothing_outside(text: str) -> None:
    messages = [dict(message) for message in CHAT]
    failure(text, messages)
    assert messages == CHAT


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 2 ** 100000000 }}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}{{ n.s }}",
        "{% set s %}{% for i in range(9999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}{{ s }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (10 ** 9, 3) }}",
        "{{ '%1000000000d' | format(3) }}",
        "{{ '{:>1000000000}'.format(3) }}",
        "{{ '{:>{}}'.format(3, 10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
    ],
)
def test_runaway_templates_end(text: str) -> None:
    started = time.monotonic()
    failure(text)
    assert time.monotonic() - started < 20.0  # 3 s of its own time at most; the rest is a busy machine


@pytest.mark.parametrize("block", ["{% set s %}BODY{% endset %}{{ s }}", "{% macro s() %}BODY{% endmacro %}{{ s() }}"])
def test_output_is_counted_before_it_is_joined(block: str) -> None:
    """A gigabyte in pieces was held until the end of the block, and refused then."""
    told = failure(block.replace("BODY", "{% for i in range(9999) %}{{ 'a' * 100000 }}{% endfor %}"))
    assert "134217728 characters of output" in str(told)


def test_great_numbers_in_a_conversation_are_no_widths() -> None:
    messages = [{"role": "user", "content": "order %99999999d of {:99999999} on 20261129"}]
    content = "order %99999999d of {:99999999} on 20261129"
    assert rendered("{{ '%s' % messages[0].content }}", messages) == content
    assert rendered("{{ '{}'.format(messages[0].content) }}", messages) == content
    assert rendered("{{ '%d' % 20261129 }}") == "20261129"
    assert rendered("{{ messages[0].content | indent(2) }}", messages) == content
