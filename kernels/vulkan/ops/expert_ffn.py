"""Binding of expert_ffn: the products of linear and ffn_up, with tiles of rows that have one expert (grouped.slang)."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.ops._gemm import SHORT, SPLIT_SUBGROUPS, TILES, split_threads, takes, tile_for, tile_of, wide
from hybrid.kernels.vulkan.ops._linear import (
    GEMV_FFN_OUTS,
    GEMV_ROWS,
    GEMV_TOKENS,
    TILE_ROWS,
    TILE_THREADS,
    TILE_TOKENS,
    geglu,
    gemv,
)
from hybrid.kernels.vulkan.recorder import GridAxis, Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor

ROWWISE = 2  # of grouped.slang


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """y f32 [T,H] = down(h), h [T,F] = gelu_tanh(gate(x)) * up(x) in the step's scratch tensor, each row by the matrices
    of its expert.

    Two products where gate and up are in one chunk and h has the activation type of x; otherwise gate and up go through
    a temporary f32 [T,2F]."""
    x, h, gate_up = t["x"], t["h"], t["w_gate_up"]
    grouped = Grouped(rec, step, t["spans"].parts[0], t["order"].parts[0])
    if len(gate_up.chunks) == 1 and x.dtype == h.dtype:
        grouped.product("ffn_up", x, gate_up, h.parts, step.bind["F"])
    else:
        between = rec.scratch(8 * step.bind["T"] * step.bind["F"])
        grouped.product("linear", x, gate_up, (between,), 2 * step.bind["F"])
        geglu(rec, between, h, rows=step.bind["T"], extent=step.extent)
    grouped.product("linear", h, t["w_down"], t["y"].parts, step.bind["H"])


class Grouped:
    """Records the products of a step. Tiles of one height are listed once, by a dispatch before their first product;
    tiles of one row need no list."""

    def __init__(self, rec: Recorder, step: Step, spans: Slice, order: Slice) -> None:
        self.rec, self.extent, self.spans, self.order = rec, step.extent, spans, order
        self.rows, self.experts = step.bind["T"], step.bind["X"]
        self.mean = -(-self.rows // min(self.experts, self.rows))
        """Rows of an expert, where all are chosen as often."""
        self._tiles: dict[int, tuple[Slice, int]] = {}

    def tiles(self, height: int) -> tuple[Slice, int]:
        """Tiles of at most `height` rows, and the most that there can be."""
        if height not in self._tiles:
            alone = min(self.experts, self.rows)
            most = alone + (self.rows - alone) // height
            found = self.rec.scratch(12 * most)
            self.rec.dispatch(
                self.rec.kernel("expert_tiles", SUBGROUP=self.rec.device.subgroup_size),
                reads=[self.spans],
                writes=[found],
                push=struct.pack("<3I", self.experts, height, most),
                grid=(self.experts,),
            )
            self._tiles[height] = found, most
        return self._tiles[height]

    def product(self, family: str, x: DeviceTensor, w: DeviceTensor, out: tuple[Slice, ...], n: int) -> None:
        """linear: out f32 [rows, n] = x times the expert's n rows of w; ffn_up: n columns of h, of 2n rows of w."""
        for chunk in w.chunks:
            self._chunk(family, x, w.shape[-1], chunk, out, n)

    def _chunk(self, family: str, x: DeviceTensor, k: int, w: Chunk, out: tuple[Slice, ...], n: int) -> None:
        rec, device, more = self.rec, self.rec.device, b""
        beside: tuple[Slice, ...] = ()
        if takes(device, x, w):
            every = n * min(self.experts, self.rows)  # the device has the tiles of all experts at once
            asked = tile_for(device, family, w.dtype, self.mean, every, k)["tile"]
            tile = tile_of(device, family, asked, w.dtype, self.mean, every, k)
            height, columns = TILES[tile]
            constants = {"ONCE": int(self.mean <= SHORT)}
            if tile in SPLIT_SUBGROUPS:
                constants = {"THREADS": split_threads(device, tile, k), "K": k}
            elif w.dtype == "q6_k" and tile.endswith("x256") and height < 128:
                constants["FUSED"] = int(device.has("fused_halves"))
            kernel = rec.kernel(f"{family}.gemm.{w.dtype}.{x.dtype}.{tile}", GROUPED=1, **constants)
            across = -(-(2 * n if family == "ffn_up" else n) // columns)
            tiles, most = self.tiles(height)
            grid: tuple[GridAxis, ...] = (most, across)
            if tile not in SPLIT_SUBGROUPS:
                more, beside = struct.pack("<2I", across, 1), (out[0], out[0])
        elif self.mean <= GEMV_TOKENS:
            use = gemv(rec, family, w.dtype, x.dtype, self.mean, n, k)
            alone = use["TOKENS"] == 1
            kernel = rec.kernel(f"{family}.gemv.{w.dtype}.{x.dtype}", GROUPED=ROWWISE if alone else 1, **use)
            per = use["THREADS"] // use["SUBGROUP"] // use["SPLIT"] * GEMV_ROWS
            tiles, most = (self.order, self.rows) if alone else self.tiles(use["TOKENS"])
            groups, further = wide(-(-n // (GEMV_FFN_OUTS if family == "ffn_up" else per)))
            grid = (groups, most, further)
        else:
            kernel = rec.kernel(f"{family}.tile.{w.dtype}.{x.dtype}", GROUPED=1)
            tiles, most = self.tiles(TILE_TOKENS)
            groups, further = wide(-(-n // (TILE_THREADS * TILE_ROWS // (2 if family == "ffn_up" else 1))))
            grid = (groups, most, further)
        push = struct.pack("<7If", n, k, w.row, n, CONTROL[self.extent], self.rows, w.rows, 0.0)
        rec.dispatch(kernel, [*x.parts, *w.parts, tiles], [*out, *beside], push + more, grid)
