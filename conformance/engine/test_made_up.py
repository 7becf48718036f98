"""Made-up models for features that no family needs yet: embedding rows in a prompt, spans with full attention, live
counts of a step, and an encoder before a decoder. Checked by the equations, on cpu and Vulkan."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.support.devices import open_backend
from conformance.support.paths import SPECS
from conformance.support.plain_gemma3 import forward
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core.device import Device
from hybrid.core.errors import SpecError
from hybrid.core.tensor import Tensor
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options, Request
from hybrid.engine.runner import Runner, Stack
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.spec.load import read_toml
from hybrid.spec.schedule import Schedule, read_schedule

GEMMA3 = SPECS / "schedules" / "gemma3.toml"
ROWS = 48
IDS = [2, *range(20, 92), 7, 9, 300, 31]  # longer than two blocks
VOCAB = 320
ANSWER = Options(max_tokens=6, ignore_eos=True)


def schedule(inputs: bool = False, live: str = "") -> Schedule:
    """Gemma 3's schedule, with rows and spans (`inputs`), or with feed-forwards whose live rows `live` counts."""
    tables: dict[str, Any] = copy.deepcopy(dict(read_toml(GEMMA3)))
    if inputs:
        tables["tensors"]["rows"] = {"kind": "io", "dtype": "f32", "shape": [str(ROWS), "H"]}
        tables["tensors"]["span_last"] = {"kind": "io", "dtype": "i32", "shape": ["S", "C"]}
        embed = next(step for step in tables["before"] if step["op"] == "embed")
        embed["args"]["x"] = "embedded"
        at = tables["before"].index(embed) + 1
        tables["before"][at:at] = [
            {
                "name": "insert_rows",
                "op": "insert_rows",
                "args": {"x": "embedded", "y": "x.0"},
                "attrs": {"first": "vocab"},
            },
            {"name": "row_views", "op": "row_views", "phase": "prefill"},
        ]
        for step in tables["layer"]:
            if step["op"] == "attention":
                step["args"]["positions"] = "sees"
    if live:
        tables["tensors"]["experts"] = {"kind": "state", "dtype": "u32", "shape": ["8"]}
        next(step for step in tables["layer"] if step["op"] == "fused_ffn")["live"] = live
    return read_schedule("made-up.toml", tables, GEMMA3)


def model(folder: Path, **changes: Any) -> Checkpoint:
    return open_checkpoint(write_hf(folder, tiny(**{"vocab": VOCAB, **changes}), dtype="f32"))


def made(checkpoint: Checkpoint, device: Device, of: Schedule, **options: Any) -> Engine:
    return Engine(checkpoint, device, EngineConfig(**{"precision": "exact", "ctx": 128, **options}), schedule=of)


def logits(engine: Engine, ids: Sequence[int], **options: Any) -> np.ndarray:
    return np.concatenate([part.rows for part in engine.read_back([Request(0, ids, capture="logits", **options)])])


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max())


def answer(engine: Engine, ids: Sequence[int], **options: Any) -> tuple[list[int], int]:
    """The generated text, and the number of cached prompt tokens."""
    request = engine.request(ids, ANSWER, **options)
    engine.drive(request).result()
    return request.generated, request.cached


def named(places: Mapping[int, int]) -> tuple[list[int], dict[int, np.ndarray]]:
    """IDS with the ids of rows at some places, and the rows by id."""
    ids = list(IDS)
    for place, row in places.items():
        ids[place] = VOCAB + row
    draw = np.random.default_rng(3)
    return ids, {VOCAB + row: draw.normal(0, 1, 64).astype(np.float32) for row in places.values()}


def write(engine: Engine, rows: Mapping[int, np.ndarray]) -> None:
    for token, row in rows.items():
        engine.device.write("rows", Tensor.of(row[None]), token - VOCAB)


@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_rows_of_a_prompt_may_be_embeddings(tmp_path: Path, backend: str) -> None:
    """An encoder's results, or a picture's; the prefix cache finds them by content, wherever they are stored."""
    checkpoint = model(tmp_path)
    ids, rows = named({place: place - 30 for place in range(30, 40)})
    content = {token: 1000 + token for token in rows}
    with open_backend(backend) as device:
        engine = made(checkpoint, device, schedule(inputs=True))
        write(engine, rows)
        at = {place: rows[token] for place, token in enumerate(ids) if token in rows}
        assert close(logits(engine, ids, content=content), forward(checkpoint, ids, at)[0])
        first, cached = answer(engine, ids, content=content)
        assert cached == 0
        moved = {token: token + 20 for token in rows}
        write(engine, {moved[token]: row for token, row in rows.items()})
        elsewhere = [moved.get(token, token) for token in ids]
        content_there = {moved[token]: number for token, number in content.items()}
        assert answer(engine, elsewhere, content=content_there) == (first, 64), "the same content in other rows"
        other = {token: number + 1 for token, number in content.items()}
        assert answer(engine, ids, content=other) == (first, 0), "other content under the same ids"
        with pytest.raises(ValueError, match="token id 320 is outside the vocabulary of 320"):
            engine.request(ids, ANSWER)
        with pytest.raises(ValueError, match=f"token id {VOCAB + ROWS} is outside"):
            engine.request([2, VOCAB + ROWS], ANSWER, content={VOCAB + ROWS: 1})
        counted = Options(max_tokens=3, presence_penalty=1.0, ignore_eos=True)
        request = engine.request(ids, counted, content=content)
        engine.drive(request).result()  # the history of a slot has no row's id
        assert len(request.generated) == 3
    plain = made(checkpoint, CpuDevice(), schedule())
    with pytest.raises(ValueError, match="token id 320 is outside"):
        plain.request(ids, ANSWER, content=content)


SPANS = [(5, 20), (21, 40), (60, 61), (70, 77)]


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_spans_of_rows_see_themselves_whole(tmp_path: Path, backend: str, window: int) -> None:
    """As an encoder's rows do, and a picture's in a text; in chunks of any size, and from the cache."""
    checkpoint = model(tmp_path, window=window, layer_is_global=(window == 0, True, window == 0))
    wanted, _ = forward(checkpoint, IDS, spans=SPANS)
    with open_backend(backend) as device:
        engine = made(checkpoint, device, schedule(inputs=True), chunk=32, slots=3)
        assert not close(logits(engine, IDS), wanted)
        for rows in (0, 19, 24):
            assert close(logits(engine, IDS, spans=SPANS, rows=rows), wanted), f"{rows} rows of a pass"
        first, cached = answer(engine, IDS, spans=SPANS)
        best = forward(checkpoint, [*IDS, *first], spans=SPANS)[0][len(IDS) - 1 : -1]
        best[:, engine.target.n_tokens :] = -np.inf
        assert first == best.argmax(1).tolist() and cached == 0
        assert answer(engine, IDS, spans=SPANS) == (first, 64), "the second time"
        assert answer(engine, IDS)[1] == 0, "the same tokens without spans have other keys"
        assert close(logits(engine, IDS), forward(checkpoint, IDS)[0]), "in a slot that had spans"
        assert answer(engine, IDS, spans=[(5, 20), (21, 41)])[1] == 0, "a span that ends elsewhere, in the second block"
        assert answer(engine, IDS, spans=SPANS[:3])[1] == 64
        with pytest.raises(ValueError, match="33 positions that see one another do not fit into a pass"):
            engine.drive(engine.request(IDS, ANSWER, spans=[(0, 33)])).result()
    with pytest.raises(ValueError, match="spans must be parts of the prompt of 4 tokens, in order"):
        Request(0, [1, 2, 3, 4], spans=[(2, 4), (1, 2)])
    with pytest.raises(ValueError, match="no step row_views"):
        made(checkpoint, CpuDevice(), schedule()).request(IDS, ANSWER, spans=SPANS)


@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_spans_beside_sequences_that_decode(tmp_path: Path, backend: str) -> None:
    checkpoint = model(tmp_path)
    with open_backend(backend) as device:
        engine = made(checkpoint, device, schedule(inputs=True), chunk=32, slots=3)
        alone = [
            answer(engine, ids, spans=spans)[0] for ids, spans in ((IDS[:9], ()), (IDS, SPANS), (IDS[3:], [(2, 30)]))
        ]
        requests = [
            engine.request(ids, ANSWER, spans=spans)
            for ids, spans in ((IDS[:9], ()), (IDS, SPANS), (IDS[3:], [(2, 30)]))
        ]
        handles = [engine.drive(request) for request in requests]
        while not all(request.finish for request in requests):
            engine.drive_step()
        assert [request.generated for request in requests] == alone and len(handles) == 3


@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_a_step_may_have_counts_of_its_own(tmp_path: Path, backend: str) -> None:
    """As experts of a mixture have; here the host writes the counts. Rows beyond them are unchanged."""
    checkpoint = model(tmp_path)
    with open_backend(backend) as device:
        engine = made(checkpoint, device, schedule(live="experts:{l}"))
        step = next(s for s in engine.runner.plan("prefill", 32, 1).steps if s.op == "fused_ffn" and s.layer == 2)
        assert (step.counts, step.extent) == ("experts", "2")
        wanted, _ = forward(checkpoint, IDS[:9])
        for live in (9, 4):
            device.write("experts", Tensor.of(np.full(8, live, np.uint32)))
            found = logits(engine, IDS[:9])
            assert close(found[:live], wanted[:live])
        assert not close(found, wanted)
    for wrong in ("experts", "experts:8", "control:x", "tokens:0", "nowhere:1"):
        with pytest.raises(SpecError, match="live"):
            made(checkpoint, CpuDevice(), schedule(live=wrong))


@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_a_stack_of_layers_runs_before_another(tmp_path: Path, backend: str) -> None:
    """An encoder whose rows see one another. Its last layer's results are rows of the decoder's prompt, and stay on the
    device."""
    encoder, decoder = model(tmp_path / "e", n_layers=2, layer_is_global=(True, True), window=0), model(tmp_path / "d")
    with open_backend(backend) as device:
        engine = made(decoder, device, schedule(inputs=True))
        beside = device.sibling({"hidden.2": "rows"})
        stack = Stack(
            Runner(encoder, beside, EngineConfig(ctx=ROWS, chunk=ROWS, precision="exact"), schedule(inputs=True))
        )
        patches = Request(0, IDS[:ROWS], capture="hidden", spans=[(0, ROWS)])
        stack.scheduler.add(patches)
        flights = stack.run()
        assert len(flights) == 1 and beside.shares("hidden.2")
        ids, _ = named({place: place - 10 for place in range(10, 10 + ROWS)})
        content = {VOCAB + row: 7000 + row for row in range(ROWS)}
        found = logits(engine, ids, content=content)
        _, states = forward(encoder, IDS[:ROWS], spans=[(0, ROWS)])
        wanted, _ = forward(decoder, ids, {place: states[2][place - 10] for place in range(10, 10 + ROWS)})
        assert close(found, wanted)
        beside.wait(flights[0].ticket)
        stack.scheduler.commit(flights[0].scheduled, [])
        assert patches.finish == "length" and stack.scheduler.idle
        beside.close()
