"""Names of a checkpoint's tensors: GGUF's for every file format. A layer's tensors are `blk.{layer}.{part}`."""

from __future__ import annotations

from functools import lru_cache

LAYER = "blk."


@lru_cache(maxsize=4096)
def layer_of(name: str) -> int | None:
    """`blk.3.attn_q.weight` -> 3; None for a tensor of no layer."""
    number = name[len(LAYER) :].partition(".")[0] if name.startswith(LAYER) else ""
    return int(number) if number.isdecimal() else None


@lru_cache(maxsize=4096)
def part_of(name: str) -> str:
    """`blk.3.attn_q.weight` -> `attn_q.weight`; the name itself for a tensor of no layer."""
    return name if layer_of(name) is None else name.split(".", 2)[2]


def in_layer(layer: int, part: str) -> str:
    """The inverse of `layer_of` and `part_of`."""
    return f"{LAYER}{layer}.{part}"


def stem_of(name: str) -> str:
    """`blk.3.attn_q.weight` -> `attn_q`: the name without layer and suffix."""
    return part_of(name).removesuffix(".weight")
