"""The demonstration checkpoint as tests use it: golden values, the held-out text, open models by device and options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import hybrid
from conformance.support.devices import check_validation, open_backend
from conformance.support.paths import DATA, MODELS

GOLDEN = DATA / "demo-gemma3"
WINDOW, MAX_DOC, DOCS = 128, 512, 12


@dataclass(frozen=True, slots=True)
class Golden:
    """One prompt of golden.json. logits: f32 [3, vocab] of positions 0, len // 2 and len - 1."""

    ids: tuple[int, ...]
    greedy: tuple[int, ...]
    text: str
    logits: np.ndarray

    @property
    def rows(self) -> list[int]:
        return [0, len(self.ids) // 2, len(self.ids) - 1]


@cache
def golden() -> tuple[Golden, ...]:
    """What transformers computed in float32."""
    cases, arrays = json.loads((GOLDEN / "golden.json").read_text())["cases"], np.load(GOLDEN / "golden.npz")
    return tuple(Golden(tuple(c["ids"]), tuple(c["greedy"]), c["text"], arrays[f"logits_{i}"]) for i, c in enumerate(cases))


@cache
def golden_nats() -> float:
    """Held-out loss in float32, nats per token."""
    return float(json.loads((GOLDEN / "golden.json").read_text())["held_out_nats_per_token"])


def documents(model: hybrid.Model) -> Iterator[list[int]]:
    """The first 12 held-out documents as ids, each with <bos> and cut to 512."""
    for text in (GOLDEN / "held-out.txt").read_text().split("\n\f\n")[:DOCS]:
        yield model.encode(text, bos=True)[:MAX_DOC]


def nats(logits: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """f64 [len(ids) - 1]: -log p of each next token."""
    z = logits[:-1].astype(np.float64)
    top = z.max(-1, keepdims=True)
    norm = np.log(np.exp(z - top).sum(-1)) + top[:, 0]
    return norm - z[np.arange(len(ids) - 1), list(ids[1:])]


def prompt(length: int) -> list[int]:
    """`length` ids of real text: the longest golden prompt, repeated where it ends."""
    ids = golden()[-1].ids
    return [ids[i] if i < len(ids) else ids[1 + i % (len(ids) - 1)] for i in range(length)]


class Models:
    """get(backend, "q8_0", weights=...) -> an open hybrid.Model, kept for the session."""

    def __init__(self) -> None:
        self._open: dict[tuple[Any, ...], hybrid.Model] = {}

    def get(self, backend: str, file: str, **options: Any) -> hybrid.Model:
        key = (backend, file, *sorted(options.items()))
        if key not in self._open:
            if backend == "vulkan":
                open_backend("vulkan").close()  # says so if there is none
            device = os.environ.get("HYBRID_VULKAN_DEVICE", "vulkan") if backend == "vulkan" else backend
            self._open[key] = hybrid.load(MODELS / f"demo-gemma3-{file}.gguf", device=device, **options)
        return self._open[key]

    def inspect(self) -> None:
        """Raise if the validation layer has reported anything."""
        for model in self._open.values():
            check_validation(model.engine.device)

    def close(self) -> None:
        models, self._open = list(self._open.values()), {}
        for model in models:
            model.close()
