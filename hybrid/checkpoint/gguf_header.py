"""Parse the header of a GGUF file (versions 2 and 3): metadata and tensor table, with all sizes bounded.

The gguf package's reader is slow for large vocabularies and does not validate sizes. Layout: magic, u32 version, u64
tensors, u64 values; values (string key, u32 type, value); tensors (string name, u32 axes, u64 each, u32 type, u64
offset); padding; data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.files import OpenFile

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_HEADER = 1 << 28
_MAX_ITEMS = 1 << 23  # of all arrays
_MAX_KEY, _MAX_NAME = 65535, 1024
_MAX_AXES, _MAX_DEPTH = 4, 3
_MAX_ELEMENTS = 1 << 63
_MAX_ALIGNMENT = 1 << 24
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An entry of the tensor table: `shape` has the slowest axis first, `at` is the byte offset in the file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    at: int


def read_header(file: OpenFile) -> tuple[dict[str, Any], list[TensorInfo]]:
    """(metadata, tensor table). Arrays are lists; texts that are not UTF-8 keep surrogate escapes."""
    cursor = _Cursor(file)
    if file.size < 4 or cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{file.path} is not a GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        what = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
        raise CheckpointError(f"{file.path}: {what} GGUF is not supported; known: 2 and 3, little-endian")
    n_tensors, n_values = cursor.number("Q"), cursor.number("Q")
    cursor.expect("tensor count", n_tensors, 24)
    cursor.expect("metadata count", n_values, 13)
    values: dict[str, Any] = {}
    for _ in range(n_values):
        key = cursor.name("key", _MAX_KEY)
        if key in values:
            raise CheckpointError(f"{file.path}: metadata key {key} is duplicated")
        values[key] = cursor.value(key, cursor.number("I"))
    table = [_tensor_info(cursor) for _ in range(n_tensors)]
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"{file.path}: general.alignment must be a power of two up to {_MAX_ALIGNMENT}, not {alignment!r}"
        )
    start = -(-cursor.at // alignment) * alignment
    seen: set[str] = set()
    for info in table:
        if info.name in seen:
            raise CheckpointError(f"{file.path}: tensor {info.name} is duplicated")
        seen.add(info.name)
        if info.at % alignment:
            raise CheckpointError(
                f"{file.path}: tensor {info.name} has offset {info.at}, no multiple of general.alignment {alignment}"
            )
    return values, [TensorInfo(t.name, t.kind, t.shape, start + t.at) for t in table]


def refuse_overlaps(path: Path, spans: list[tuple[int, int, str]]) -> None:
    """CheckpointError if two of (begin, end, tensor name) overlap."""
    spans = sorted(s for s in spans if s[1] > s[0])
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise CheckpointError(f"{path}: tensors {name} and {other} overlap at byte {begin}")


class _Cursor:
    """Buffered reader of little-endian values. CheckpointError outside the file or the limits."""

    def __init__(self, file: OpenFile) -> None:
        self.file, self.path, self.at = file, file.path, 0
        self._buffer, self._begin, self._items = b"", 0, 0

    def take(self, size: int) -> bytes:
        if size > self.file.size - self.at:
            raise CheckpointError(
                f"{self.path} is cut short or damaged: {size} bytes wanted at byte {self.at} of {self.file.size}"
            )
        if self.at + size > _MAX_HEADER:
            raise CheckpointError(
                f"{self.path} is damaged: a header of more than {_MAX_HEADER} bytes at byte {self.at}"
            )
        inside = self.at - self._begin
        if inside + size > len(self._buffer):
            count = min(max(size, _CHUNK), self.file.size - self.at)
            self._buffer, self._begin, inside = self.file.read(self.at, count), self.at, 0
        self.at += size
        return self._buffer[inside : inside + size]

    def expect(self, what: str, count: int, least: int) -> None:
        """CheckpointError if `count` items of at least `least` bytes do not fit in the rest."""
        if count * least > self.file.size - self.at:
            raise CheckpointError(
                f"{self.path} is cut short or damaged: {what} {count} at byte {self.at} of {self.file.size}"
            )

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.number("Q")), "utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        """`count` strings; fast for vocabularies."""
        out: list[str] = []
        while len(out) < count:
            out.append(self.string())  # checks limits and refills the buffer
            buffer, at = self._buffer, self.at - self._begin
            short, at = _short_strings(buffer, at, count - len(out))
            out += short
            while len(out) < count and at + 8 <= len(buffer):
                end = at + 8 + int.from_bytes(buffer[at : at + 8], "little")
                if end > len(buffer):
                    break
                out.append(str(buffer[at + 8 : end], "utf-8", "surrogateescape"))
                at = end
            self.at = self._begin + at
        return out

    def name(self, what: str, limit: int) -> str:
        """A key or a tensor's name: UTF-8 of at most `limit` bytes."""
        begin, size = self.at, self.number("Q")
        if not 0 < size <= limit:
            raise CheckpointError(f"{self.path} is damaged: a {what} of {size} bytes at byte {begin}")
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path} is damaged: the {what} at byte {begin} is not UTF-8") from None

    def value(self, key: str, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            value = self.number(_SCALARS[kind])
            return self._bools(key, [value])[0] if kind == _BOOL else value
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: damaged metadata: {key} has value type {kind} before byte {self.at}")
        if depth >= _MAX_DEPTH:
            raise CheckpointError(f"{self.path}: damaged metadata: {key} holds arrays nested too deeply")
        item, count = self.number("I"), self.number("Q")
        size = struct.calcsize("<" + _SCALARS[item]) if item in _SCALARS else 8 if item == _STRING else 12
        self.expect(f"{key} has an array of", count, size)
        self._items += count
        if self._items > _MAX_ITEMS:
            raise CheckpointError(f"{self.path}: {key} has {count} items: more than {_MAX_ITEMS} are not believable")
        if item in _SCALARS:
            values = np.frombuffer(self.take(count * size), "<" + np.dtype(_SCALARS[item]).str[1:]).tolist()
            return self._bools(key, values) if item == _BOOL else values
        return self.strings(count) if item == _STRING else [self.value(key, item, depth + 1) for _ in range(count)]

    def _bools(self, key: str, values: list[int]) -> list[bool]:
        wrong = next((v for v in values if v > 1), None)
        if wrong is not None:
            raise CheckpointError(f"{self.path}: damaged metadata: {key} has the truth value {wrong}")
        return [bool(v) for v in values]


def _short_strings(buffer: bytes, at: int, most: int) -> tuple[list[str], int]:
    """(strings, where they end): those from `at` on, all at once, up to one that is empty, has more than 255 bytes or is
    not all in the buffer. None if one has a NUL: their lengths are found by seven NULs after another byte."""
    data = np.frombuffer(buffer, np.uint8, offset=at)
    zero = data == 0
    twos = zero[1:-1] & zero[2:]  # [i]: bytes i + 1 and i + 2
    fours = twos[:-2] & twos[2:]
    lengths = np.flatnonzero(~zero[:-7] & fours[:-3] & fours[3:])[:most]
    ends = lengths + 8 + data[lengths]
    chained = (lengths == np.append(0, ends)[:-1]) & (ends <= len(data))
    count = len(chained) if chained.all() else int(chained.argmin())
    end = int(ends[count - 1]) if count else 0
    text = data[:end][~zero[:end]]
    if not count or len(text) != end - 7 * count:
        return [], at
    text[lengths[:count] - 7 * np.arange(count)] = 0  # what is left of a length separates
    return str(text, "utf-8", "surrogateescape").split("\0")[1:], at + end


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    name, n_axes = cursor.name("tensor name", _MAX_NAME), cursor.number("I")
    if n_axes > _MAX_AXES:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {n_axes} axes; at most {_MAX_AXES} are possible")
    shape = tuple(cursor.number("Q") for _ in range(n_axes))[::-1]
    elements = 1
    for n in shape:
        elements *= max(n, 1)
    if elements >= _MAX_ELEMENTS:
        raise CheckpointError(f"{cursor.path}: tensor {name} has shape {list(shape)}: more elements than 2**63")
    return TensorInfo(name, cursor.number("I"), shape, cursor.number("Q"))
