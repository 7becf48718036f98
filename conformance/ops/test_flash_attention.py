"""Flash attention on matrix units: every cache type, head size, column split and result type, over tiles, slots,
windows, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from conformance.support.devices import GUARD, MatrixDevices, share_of, spy_kernels
from hybrid.harness import run_case
from hybrid.harness.cases import Case
from hybrid.harness.fixed import variant
from hybrid.harness.sizes import base_bind
from hybrid.kernels.vulkan.ops.attention import FLASH
from hybrid.kernels.vulkan.tuning import space
from hybrid.spec import load_op

SPEC, FAMILY = load_op("attention"), space().named("flash_attention")
# Rows: just above the limit of the other kernel, a tile less one, more than a tile; heads: one, some, all of a tile.
SIZES = (
    {"T": 33, "HQ": 4, "HK": 2, "S": 4, "BS": 16, "MB": 12},
    {"T": 127, "HQ": 2, "HK": 2, "S": 1, "BS": 32, "MB": 9},
    {"T": 129, "HQ": 8, "HK": 1, "S": 2, "BS": 7, "MB": 31},
    {"T": 40, "HQ": 10, "HK": 2, "S": 40, "BS": 5, "MB": 9},
)


@pytest.fixture
def device(matrices: MatrixDevices) -> Any:
    return matrices(guard=GUARD)


def _cases(kv: str, d: int) -> Iterator[Case]:
    for i, sizes in enumerate(SIZES):
        for j, o in enumerate(SPEC.outputs["o"].dtype):
            dtypes = SPEC.dtypes({"k_cache": kv, "o": o})
            case = variant(SPEC, {**base_bind(SPEC), **sizes, "D": d}, dtypes, 10 * i + j)
            for window in (0, 1, 19, 64):
                yield replace(case, attrs={**case.attrs, "window": window})


VARIANTS = [(kv, d, own) for kv, heads in FLASH.items() for d, built in heads.items() for own in built]


@pytest.mark.parametrize("style", ["ragged", "mixed", "empty", "full"])
@pytest.mark.parametrize(("kv", "d", "own"), VARIANTS)
def test_tiles(device: Any, monkeypatch: pytest.MonkeyPatch, kv: str, d: int, own: int, style: str) -> None:
    chosen = spy_kernels(device, monkeypatch)
    with device.tuning.forced(FAMILY.name, {"columns": own}):
        for case in share_of(device, list(_cases(kv, d)), 32):
            run_case(SPEC, device, replace(case, style=style))
    name = f"flash_attention.{d}.{own}" if kv == "f16" else f"flash_attention.{kv}.{d}.{own}"
    assert name in chosen and not any(k.startswith("attention.") for k in chosen)


@pytest.mark.parametrize(("kv", "d", "own"), VARIANTS)
@pytest.mark.parametrize("kind", [("q", "all_zero"), ("v_cache", "outlier"), ("block_table", "ring")])
def test_edge_values(device: Any, kv: str, d: int, own: int, kind: tuple[str, str]) -> None:
    case = next(c for c in _cases(kv, d) if c.dtypes["o"] == "f32")
    with device.tuning.forced(FAMILY.name, {"columns": own}):
        run_case(SPEC, device, replace(case, kinds=dict([kind])))
