"""Write protobuf's wire format: https://protobuf.dev/programming-guides/encoding/."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """A base-128 integer; negative numbers are 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def key(number: int, wire: int) -> bytes:
    """A field's number and wire type: 0 integer, 2 bytes with their length, 5 four bytes."""
    return varint(number << 3 | wire)


def field(number: int, value: int | bytes) -> bytes:
    """A whole field: an integer, or bytes with their length."""
    if isinstance(value, int):
        return key(number, 0) + varint(value)
    return key(number, 2) + varint(len(value)) + value
