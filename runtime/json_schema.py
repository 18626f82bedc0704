"""JSON schemas made ready for llguidance: what it would refuse without need is put in words that it enforces.

Owns one rewriting, which never changes what a schema allows: `oneOf` becomes `anyOf` where no two alternatives have a
value in common. And it refuses what llguidance would pass over in silence. It does not know grammars or tokens.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from bloomery.runtime.errors import RequestError

MAX_DEPTH = 64
_IGNORED = ("contentEncoding", "contentMediaType", "contentSchema")  # read by llguidance, not enforced
_VALUES = ("enum", "const", "default", "examples")  # hold values, not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # hold names of schemas


def enforceable(schema: Any) -> Any:
    """The schema for llguidance. RequestError("invalid_request") that names the place of what is not supported."""
    return _rewritten(schema, schema, "json_schema", 0)


def _rewritten(schema: Any, root: Any, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError("invalid_request", f"{path}: nested more than {MAX_DEPTH} levels deep", field="json_schema")
    if isinstance(schema, list):
        return [_rewritten(item, root, f"{path}[{index}]", depth + 1) for index, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    new: dict[str, Any] = {}
    for key, value in schema.items():
        where = f"{path}.{key}"
        if key in _IGNORED:
            raise RequestError("invalid_request", f"{where} is not supported", f"leave out {key}", field="json_schema")
        if key in _VALUES or (key == "uniqueItems" and value is False):
            if key in ("enum", "const"):
                new[key] = value
        elif key in _NAMED and isinstance(value, dict):
            new[key] = {name: _rewritten(item, root, f"{where}.{name}", depth + 1) for name, item in value.items()}
        else:
            new[key] = _rewritten(value, root, where, depth + 1)
    alternatives = new.get("oneOf")
    if isinstance(alternatives, list) and "anyOf" not in new and _all_disjoint(alternatives, root):
        new["anyOf"] = new.pop("oneOf")
    return new


def _all_disjoint(alternatives: list[Any], root: Any) -> bool:
    targets = [_target(schema, root) for schema in alternatives]
    return all(disjoint(left, right, root) for left, right in itertools.combinations(targets, 2))


def _target(schema: Any, root: Any) -> Any:
    """What a local reference leads to; the schema itself if it is none."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return None


def disjoint(left: Any, right: Any, root: Any) -> bool:
    """Whether no value satisfies both, as far as can be seen: other types, other listed values, or objects that must
    have a property of which that is true."""
    if not isinstance(left, dict) or not isinstance(right, dict):
        return False
    left_types, right_types = _types(left), _types(right)
    if left_types and right_types and not left_types & right_types:
        return True
    left_values, right_values = _values(left), _values(right)
    if left_values is not None and right_values is not None:
        return not left_values & right_values
    if left_types == right_types == {"object"}:
        shared = set(left.get("required", ())) & set(right.get("required", ()))
        pairs = ((left.get("properties", {}).get(name), right.get("properties", {}).get(name)) for name in shared)
        return any(disjoint(_target(one, root), _target(other, root), root) for one, other in pairs)
    return False


def _types(schema: dict[str, Any]) -> set[str]:
    """The JSON types it allows; empty if it does not say. An integer is a number."""
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    values = _values(schema)
    if not types and values is not None:
        types = {_type_of(json.loads(value)) for value in values}
    return {"number" if name == "integer" else name for name in types}


def _type_of(value: Any) -> str:
    names = {bool: "boolean", type(None): "null", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The listed values, in one spelling each; None if there is no list."""
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if isinstance(schema.get("enum"), list):
        return {json.dumps(value, sort_keys=True) for value in schema["enum"]}
    return None
