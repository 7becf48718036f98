"""Resident operands: a run writes only its new rows, and an appended view equals one gathered from the whole cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.npu.test_npu_attention import Direct, inputs
from conformance.support.models import BOTH, demo
from conformance.support.paths import ATTENTION
from conformance.support.profile import LONG
from conformance.support.texts import greedy
from hybrid.core.errors import SpecError
from hybrid.core.tensor import Tensor
from hybrid.engine.runner import Flight
from hybrid.engine.scheduler import Pass
from hybrid.kernels.npu.attend import capacity, shape_of
from hybrid.kernels.npu.designs.attention import Attention
from hybrid.kernels.npu.device import NpuDevice
from hybrid.kernels.npu.layout import bf16, int8_rows
from hybrid.kernels.npu.ops import OPS
from hybrid.kernels.npu.resident import in_pages
from hybrid.kernels.npu.views import KeyView
from hybrid.kernels.npu.xrt import HostCounters
from hybrid.kernels.oracle import ORACLE

FILE = demo(layers=BOTH)  # the same operands in each layer

pytestmark = [pytest.mark.usefixtures("sim_machine"), pytest.mark.slow]


def tile_keys(k: np.ndarray, v: np.ndarray, a: Attention) -> np.ndarray:
    """Keys and values [positions, heads, D] as the KV stream, bytes [heads, tiles, -1], complete: K, its scales where
    they are int8, V; zeros after the last position."""
    if a.scores == "bf16":
        parts = [_dealt(bf16(k), 4, 8, a), _dealt(bf16(v), 8, 4, a)]
    else:
        codes, scales = int8_rows(k.reshape(-1, a.D))
        parts = [_dealt(codes.reshape(k.shape), 8, 8, a), _dealt(scales.reshape(*k.shape[:2], 1), a.LK, 1, a)]
        parts.append(_dealt(bf16(v), 8, 4, a))
    return np.concatenate(parts, axis=-1)


def _dealt(x: np.ndarray, r: int, c: int, a: Attention) -> np.ndarray:
    full = np.zeros((a.tiles * a.LK, a.heads, x.shape[2]), x.dtype)
    full[: len(x)] = x
    cut = full.reshape(a.tiles, a.LK // r, r, a.heads, x.shape[2] // c, c).transpose(3, 0, 1, 4, 2, 5)
    return np.ascontiguousarray(cut).reshape(a.heads, a.tiles, -1).view(np.uint8)


class Sequence:
    """A cache of one slot, and its view."""

    def __init__(self, scores: Any, d: int, tiles: int, heads: int = 2, times: int = 1, block: int = 8) -> None:
        self.rng = np.random.default_rng(d)
        self.a = shape_of(heads * times, 1, d, scores)
        self.a = Attention(heads * times, 1, tiles, d, self.a.LQ, self.a.LK, 1, 1, scores)
        shape = (50, block, heads, d)
        self.k, self.v = (np.zeros(shape, np.float16) for _ in "kv")
        self.table = self.rng.permutation(shape[0])
        self.times, self.block = times, block
        self.view = KeyView(self.k, self.v, self.a, in_pages(self.a.heads * tiles * self.a.key_bytes))
        self.view.room.flush(None)

    def fill(self, start: int, stop: int) -> None:
        p = np.arange(start, stop)
        for cache in (self.k, self.v):
            cache[self.table[p // self.block], p % self.block] = self.rng.normal(size=(len(p), *cache.shape[2:]))

    def append(self, start: int, stop: int, first: int = 0) -> None:
        self.fill(start, stop)
        self.view.update(self.table, first, start, stop)

    def right(self, stop: int) -> None:
        p = np.arange(self.view.base * self.a.LK, stop)
        at = self.table[p // self.block], p % self.block
        k, v = (np.repeat(c[at].astype(np.float32), self.times, axis=1) for c in (self.k, self.v))
        wanted = tile_keys(k, v, self.a)
        held = self.view.room.bytes.reshape(self.a.heads, self.a.tiles, self.a.key_bytes)
        lanes = _dealt(
            np.ones((len(p), self.a.heads, self.a.D), np.int8), 8, 8, self.a
        )  # where a position's keys are stored
        whole = len(p) // self.a.LK
        assert (held[:, :whole] == wanted[:, :whole]).all()
        if self.a.scores == "i8" and len(p) % self.a.LK:
            keys = self.a.LK * self.a.D
            seen = lanes[:, whole].astype(bool)
            assert (held[:, whole, :keys][seen] == wanted[:, whole, :keys][seen]).all()
        assert self.view.end == stop


@pytest.mark.parametrize("scores", ["bf16", "i8"])
@pytest.mark.parametrize(("d", "times"), [(16, 1), (16, 3), (256, 1)])
def test_a_view_that_is_appended_to_holds_the_cache(scores: str, d: int, times: int) -> None:
    """Chunks, single tokens, a turn after a rewind, and a sequence that restarts in the same slot."""
    s = Sequence(scores, d, 32, times=times)
    for start, stop in (
        (0, 70),
        (70, 71),
        (71, 72),
        (72, 128),
        (128, 129),
        (100, 160),
        (160, 161),
        (0, 64),
        (64, 65),
        (65, 192),
    ):
        s.append(start, stop)
        s.right(stop)


@pytest.mark.parametrize("scores", ["bf16", "i8"])
def test_a_view_of_a_window_slides(scores: str) -> None:
    s, at, window = Sequence(scores, 16, 4), 0, 40
    bases = []
    for n in (60, *[1] * 90, 40, *[1] * 100):
        s.append(at, at + n, max(0, at - window + 1) // s.a.LK)
        at += n
        s.right(at)
        bases.append(s.view.base)
    assert len(set(bases)) > 3 and bases == sorted(bases)
    with pytest.raises(ValueError, match="do not fit a view of 4"):
        s.append(at, at + 1, 0)


def test_rows_that_a_view_missed_are_gathered() -> None:
    """Positions that another pass appended, blocks written from outside, another table, and everything after forget."""
    s = Sequence("i8", 16, 32)
    s.append(0, 100)
    s.fill(100, 140)
    s.append(140, 141)
    s.right(141)
    s.fill(16, 24)
    s.view.stale.add(int(s.table[2]))
    s.append(141, 142)
    s.right(142)
    s.table[[3, 30]] = s.table[[30, 3]]
    s.append(142, 143)
    s.right(143)
    s.fill(40, 50)
    s.view.forget()
    s.append(143, 144)
    s.right(144)


def test_uploads_of_a_token_do_not_grow_with_the_context() -> None:
    """One row: its keys and values, once for each head; one tile for each head is uploaded."""
    for scores in ("bf16", "i8"):
        counted = []
        for length in (100, 390):
            s = Sequence(scores, 64, 16)
            s.append(0, length)
            s.view.room.flush(None)
            before = s.view.room.written
            s.append(length, length + 1)
            counted.append((s.view.room.written - before, s.view.room.flush(None)))
        assert counted[0] == counted[1] == (s.a.heads * (s.a.key_bytes // s.a.LK), s.a.heads * s.a.key_bytes)


@pytest.mark.parametrize("op", ["attention", "attention_i8"])
def test_decoding_token_by_token_is_attention(op: str) -> None:
    """The op on a view that it appends to, against the oracle on the whole cache, also with a sliding window."""
    for window in (0, 40):
        npu, args = Direct(), inputs(1, 330, 4, 2, 16, window)
        for position in (300, *range(301, 305), 330):
            now = args | {"positions": np.array([position], np.int32)}
            (got,), (wanted,) = OPS[op](npu, **now), ORACLE[op](**now)
            assert np.abs(got - wanted).max() < 0.05
        assert len(list(npu.views)) == 1


def test_capacity_follows_from_the_cache() -> None:
    a = shape_of(16, 2, 128)
    assert capacity(a, 0, 128, 32, 1, 128) == 128  # 4096 positions in tiles of 32
    assert capacity(a, 1024, 48, 32, 1, 1024) == 64  # a ring of 1536 positions and one more tile, whatever the context
    assert capacity(a, 1024, 96, 32, 2, 1024) == 64 and capacity(a, 1024, 8, 32, 1, 8) == 8


# --- counted on the device, with the engine


class Counted:
    """Bytes uploaded to the device in each pass."""

    def __init__(self, model: hybrid.Model) -> None:
        device: Any = model.engine.device
        self.model, self.npu = model, device.others["npu"]

    def of(self, work: Any) -> HostCounters:
        self.npu.wait()
        c = self.npu.host.counters
        up, resident, runs = c.bytes_up, c.resident_bytes, c.runs
        work()
        self.npu.wait()
        return HostCounters(bytes_up=c.bytes_up - up, resident_bytes=c.resident_bytes - resident, runs=c.runs - runs)


def test_a_token_and_a_chunk_write_their_own_rows() -> None:
    """Bytes that attention uploads for each token and each chunk: the same at the beginning and at the end."""
    with hybrid.load(FILE, "cpu", ATTENTION, ctx=256, chunk=16, npu="sim") as model:
        engine, counted = model.engine, Counted(model)
        ids = (model.encode("class Base:\n") * 40)[: 160 if LONG else 96]
        start, passes = engine.runner.start, list[HostCounters]()

        def alone(p: Pass) -> Flight:
            """A pass that ends before the next one is submitted."""
            flights: list[Flight] = []

            def work() -> None:
                flights.append(start(p))
                engine.device.wait(flights[0].ticket)

            passes.append(counted.of(work))
            return flights[0]

        engine.runner.start = alone  # type: ignore[method-assign]
        count = 12 if LONG else 5
        greedy(engine, ids, count + 1)
        chunks, tokens = (
            passes[1 : len(ids) // 16],
            passes[len(ids) // 16 :],
        )  # with the first, views are allocated and zeroed
        assert len(chunks) == len(ids) // 16 - 1 and len(tokens) == count
        hp, layers = model.hparams, model.hparams.n_layers
        a = shape_of(hp.layers[0].n_kv_heads, hp.layers[0].n_heads // hp.layers[0].n_kv_heads, hp.layers[0].head_dim)
        query = a.heads * 4 * a.query_bytes + 128  # a block of query tiles, and the stamps of the results
        for c, rows in ((chunks, 16), (tokens, 1)):
            assert all(x.resident_bytes == 0 and x.runs == layers for x in c)
            most = layers * (query + a.heads * a.key_bytes * (1 + -(-rows // a.LK)))
            assert all(0 < x.bytes_up <= most for x in c), ([x.bytes_up for x in c], most)
        assert not engine.device.failures


def test_weights_are_written_once() -> None:
    """linear_rows: after the first run only rows of codes are uploaded, and the stamps of the results."""
    rng = np.random.default_rng(0)
    with NpuDevice("sim") as device:
        w = rng.normal(size=(300, 160)).astype(np.float32)
        up = []
        for rows in (40, 40, 7):
            x = rng.normal(size=(rows, 160)).astype(np.float32)
            before = device.host.counters.bytes_up
            (got,) = _prepared(device, x, w)
            assert np.allclose(got, ORACLE["linear_rows"](x, w)[0], rtol=1e-5, atol=1e-5)
            up.append(device.host.counters.bytes_up - before)
        assert up[0] > w.size and up[1] == up[2] == 64 * 256 + 128  # K = 160 in two tiles of 128
        assert device.memory()["tiled"] == device.host.counters.resident_bytes > 0


def _prepared(device: NpuDevice, x: np.ndarray, w: np.ndarray) -> Any:
    """The function itself, with its design built as compile() would."""
    from hybrid.kernels.npu.build import build_sim
    from hybrid.kernels.npu.designs import gemm_i8
    from hybrid.kernels.npu.ops import choose

    build_sim(gemm_i8(choose(len(x), x.shape[1], len(w), "i8", "i32")), device.host.folder)
    return OPS["linear_rows"](device, x=x, w=w)


def test_a_cache_that_was_written_elsewhere_is_read_again() -> None:
    """A pass without the NPU: Transfers records it, and the next pass's numbers are right."""
    with hybrid.load(FILE, "cpu", ATTENTION, ctx=64, npu="sim") as model:
        engine, ids = model.engine, model.encode("def read_file(path):")
        wanted = model.logits(ids)
        device: Any = engine.device
        held = engine.device.read("kv.0.k")
        for name in ("kv.0.k", "kv.0.v"):
            engine.device.write(name, Tensor(held.dtype, held.shape, tuple(p[::-1].copy() for p in held.parts)))
        forgotten: list[str] = []
        forget = device.others["npu"].forget
        device.others["npu"].forget = lambda name: (forgotten.append(name), forget(name))
        again = model.logits(ids)
        assert {"kv.0.k", "kv.0.v"} == set(forgotten) and np.abs(again - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_attention_refuses_a_cache_of_codes() -> None:
    """Its views are copies of numbers; the error names the step, the accepted types and the fix."""
    says = r"blk\.0\.attention: .*backends\.npu\.dtypes\.k_cache: q8_0 is not allowed; allowed: f32, f16; choose one of them by kv"
    with pytest.raises(SpecError, match=says):
        hybrid.load(FILE, "cpu", ATTENTION, ctx=64, npu="sim", kv="q8_0")


def test_projections_run_beside_a_cache_of_codes() -> None:
    """Where attention stays on the main device the NPU never sees the cache."""
    with hybrid.load(FILE, "cpu", ctx=64) as alone:
        wanted = alone.logits(ids := alone.encode("def read_file(path):"))
    with hybrid.load(FILE, "cpu", "gemma3-hybrid", ctx=64, npu="sim", kv="q8_0") as model:
        found = model.logits(ids)
        assert model.engine.device.read("kv.0.k").dtype == "q8_0" and not model.engine.device.failures
        runs = model.engine.device.others["npu"].host.counters.runs
        assert runs > 0 and np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()
