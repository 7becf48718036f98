"""Bindings: how each operation becomes dispatches. One module per operation, with `record(recorder, step, tensors)`.

Modules with a leading underscore hold shared code and fused groups, which record consecutive operations together.
"""

from __future__ import annotations

import importlib
import pkgutil

from hybrid.kernels.vulkan.groups import Binding, Group
from hybrid.kernels.vulkan.ops import (
    _add_router,
    _altup_gate,
    _altup_next,
    _expert_route,
    _layer,
    _layer_attention,
    _partials,
)

BINDINGS: dict[str, Binding] = {
    m.name: importlib.import_module(f"{__name__}.{m.name}").record
    for m in pkgutil.iter_modules(__path__)
    if not m.name.startswith("_")
}

# Fused groups by the operations of their consecutive steps (kernels/vulkan/groups.py), longest first.
GROUPS: dict[tuple[str, ...], Group] = {
    **{ops: _layer_attention.record for ops in _layer_attention.OPS},
    **{
        ops: _layer.record
        for ops in (
            _layer.WITH_OWN,
            _layer.QUERIES_WITH_OWN,
            _layer.OPS,
            _layer.QUERIES,
            _layer.LAST_WITH_OWN,
            _layer.LAST,
        )
    },
    _altup_next.OPS: _altup_next.record,
    _altup_gate.OPS: _altup_gate.record,
    _expert_route.OPS: _expert_route.record,
    _add_router.OPS: _add_router.record,
    **{ops: _partials.record for ops in _partials.OPS},
}
