"""TLB prefetch: every page is read before its use, the plan is otherwise unchanged, and only large models get it."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from conformance.engine.test_engine_cpu import IDS
from conformance.engine.test_planner import target
from conformance.support.devices import shared_device
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import greedy
from hybrid.checkpoint import open_checkpoint
from hybrid.core.plan import Plan, Step
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.kernels.vulkan import tlb_prefetch
from hybrid.kernels.vulkan.dry import DryDevice, record
from hybrid.kernels.vulkan.program import Program
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tlb_prefetch import AHEAD, SLICES, prefetch
from hybrid.kernels.vulkan.tuning import Tuning
from hybrid.planning.planner import plan

NEVER = 0x9E3779B9  # the sum at which tlb_prefetch.slang stores
PAGE = 4096


@pytest.fixture
def device():
    with shared_device("vulkan") as opened:
        yield opened
        opened.check_validation()


@pytest.mark.parametrize("copies", [1, 3])
def test_a_word_of_every_page_of_every_slice_is_read(device, copies):
    """The kernel stores where the words that it reads have a known sum: single words are set to nonzero, one after
    another."""
    pool = device.memory_pool
    sizes = [PAGE * 70 + 20, PAGE, PAGE + 4, 8, PAGE * 2, 64, 256, 512]
    slices = [pool.allocate(n, "scratch") for n in sizes]
    rec = Recorder(device, slices[0])
    prefetch(rec, slices, copies, PAGE)
    program = Program(device, Plan("prefetch", 1, 0, (Step("prefetch", "prefetch", {}, {}),), {}), rec, False)
    ((sink, _),) = program.owned

    def stores(piece, word):
        values = np.zeros(piece.size // 4, np.uint32)
        values[word] = NEVER
        device.put(piece, values.view(np.uint8))
        device.put(sink, np.full(sink.size, 0xFF, np.uint8))
        device.wait(program.submit())
        out = np.zeros(sink.size, np.uint8)
        device.transfer.download(sink, out)
        device.put(piece, np.zeros(piece.size, np.uint8))
        return int(out.view(np.uint32)[0]) == 0

    for piece in slices:
        device.put(piece, np.zeros(piece.size, np.uint8))
    for piece in slices:
        last = piece.size // 4 - 1
        for word in {*range(0, last, PAGE // 4), last}:
            assert stores(piece, word), (piece.size, word)
    assert not stores(slices[0], 1) and not stores(slices[0], PAGE // 4 + 9)
    program.close()
    for piece in slices:
        pool.release(piece, "scratch")


def recorded(copies: int, rows: int = 1):
    device, made = DryDevice(), plan(target(), rows, rows, "decode")
    with device.tuning.forced("tlb_prefetch", {"copies": copies}):
        return made, record(made, device)


def test_a_plan_gains_prefetches_and_nothing_else():
    """No extra barrier; the one after begin_pass, which writes control, moves to the prefetch, which is bound to
    control too."""
    _, plain = recorded(0)
    _, prefetched = recorded(8)
    kept = [d for d in prefetched.dispatches if d.kernel.name != "tlb_prefetch"]
    assert [(d.kernel.name, d.push, d.grid, d.step) for d in kept] == [
        (d.kernel.name, d.push, d.grid, d.step) for d in plain.dispatches
    ]
    assert len(kept) < len(prefetched.dispatches)
    assert sum(b is not None for b in prefetched.barriers) == sum(b is not None for b in plain.barriers)
    pairs = zip(prefetched.dispatches, prefetched.barriers, strict=True)
    waits = [d.step for d, b in pairs if d.kernel.name == "tlb_prefetch" and b]
    assert waits == [0]


def test_every_weight_is_prefetched_a_few_steps_before_its_step():
    made, prefetched = recorded(8)
    sizes = {}  # of what each step's dispatches read, by step
    for d in prefetched.dispatches:
        if d.kernel.name != "tlb_prefetch":
            sizes.setdefault(d.step, []).extend(s.size for s in d.slices)
    found = [d for d in prefetched.dispatches if d.kernel.name == "tlb_prefetch"]
    assert len(found) > len(made.steps) // 2
    for d in found:
        count, _, *words = struct.unpack(f"<{2 + SLICES}I", d.push)
        later = sizes[(d.step + AHEAD) % len(made.steps)]
        assert d.grid == (8 * count, 1, 1) and 1 <= count <= SLICES
        assert all(any(w == n // 4 for n in later) for w in words[:count])


@pytest.mark.parametrize("pool", [1 << 30, 0])
def test_a_kv_cache_is_touched_whole_or_not_at_all(monkeypatch, pool):
    """A large one has more pages than a pass reads, and its page walks would delay those of weights."""
    monkeypatch.setattr(tlb_prefetch, "POOL", pool)
    made, prefetched = recorded(8, rows=2)
    caches = {t.nbytes // 4 for n, t in made.tensors.items() if n.startswith("kv.")}
    weights = {t.nbytes // 4 for t in made.tensors.values() if t.kind == "weight"}
    touched = set()
    for d in prefetched.dispatches:
        if d.kernel.name == "tlb_prefetch":
            count, _, *words = struct.unpack(f"<{2 + SLICES}I", d.push)
            touched |= set(words[:count])
    assert caches and not caches & weights, "the model's sizes distinguish caches from weights"
    assert caches <= touched if pool else not caches & touched


def test_only_passes_of_few_rows_that_read_much_get_them_and_only_where_it_was_measured():
    def copies(table: str, mib: int, rows: int) -> int:
        return Tuning(table).choose("tlb_prefetch", {"copies": 0}, mib=mib, rows=rows)["copies"]

    assert copies("nvidia", 15000, 2) == copies("nvidia", 17000, 1) == copies("nvidia", 6315, 32) == 8
    assert copies("nvidia", 15000, 1) == 0, "a layer in one dispatch has none"
    assert copies("nvidia", 2500, 1) == copies("nvidia", 15000, 512) == 0
    assert copies("default", 15000, 1) == copies("lavapipe", 15000, 1) == copies("radv", 15000, 1) == 0


@pytest.mark.slow
def test_text_is_the_same_with_prefetches(tmp_path, device):
    checkpoint, texts = open_checkpoint(write_hf(tmp_path, tiny(), dtype="f32")), []
    for copies in (0, 8):
        with device.tuning.forced("tlb_prefetch", {"copies": copies}):
            made = Engine(checkpoint, device, EngineConfig(chunk=16, weights="q4_0"))
            texts.append((*greedy(made, IDS, 13), made.runner.program("decode", 1, 1).dispatches))
        device.reset()
    assert texts[0][:-1] == texts[1][:-1] and texts[0][-1] < texts[1][-1]
