"""Validate JSON schemas of requests: their structure and size, and keywords that no grammar supports, which are ignored
or refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybrid.serve.errors import ApiError, bad_request

DEPTH = 100
"""Most nested schemas, references included."""
REFERENCES = 1000
PARTS = 20_000
"""Most subschemas."""
ALTERNATIVES = 1000
"""Most schemas of an anyOf, oneOf or allOf."""
VALUES = 20_000
"""Most values of all enums."""

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_LOGIC = ("not", "if", "then", "else")
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", *_LOGIC, "contains", "propertyNames", *_UNEVALUATED)
_TEXTS = ("$ref", "pattern", "format")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_CONTAINED = ("contains", "minContains", "maxContains", "uniqueItems", "propertyNames")
_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_NOT_FOLLOWED = (*_LOGIC, *_UNEVALUATED, *_CONTAINED, *_DEPENDENT, "$dynamicRef", "$recursiveRef")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_OF_OBJECTS = ("properties", "required", "additionalProperties")
_STRUCTURE = ("type", "enum", "const", "items", "$ref", "$defs", "definitions", *_OF_OBJECTS, *_LISTS)
_NO_AUTOMATON = re.compile(r"\(\?<?[=!]|\\[1-9bB]|\(\?P?=")
"""Unsupported pattern syntax: look-around, back-references, word boundaries."""


def check(schema: Mapping[str, Any], place: str, strict: bool = False) -> list[str]:
    """Check a schema's structure and size. strict: also that grammars support all of it; else the paths of what they leave
    out are returned. ApiError 400 gives a path below `place`."""
    found = _Check(schema, place, strict)
    found.schema(schema, place, 0)
    try:
        json.dumps(schema, allow_nan=False)
    except ValueError:
        raise _wrong(place, "has a number that is too large") from None
    return found.left_out


def told(left_out: Sequence[str]) -> list[str]:
    """A note on paths that grammars leave out; none without any."""
    more = f" and {len(left_out) - _TOLD} more" if len(left_out) > _TOLD else ""
    return [f"not followed: {', '.join(left_out[:_TOLD])}{more}"] if left_out else []


_TOLD = 8


class _Check:
    def __init__(self, root: Mapping[str, Any], place: str, strict: bool) -> None:
        self._root, self._place, self._strict = root, place, strict
        self._parts = self._references = self._values = 0
        self._seen: set[str] = set()
        self.left_out: list[str] = []

    def schema(self, schema: Any, place: str, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _wrong(place, "must be an object, true or false")
        self._parts += 1
        if depth > DEPTH:
            raise _wrong(place, f"is more than {DEPTH} schemas deep")
        if self._parts > PARTS:
            raise _wrong(place, f"is one part too many: a schema has at most {PARTS}")
        self._words(schema, place)
        for at, part in _below(schema, place):
            self.schema(part, at, depth + 1)
        if "$ref" in schema:
            self._reference(schema["$ref"], f"{place}.$ref", depth)

    def _words(self, schema: dict[str, Any], place: str) -> None:
        """Check a schema's keywords without subschemas."""
        for key, value in schema.items():
            at, wanted = f"{place}.{key}", ""
            if key == "type":
                kinds = value if isinstance(value, list) else [value]
                if not kinds or not all(isinstance(k, str) for k in kinds):
                    wanted = "must be a type's name or an array of them"
                elif not all(k in TYPES for k in kinds):
                    wanted = f"must be one of {', '.join(TYPES)}" if self._strict else ""
                    self.left_out += [] if self._strict else [_shortened(at)]
            elif key == "required" and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
                wanted = "must be an array of property names"
            elif key == "enum":
                wanted = "" if isinstance(value, list) and value else "must be an array of values, at least one"
                self._values += len(value) if isinstance(value, list) else 0
            elif key in _MAPS and not isinstance(value, dict):
                wanted = "must be an object of schemas"
            elif key in _LISTS and not (isinstance(value, list) and value):
                wanted = "must be an array of schemas, at least one"
            elif key in _LISTS and len(value) > ALTERNATIVES:
                wanted = f"must have at most {ALTERNATIVES} schemas"
            elif key in _TEXTS and not isinstance(value, str):
                wanted = "must be a string"
            elif key in _COUNTS and not (_is_whole(value) and value >= 0):
                wanted = "must be a whole number, 0 or more"
            elif key in NUMBERS and not _is_number(value):
                wanted = "must be a number"
            if wanted:
                raise _wrong(at, wanted)
            if reason := _unfollowed(key, value):
                if self._strict:
                    raise _wrong(at, reason)
                self.left_out.append(_shortened(at))
        if self._values > VALUES:
            raise _wrong(f"{place}.enum", f"has too many values: a schema enumerates at most {VALUES}")

    def _reference(self, reference: str, place: str, depth: int) -> None:
        self._references += 1
        if self._references > REFERENCES:
            raise _wrong(place, f"is one reference too many: a schema has at most {REFERENCES}")
        if reference in self._seen:
            return
        self._seen.add(reference)
        target = resolve(self._root, reference)
        if target is not None:
            self.schema(target, self._place + reference[1:].replace("/", "."), depth + 1)
        elif self._strict or reference.startswith("#/"):
            raise _wrong(place, "leads nowhere within the schema")


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def _is_number(value: Any) -> bool:
    return type(value) in (int, bool) or (type(value) is float and math.isfinite(value))


def _below(schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """(path, schema) of the direct subschemas."""
    for key in _MAPS:
        for name, part in schema.get(key, {}).items():
            yield f"{place}.{key}.{name[:64]}", part
    for key in (*_LISTS, *_SINGLE):
        if key in schema:
            value = schema[key]
            if isinstance(value, list):
                yield from ((f"{place}.{key}[{n}]", part) for n, part in enumerate(value))
            else:
                yield f"{place}.{key}", value


def _unfollowed(key: str, value: Any) -> str:
    """Why grammars do not support a keyword; "" if they do."""
    if key in _NOT_FOLLOWED and value is not False:
        return "is not supported: leave it out, or send strict: false"
    if key == "pattern" and _NO_AUTOMATON.search(value):
        return "has look-around or a back-reference, which no grammar supports: leave it out, or send strict: false"
    if key == "format" and value not in _FORMATS:
        return f"is an unsupported format; supported: {', '.join(_FORMATS)}"
    return ""


def resolve(root: Mapping[str, Any], reference: str) -> Any:
    """The target of a reference within a schema; None if missing or external."""
    found: Any = root
    if reference != "#" and not reference.startswith("#/"):
        return None
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isascii() and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


LOOSER = 3
"""Number of relaxations of a non-strict schema (`loosened`)."""


def loosened(schema: Mapping[str, Any], way: int) -> dict[str, Any]:
    """Relax a schema for grammars. way 0: drop unsupported patterns, and forbid undeclared properties, which weak
    models invent; 1: keep only types, properties, items and alternatives; 2: keep only the type."""
    if way == 2:
        return {"type": schema["type"]} if schema.get("type") in TYPES else {}
    found: dict[str, Any] = _looser(schema, way)
    return found


_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "additionalProperties", "if", "dependentSchemas")


def _looser(schema: Any, way: int, part: bool = False) -> Any:
    """part: within an allOf, whose other parts may add properties."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    if not (way or part) and schema.get("properties") and not any(k in schema for k in _COMPOSED):
        out["additionalProperties"] = False
    for key, value in schema.items():
        if (way and key not in _STRUCTURE) or (key == "pattern" and _NO_AUTOMATON.search(value)):
            continue
        if key == "type":
            value = [k for k in (value if isinstance(value, list) else [value]) if k in TYPES]
            if not value:
                continue
            value = value[0] if len(value) == 1 else value
        elif key == "$ref" and not value.startswith("#"):
            continue
        elif key in _MAPS:
            value = {name: _looser(below, way) for name, below in value.items()}
        elif key in _LISTS or key in _SINGLE:
            many = key == "allOf"
            value = [_looser(below, way, many) for below in value] if isinstance(value, list) else _looser(value, way)
        out[key] = value
    return out


def _shortened(place: str) -> str:
    return place if len(place) <= 160 else f"{place[:100]}...{place[-50:]}"


def _wrong(place: str, what: str) -> ApiError:
    short = _shortened(place)
    return bad_request(f"Invalid schema: {short} {what}.", short, "invalid_schema")
