"""Bindings: how each operation becomes dispatches. One module per operation, `record(recorder, step, tensors)`; and which
runs of operations become one dispatch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from hybrid.kernels.vulkan.ops import _layer, _layer_attention
from hybrid.kernels.vulkan.runs import Run

BINDINGS: dict[str, Callable[..., Any]] = {
    m.name: importlib.import_module(f"{__name__}.{m.name}").record
    for m in pkgutil.iter_modules(__path__)
    if not m.name.startswith("_")
}

# Steps that follow one another, by their operations: what may record them together (kernels/vulkan/runs.py), longer runs first.
RUNS: dict[tuple[str, ...], Run] = {_layer_attention.OPS: _layer_attention.record, _layer.OPS: _layer.record}
