"""Mutations of files: flipped bits, fields overwritten with values that break arithmetic, cuts, splices, bad JSON."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from conformance.files.targets import pack_directory
from hybrid.checkpoint import gguf_header
from hybrid.checkpoint.files import OpenFile

NASTY = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    12,
    13,
    31,
    32,
    33,
    255,
    256,
    1000,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    1 << 24,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 32,
    1 << 40,
    (1 << 53) + 1,
    (1 << 61) + 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 32,
    (1 << 64) - 1,
    0x7FC00000,
    0x7F800000,
    0xFF800000,
)
TOKENS = (
    "0",
    "-1",
    "1",
    "1.5",
    "31",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "9223372036854775807",
    "9223372036854775808",
    "1" + "0" * 400,
    "1" * 5000,
    "null",
    "true",
    "false",
    '""',
    '"x"',
    '"\\ud800"',
    '"\\u0000"',
    "[]",
    "{}",
    "[[]]",
    "[" * 3000 + "]" * 3000,
    '{"a":' * 3000,
    "[1e308, 1e308]",
    '"F64"',
    '"I32"',
    '"gemma3"',
    '"full_attention"',
)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null|[\[\]{}:,]')


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeoutError after this processor time: a hang is reported, and other load on the machine does not count."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def gguf_fields(path: Path) -> list[tuple[int, int]]:
    """(offset, bytes) of every number in a file's header: counts, lengths, types, axes, offsets, values."""
    found: list[tuple[int, int]] = []

    class Spy(gguf_header._Cursor):
        def number(self, code: str) -> Any:
            begin = self.at
            value = super().number(code)
            found.append((begin, self.at - begin))
            return value

    original, gguf_header._Cursor = gguf_header._Cursor, Spy  # type: ignore[misc]
    try:
        gguf_header.read_header(OpenFile(path))
    finally:
        gguf_header._Cursor = original  # type: ignore[misc]
    return found


@st.composite
def binary(draw: st.DrawFn, data: bytes, fields: list[tuple[int, int]], header: int) -> bytes:
    """One to three mutations of `data`, most of them among its first `header` bytes or in its `fields`."""
    out = bytearray(data)
    place = st.integers(0, max(header - 1, 0))
    kinds = ("flip", "number", "number", "field", "field", "field", "cut", "copy", "delete", "append", "data")
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        kind = draw(st.sampled_from(kinds))
        if kind == "cut":
            del out[draw(st.integers(0, len(out))) :]
        elif kind == "append":
            out += bytes(draw(st.integers(1, 64)))
        elif kind == "field" and fields:
            at, size = draw(st.sampled_from(fields))
            out[at : at + size] = (draw(st.sampled_from(NASTY)) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif out:
            at = draw(place) % len(out)
            if kind == "flip":
                out[at] ^= 1 << draw(st.integers(0, 7))
            elif kind == "data":
                out[draw(st.integers(0, len(out) - 1))] = draw(st.sampled_from((0, 127, 128, 255)))
            elif kind == "copy":
                source, size = draw(place), draw(st.integers(1, 64))
                out[at : at + size] = out[source : source + size]
            elif kind == "delete":
                del out[at : at + draw(st.integers(1, 32))]
            else:
                size = draw(st.sampled_from((1, 2, 4, 8)))
                out[at : at + size] = (draw(st.sampled_from(NASTY)) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return bytes(out)


@st.composite
def text(draw: st.DrawFn, data: bytes) -> bytes:
    """One or two mutations of JSON or TOML: tokens replaced, removed, doubled or exchanged; bits flipped; cuts."""
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        places = [m.span() for m in _TOKEN.finditer(data)]
        kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "double", "exchange", "flip", "cut")))
        if not places or kind in ("flip", "cut"):
            at = draw(st.integers(0, max(len(data) - 1, 0)))
            flipped = bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) if data else b""
            data = data[:at] + (flipped + data[at + 1 :] if kind == "flip" else b"")
            continue
        begin, end = draw(st.sampled_from(places))
        token = data[begin:end]
        if kind == "replace":
            token = draw(st.sampled_from(TOKENS)).encode()
        elif kind == "exchange":
            other = draw(st.sampled_from(places))
            token = data[other[0] : other[1]]
        data = data[:begin] + (b"" if kind == "remove" else token * 2 if kind == "double" else token) + data[end:]
    return data


@st.composite
def directories(draw: st.DrawFn, config: bytes, header: bytes, body: bytes) -> bytes:
    """A packed directory whose config or tensor header is mutated as text."""
    which = draw(st.sampled_from(("config", "header", "header", "body")))
    if which == "config":
        config = draw(text(config))
    elif which == "header":
        header = draw(text(header))
    else:
        body = body[: draw(st.integers(0, len(body)))] + bytes(draw(st.integers(0, 8)))
    return pack_directory(config[:65535], header[:65535], body)
