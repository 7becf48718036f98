"""Structured output: what an answer must look like, as Lark grammars for llguidance (grammars.py).

Whitespace between JSON's tokens is bounded: nothing, one space, or a new line with its indent. Without a bound a model
that has begun to write blanks may go on for ever, since every further one is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybrid.serve.schemas import LOOSER, check, loosened
from hybrid.serve.wire import ResponseFormat

WHITESPACE = r"[ ]?|\n {0,16}"


def json_rule(schema: Mapping[str, Any], exact: bool = False, strict: bool = False) -> str:
    """`%json ...`, as a rule of a Lark grammar; ASCII. exact: whitespace as json.dumps writes it. strict: an error
    where a part of the schema cannot be followed, which is left out otherwise."""
    if exact:
        options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    else:
        options = {"whitespace_pattern": WHITESPACE}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return "%json " + json.dumps({**schema, "x-guidance": options}, allow_nan=False)


def answer_larks(schema: Mapping[str, Any], strict: bool) -> list[str]:
    """Grammars of an answer that is JSON of a schema, the closest first."""
    if strict:
        return [f"start: {json_rule(schema, strict=True)}"]
    return [f"start: {json_rule(loosened(schema, way))}" for way in range(LOOSER)]


def schema_of(wanted: ResponseFormat | None, place: str) -> tuple[dict[str, Any] | None, bool]:
    """The JSON schema that a response_format asks for, checked, and whether it is to be followed whole; None for plain
    text. ApiError 400. place: of the schema in the request."""
    if wanted is None or wanted.type == "text":
        return None, False
    if wanted.json_schema is None:
        return {"type": "object"}, False
    schema, strict = wanted.json_schema.schema_, bool(wanted.json_schema.strict)
    check(schema, place, strict)
    return dict(schema), strict
