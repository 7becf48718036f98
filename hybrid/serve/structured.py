"""Structured output: Lark grammars for llguidance (grammars.py) from response formats.

Whitespace between JSON tokens is limited to nothing, one space, or a line break with indent. Without a limit a model
may generate blanks forever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybrid.serve.schemas import LOOSER, check, loosened
from hybrid.serve.wire import ResponseFormat

Shape = tuple[dict[str, Any] | None, bool]
"""The schema of an answer, None for plain text, and whether it is strict."""
WHITESPACE = r"[ ]?|\n {0,16}"


def json_rule(schema: Mapping[str, Any], exact: bool = False, strict: bool = False) -> str:
    """`%json ...`, a rule of a Lark grammar in ASCII. exact: whitespace as json.dumps writes it. strict: make
    unsupported parts of the schema an error instead of ignoring them."""
    if exact:
        options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    else:
        options = {"whitespace_pattern": WHITESPACE}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return "%json " + json.dumps({**schema, "x-guidance": options}, allow_nan=False)


def answer_larks(schema: Mapping[str, Any], strict: bool) -> list[str]:
    """Grammars of a JSON answer with a schema, strictest first."""
    if strict:
        return [f"start: {json_rule(schema, strict=True)}"]
    return [f"start: {json_rule(loosened(schema, way))}" for way in range(LOOSER)]


def schema_of(wanted: ResponseFormat | None, place: str) -> tuple[Shape, list[str]]:
    """The validated schema of a response_format, and the paths that its grammar leaves out. place: its path in the request.
    ApiError 400."""
    if wanted is None or wanted.type == "text":
        return (None, False), []
    if wanted.json_schema is None:
        return ({"type": "object"}, False), []
    schema, strict = wanted.json_schema.schema_, bool(wanted.json_schema.strict)
    left_out = check(schema, place, strict)
    return (dict(schema), strict), left_out
