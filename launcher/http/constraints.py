"""What a request asks of the form of the answer: grammar, JSON schema, response_format.

Owns reading and refusing; the constraint itself is enforced where tokens are chosen.
"""

from __future__ import annotations

from typing import Any

from bloomery.launcher.http.errors import invalid
from bloomery.launcher.http.fields import shown, string
from bloomery.runtime.requests import Constraint

RESPONSE_TYPES = ("text", "json_object", "json_schema")


def read_constraint(body: dict[str, Any]) -> Constraint | None:
    """The constraint of a request, None if there is none. Raises RequestError for what makes no sense as one; whether
    it can be enforced the daemon finds out."""
    grammar = string(body, "grammar")
    schema = body.get("json_schema")
    response = body.get("response_format")
    if grammar and schema is not None:
        raise invalid("Cannot use both json_schema and grammar", field="grammar")
    if response is not None:
        if not isinstance(response, dict) or response.get("type", "text") not in RESPONSE_TYPES:
            names = ", ".join(RESPONSE_TYPES)
            raise invalid(
                f"response_format must have a type of {names}, found {shown(response)}", field="response_format"
            )
        kind = response.get("type", "text")
        if kind == "json_object":
            schema = response.get("schema", schema if schema is not None else {})
        elif kind == "json_schema":
            wrapper = response.get("json_schema")
            if not isinstance(wrapper, dict):
                raise invalid("response_format.json_schema must be an object", field="response_format")
            schema = wrapper.get("schema", {})
    if schema is not None and not isinstance(schema, (dict, bool)):
        raise invalid(f"a JSON schema must be an object, found {shown(schema)}", field="json_schema")
    if schema is not None:
        return Constraint(json_schema=schema if schema != {} else {"type": "object"})
    return Constraint(grammar=grammar) if grammar else None
