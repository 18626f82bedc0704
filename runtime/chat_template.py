"""The chat template of a model file: messages to the text that the model was trained on.

Owns the sandbox in which templates run: they are programs of strangers, so they reach nothing outside, and loops, time
and sizes are bounded. Knows nothing of requests and engines.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bloomery.runtime.deepseek_template import chat_template_text
from bloomery.runtime.errors import RequestError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MAX_SECONDS = 3.0
MAX_STEPS = 2_000_000  # loop passes and calls of one rendering
MAX_SIZE = 1 << 25  # characters of a text, elements of a list
MAX_OUTPUT = 4 * MAX_SIZE  # characters put out in one rendering, those that `set` blocks and macros take up included
MAX_WIDTH = 10_000  # of padding, indentation and the like
MAX_BITS = 1 << 16  # of a whole number
PADDING = ("ljust", "rjust", "center", "zfill", "expandtabs")

_NEEDLE = "bloomery-probe"


class ChatTemplate:
    """A compiled template; threads may share one. `source` is "chatml" if the file has none: a guess to warn about."""

    def __init__(self, text: str | None, tokenizer: Tokenizer) -> None:
        self.source: Literal["file", "chatml"] = "chatml" if text is None else "file"
        self.text = CHATML if text is None else text
        self._tokenizer = tokenizer
        self._bos, self._eos = _shown(tokenizer, tokenizer.bos), _shown(tokenizer, tokenizer.eos)
        self._environment = _Environment()
        self._broken = ""
        try:
            self._template = self._environment.from_string(self.text)
        except TemplateSyntaxError as error:  # the file still serves requests that bring text or tokens
            self._broken = f"line {error.lineno}: {error.message}"
        except Exception as error:  # e.g. an expression nested too deeply to compile
            self._broken = f"{type(error).__name__}: {error}"

    @classmethod
    def from_model_file(cls, model: ModelFile, tokenizer: Tokenizer) -> ChatTemplate:
        model.key("tokenizer.chat_template", str, "")  # its type is checked
        return cls(chat_template_text(model) or None, tokenizer)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as text, BOS included where the template writes it.

        The template sees `messages` (contents given as parts become plain text, unless it handles parts itself),
        `add_generation_prompt`, `bos_token`, `eos_token` and every one of `variables` (tools, enable_thinking, ...).
        Tokenise the text with special tokens parsed, and with BOS added only if it does not begin with it: that is what
        `render_tokens` does. RequestError("invalid_request") for whatever goes wrong in the template.
        """
        if self._broken:
            self._fail(f"the chat template cannot be used: {self._broken}")
        return self._run(
            {
                "bos_token": self._bos,
                "eos_token": self._eos,
                **variables,
                "messages": [self._adapted(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def render_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of the rendered conversation. Where the file says that texts get a BOS (EOS) and the template
        writes one too, there is still only one, as in llama-server."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        if self._tokenizer.add_bos:
            text = text.removeprefix(self._bos)
        if self._tokenizer.add_eos:
            text = text.removesuffix(self._eos)
        return self._tokenizer.encode(text, add_special=True, parse_special=True)

    def _run(self, variables: dict[str, Any], share: float = 1.0) -> str:
        """The rendered template; it may use `share` of the time that a template has."""
        try:
            with self._environment.bounded(share * MAX_SECONDS):
                return self._template.render(variables)
        except _Refusal as error:
            self._fail(f"the chat template refuses the conversation: {error}")
        except (Exception, RecursionError) as error:
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            line = _template_line(error.__traceback__)
            self._fail(f"the chat template failed{f' in line {line}' if line else ''}: {reason}")

    def _fail(self, message: str) -> NoReturn:
        hint = "change the messages or template variables, or send the prompt as text"
        raise RequestError("invalid_request", message, hint) from None

    def _adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """`message` with its content in the form that the template handles."""
        content = message.get("content")
        if isinstance(content, (list, tuple)) and not self._handles_parts:
            return {**message, "content": "\n".join(_part_text(part) for part in content)}
        if isinstance(content, str) and not self._handles_text and self._handles_parts:
            return {**message, "content": [{"type": "text", "text": content}]}
        if content is None and "content" in message and not message.get("tool_calls"):
            return {**message, "content": ""}
        return dict(message)

    @cached_property
    def _handles_text(self) -> bool:
        """Whether the template shows contents that are text. Found out by trying, once."""
        return _NEEDLE in self._tried(_NEEDLE)

    @cached_property
    def _handles_parts(self) -> bool:
        """Whether the template reads contents that are lists of parts, instead of printing the list."""
        content = [{"type": "text", "text": _NEEDLE}]
        shown = self._tried(content)
        return _NEEDLE in shown and str(content) not in shown

    def _tried(self, content: Any) -> str:
        """A conversation of one message with this content, rendered; nothing if that fails."""
        variables = {
            "bos_token": self._bos,
            "eos_token": self._eos,
            "messages": [{"role": "user", "content": content}],
            "add_generation_prompt": False,
        }
        try:
            return self._run(variables, share=0.1)
        except RequestError:
            return ""


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        "invalid_request", f"a message has a content part of type {kind!r}, expected text", "this model reads text only"
    )


def _shown(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")


def _template_line(traceback: TracebackType | None) -> int:
    """Line of the template in which the error arose; 0 if outside."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


class _Refusal(TemplateError):
    """Raised by the template itself, through raise_exception."""


class _Budget:
    """What one rendering may still do. A context manager that makes itself the thread's current budget."""

    def __init__(self, current: threading.local, seconds: float) -> None:
        self._current = current
        self._steps = self._output = 0
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} loop passes and calls")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"not done after {self._seconds:g} s")

    def output(self, size: int) -> None:
        """Pieces are held until their block ends; what they come to is known before."""
        self._output += size
        if self._output > MAX_OUTPUT:
            raise SecurityError(f"more than {MAX_OUTPUT} characters of output")

    def __enter__(self) -> None:
        self._outer = getattr(self._current, "budget", None)
        self._current.budget = self

    def __exit__(self, *_: object) -> None:
        self._current.budget = self._outer


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with bounds.

    Every loop and call counts a step; every operation that can make a value much greater than its operands is checked
    before (repetition, powers, padding) or after it (concatenation: at most the sum).
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], autoescape=False
        )
        self._current = threading.local()
        self.concat = _concatenated  # type: ignore[method-assign]  # joins the output of templates and macros
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _tojson
        for name in ("center", "indent", "batch", "slice"):
            self.filters[name] = _narrow(self.filters[name])
        del self.filters["format"]  # it would pass by the check of the % operator

    def bounded(self, seconds: float) -> _Budget:
        return _Budget(self._current, seconds)

    def bounded_iteration(self, items: Iterable[Any]) -> Iterator[Any]:
        budget: _Budget = self._current.budget
        for item in items:
            budget.step()
            yield item

    def bounded_text(self, text: Any) -> Any:
        _check_size(len(text))
        return text

    def counted_output(self, value: Any) -> Any:
        if isinstance(value, str):
            self._current.budget.output(len(value))
        return value

    def _generate(self, source: nodes.Template, *arguments: Any, **keywords: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = _calling("bounded_iteration", loop.iter)
        _wrap_concatenations(source)
        for output in list(source.find_all(nodes.Output)):
            output.nodes = [
                piece if isinstance(piece, nodes.TemplateData) else _calling("counted_output", piece)
                for piece in output.nodes
            ]
        return super()._generate(source, *arguments, **keywords)

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **keywords: Any) -> Any:
        self = __self
        self._current.budget.step()
        if getattr(__obj, "__name__", "") in PADDING and isinstance(getattr(__obj, "__self__", None), (str, bytes)):
            _check_width(arguments, keywords)
        return super().call(__context, __obj, *arguments, **keywords)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is not None:
            _check_format(value.__self__, r"\{[^{}]*\{")  # a width that is itself an argument
        return formatter

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sized = (str, bytes, list, tuple)
        if operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, sized) and isinstance(count, int):
                    _check_size(len(items) * count)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise SecurityError(f"a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(str(left), r"%[^a-zA-Z%]*\*")
        elif operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            _check_size(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            raise SecurityError(f"a number of more than {MAX_BITS} bits")
        return result


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks what training scores; for us just its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _calling(name: str, argument: nodes.Node) -> nodes.Call:
    assert isinstance(argument, nodes.Expr)
    call = nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None)
    return call.set_lineno(argument.lineno)  # type: ignore[return-value]


def _wrap_concatenations(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            _wrap_concatenations(value)
            if isinstance(value, nodes.Concat):
                setattr(node, name, _calling("bounded_text", value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _wrap_concatenations(item)
                    if isinstance(item, nodes.Concat):
                        value[index] = _calling("bounded_text", item)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"a value of more than {MAX_SIZE} characters or elements")


def _check_width(arguments: Iterable[Any], keywords: Mapping[str, Any]) -> None:
    """Refuses a width among the arguments before something is padded to it."""
    if any(isinstance(value, int) and value > MAX_WIDTH for value in (*arguments, *keywords.values())):
        raise SecurityError(f"a width of more than {MAX_WIDTH}")


def _check_format(text: str, indirect: str) -> None:
    """Refuses a format whose fields may be wider than MAX_WIDTH: by a number in it, or `indirect`ly by an argument."""
    widths = re.findall(r"[%{][^%{}a-zA-Z]*?(\d{5,})", text)
    if re.search(indirect, text) or any(len(digits) > 9 or int(digits) > MAX_WIDTH for digits in widths):
        raise SecurityError(f"a width of more than {MAX_WIDTH}, or one that is an argument")


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any, **keywords: Any) -> Any:
        _check_width(arguments, keywords)
        return function(*arguments, **keywords)

    checked.__dict__.update(function.__dict__)  # Jinja's marks of what it passes
    return checked


def _concatenated(parts: Iterable[str]) -> str:
    pieces = list(parts)
    _check_size(sum(map(len, pieces)))
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    """The local time, by `strftime`."""
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which models have not seen."""
    _check_width((indent or 0,), {})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
