"""The demonstration checkpoints for tests: golden values, the held-out text, open models by device and options."""

from __future__ import annotations

import atexit
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import hybrid
from conformance.support.devices import check_validation, for_model
from conformance.support.golden import nats as nats
from conformance.support.golden import positions
from conformance.support.paths import DATA, MODELS
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.convert import Wanted, convert
from hybrid.core.names import in_layer, layer_of, part_of

GOLDEN = DATA / "demo-gemma3"
SHIPPED = ("demo-gemma3", "demo-gemma3n", "demo-gemma4", "demo-gemma4-moe", "demo-gemma3-draft")
WINDOW, MAX_DOC, DOCS = 128, 512, 12
BOTH = (4, 5, 6)
"""Layers of the demonstration model: a local, a global, a local one. Vulkan's CPU driver is slow at float32 products,
so tests that need neither depth nor trained text use these."""
TABLES = {"embed": "q8_0", "table": "q8_0"}
"""Types of tables beside q4_0 matrices, as in published files of Gemma 3n and Gemma 4."""


@dataclass(frozen=True, slots=True)
class Golden:
    """One prompt of golden.json. logits: f32 [rows, vocab]."""

    ids: tuple[int, ...]
    greedy: tuple[int, ...]
    text: str
    logits: np.ndarray

    @property
    def rows(self) -> list[int]:
        return positions(len(self.ids))


@cache
def golden(name: str = "demo-gemma3") -> tuple[Golden, ...]:
    """The golden values for the numbers in a shipped file."""
    cases, arrays = json.loads((DATA / name / "golden.json").read_text())["cases"], np.load(DATA / name / "golden.npz")
    return tuple(
        Golden(tuple(c["ids"]), tuple(c["greedy"]), c["text"], arrays[f"logits_{i}"]) for i, c in enumerate(cases)
    )


@cache
def golden_nats(name: str = "demo-gemma3") -> float:
    """Held-out loss without rounding, nats per token."""
    return float(json.loads((DATA / name / "golden.json").read_text())["held_out_nats_per_token"])


def documents(model: hybrid.Model) -> Iterator[list[int]]:
    """The first 12 held-out documents as ids, each with <bos> and cut to 512."""
    for text in (GOLDEN / "held-out.txt").read_text().split("\n\f\n")[:DOCS]:
        yield model.encode(text, bos=True)[:MAX_DOC]


def prompt(length: int) -> list[int]:
    """`length` ids of real text: the longest golden prompt, repeated where it ends."""
    ids = golden()[-1].ids
    return [ids[i] if i < len(ids) else ids[1 + i % (len(ids) - 1)] for i in range(length)]


@cache
def demo(kind: str = "q8_0", name: str = "demo-gemma3", layers: tuple[int, ...] | None = None) -> Path:
    """A demonstration model as a file: the shipped one, or a temporary one of another type or with some of its layers."""
    shipped = MODELS / f"{name}-q8_0.gguf"
    if kind == "q8_0" and not layers:
        return shipped
    folder = tempfile.TemporaryDirectory(prefix="demo-")
    atexit.register(folder.cleanup)
    made = Path(folder.name) / f"{name}-{kind}.gguf"
    with open_checkpoint(shipped) as source:
        of = cut(source, layers) if layers else source
        convert(of, made, Wanted(kind, TABLES) if name != SHIPPED[0] and kind == "q4_0" else kind, requantize=True)
    return made


def cut(checkpoint: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """The model with only these layers, ascending; for families whose tensors belong to one layer or to none."""
    new = {old: index for index, old in enumerate(layers)}
    entries = {}
    for name, entry in checkpoint.entries.items():
        layer = layer_of(name)
        if layer is None:
            entries[name] = entry
        elif layer in new:
            entries[in_layer(new[layer], part_of(name))] = entry
    return replace(checkpoint, hparams=checkpoint.hparams.only(layers), entries=entries)


class Models:
    """get(backend, "q8_0", weights=...) -> an open hybrid.Model, kept for the session. f32, f16: the shipped file,
    converted while loading. layers: with only these layers."""

    def __init__(self) -> None:
        self._open: dict[tuple[Any, ...], hybrid.Model] = {}

    def get(
        self, backend: str, file: str, name: str = "demo-gemma3", layers: Sequence[int] | None = None, **options: Any
    ) -> hybrid.Model:
        if file in ("f32", "f16"):
            file, options = "q8_0", {"weights": file} | options
        key = (backend, file, name, layers and tuple(layers), *sorted(options.items()))
        if key not in self._open:
            path = demo(file, name)
            model = cut(open_checkpoint(path), layers) if layers else path
            self._open[key] = hybrid.load(model, for_model(backend), **options)
        return self._open[key]

    def inspect(self) -> None:
        """Raise if the validation layer has reported a message."""
        for model in self._open.values():
            check_validation(model.engine.device)

    def close(self) -> None:
        models, self._open = list(self._open.values()), {}
        for model in models:
            model.close()
