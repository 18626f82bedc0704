"""Types of the fields of a message body, and schemas made of them: checking that never trusts the sender.

Owns type checks whose errors name the field, what was expected and what was found. It does not know which messages
exist (`messages.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from bloomery.runtime.errors import RequestError

REQUIRED: Final = object()
MAX_ITEMS = 1 << 22


def refuse(path: str, expected: str, found: Any) -> NoReturn:
    """Raises RequestError("invalid_request") about one field."""
    text = repr(found) if isinstance(found, (int, float, str)) else type(found).__name__
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise RequestError("invalid_request", f"field {path}: expected {expected}, found {shown}", field=path)


@dataclass(frozen=True)
class FieldType:
    """`label` is what the documentation calls the type; `read(value, path)` returns the checked value or refuses."""

    label: str
    read: Callable[[Any, str], Any]


@dataclass(frozen=True)
class Field:
    """A field of a body. Without a default it must be present."""

    name: str
    type: FieldType
    default: Any = REQUIRED


@dataclass(frozen=True)
class Schema:
    """The fields of one body or record. Unknown fields are ignored; missing ones take their default."""

    name: str
    fields: tuple[Field, ...]

    def read(self, body: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(body, dict):
            refuse(path or self.name, "a map", body)
        values: dict[str, Any] = {}
        for field in self.fields:
            where = f"{path}.{field.name}" if path else field.name
            if field.name in body:
                values[field.name] = field.type.read(body[field.name], where)
            elif field.default is REQUIRED:
                raise RequestError(
                    "invalid_request", f"field {where}: missing, expected {field.type.label}", field=where
                )
            else:
                values[field.name] = field.default
        return values


def integer(low: int, high: int) -> FieldType:
    def read(value: Any, path: str) -> int:
        if type(value) is not int or not low <= value <= high:
            refuse(path, f"an integer from {low} to {high}", value)
        return value

    return FieldType("int", read)


def number(low: float = -math.inf, high: float = math.inf) -> FieldType:
    """A finite float in [low, high]; integers are accepted."""
    limits = "a finite number" if low == -math.inf and high == math.inf else f"a number from {low:g} to {high:g}"

    def read(value: Any, path: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            refuse(path, limits, value)
        return float(value)

    return FieldType("float", read)


def any_float() -> FieldType:
    """A float that may be infinite (the log-probability of an excluded token) but not NaN."""

    def read(value: Any, path: str) -> float:
        if type(value) not in (int, float) or math.isnan(value):
            refuse(path, "a number", value)
        return float(value)

    return FieldType("float", read)


def text() -> FieldType:
    def read(value: Any, path: str) -> str:
        if not isinstance(value, str):
            refuse(path, "a string", value)
        return value

    return FieldType("str", read)


def binary() -> FieldType:
    def read(value: Any, path: str) -> bytes:
        if not isinstance(value, bytes):
            refuse(path, "binary", value)
        return value

    return FieldType("bin", read)


def flag() -> FieldType:
    def read(value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            refuse(path, "true or false", value)
        return value

    return FieldType("bool", read)


def choice(*names: str) -> FieldType:
    listed = ", ".join(f'"{name}"' for name in names)

    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in names:
            refuse(path, f"one of {listed}", value)
        return value

    return FieldType("str", read)


def nullable(inner: FieldType) -> FieldType:
    return FieldType(f"{inner.label} or nil", lambda value, path: None if value is None else inner.read(value, path))


def array(inner: FieldType, limit: int = MAX_ITEMS) -> FieldType:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > limit:
            refuse(path, f"an array of at most {limit} x {inner.label}", value)
        return tuple(inner.read(item, f"{path}[{index}]") for index, item in enumerate(value))

    return FieldType(f"[{inner.label}]", read)


def token_array() -> FieldType:
    """An array of token ids; checked without a Python call an item, because prompts are long."""
    single = integer(0, 2**31 - 1)

    def read(value: Any, path: str) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            refuse(path, f"an array of at most {MAX_ITEMS} x int", value)
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**31):
            for index, item in enumerate(value):
                single.read(item, f"{path}[{index}]")
        return tuple(value)

    return FieldType("[int]", read)


def pair(first: FieldType, second: FieldType) -> FieldType:
    label = f"[{first.label}, {second.label}]"

    def read(value: Any, path: str) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            refuse(path, f"an array {label}", value)
        return first.read(value[0], f"{path}[0]"), second.read(value[1], f"{path}[1]")

    return FieldType(label, read)


def mapping() -> FieldType:
    """A map whose values are not looked into; `protocol.unpack_body` has made sure that they are plain."""

    def read(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(path, "a map", value)
        return value

    return FieldType("map", read)


def schema_value() -> FieldType:
    """A JSON schema: a map, whose values are not looked into, or a boolean."""

    def read(value: Any, path: str) -> dict[str, Any] | bool:
        if not isinstance(value, (dict, bool)):
            refuse(path, "a map or a boolean", value)
        return value

    return FieldType("map or bool", read)


def anything() -> FieldType:
    return FieldType("any", lambda value, path: value)


def record(schema: Schema) -> FieldType:
    return FieldType(f"map {schema.name}", schema.read)
