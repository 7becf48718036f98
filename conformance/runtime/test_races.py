"""Races between dispatches: the interpreter reports a missing barrier, and every read, write and barrier of the
families' plans is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.support.devices import INTERPRETED, Devices, open_backend
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, tiny_gemma3n, tiny_gemma4, write_hf
from hybrid.devices.opening import Opened
from hybrid.engine.request import Request
from hybrid.engine.speculation import Lookup
from hybrid.harness.interpreter.races import sweep
from hybrid.harness.interpreter.values import Fault
from hybrid.kernels.vulkan.kernel import kernels_digest

pytestmark = pytest.mark.slow

RADEON: dict[str, Any] = {"tuning": "radv", "without": ("matrix_lanes", "fused_halves")}
SIZES = {"hidden": 128, "head_dim": 32, "n_layers": 2, "window": 16}
MODELS = {"gemma3": tiny(ffn=192, **SIZES), "gemma3n": tiny_gemma3n(), "gemma4": tiny_gemma4()}
RUNS = [(name, table) for name in MODELS for table in ("nvidia", "radv")]
MANY = 4 if LONG else 3  # three run the same programs
DRAWN: dict[str, Any] = {"max_tokens": MANY, "ignore_eos": True}
ASKED: tuple[dict[str, Any], ...] = ({"temperature": 0.7}, {"logprobs": 2}, {"repetition_penalty": 1.3})
PLAIN = {**DRAWN, "speculate": 0}

UNNEEDED = {("barrier", "linear.gemv.f32.f32, linear.gemv.f32.f32")}
"""altup_unembed's products write columns of one result, which slices do not tell apart."""


class Always(Lookup):
    """Drafts whatever the text."""

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {request: [5] * most for request, most in wanted.items()}


def open_model(folder: Path, table: str) -> hybrid.Model:
    device = open_backend(INTERPRETED, **(RADEON if table == "radv" else {}))
    opened, how = Opened(device, device), {"ctx": 64, "slots": 3, "weights": "q4_0"}  # type: ignore[arg-type]
    return hybrid.load(folder, opened, draft=Always(), speculate=1, **how)


@pytest.mark.parametrize(("name", "table"), RUNS if LONG else [RUNS[int(kernels_digest(), 16) % len(RUNS)]])
def test_every_read_write_and_barrier_is_needed(name: str, table: str, tmp_path: Path) -> None:
    """Without a read or a barrier two dispatches race; without a write the recording is refused. Prompts, sequences
    alone and together, drafts, sampling options."""
    found = Counter[tuple[str, str]]()
    with open_model(write_hf(tmp_path, MODELS[name], dtype="f32"), table) as model:
        handles = [
            model.submit([2, *range(5, 5 + n)] * 2, **PLAIN, **asked)
            for n, asked in zip((3, 9, 14), ASKED, strict=True)
        ]
        assert all(len(h.result().ids) == MANY for h in handles)
        assert len(model.submit([2, 7, 8], **PLAIN).result().ids) == MANY
        assert model.submit([2, 7, 8], **DRAWN).result().usage.drafted_tokens
        for program in model.engine.device.programs:
            found += sweep(program.recording, program.logs) if program.logs else Counter()
        assert not model.engine.faults
    print(f"\n{name}, {table}: {dict(sorted(found.items()))}")
    unneeded = {key for key in found if key[1] not in ("same", "race", "refused")}
    assert unneeded <= UNNEEDED, found
    assert found["barrier", "race"] and found["read", "race"] and found["write", "refused"]


def test_a_missing_barrier_is_a_race(devices: Devices, tmp_path: Path) -> None:
    with open_model(write_hf(tmp_path, MODELS["gemma3"], dtype="f32"), "nvidia") as model:
        model.submit([2, 7, 8], **PLAIN).result()
        program = next(p for p in model.engine.device.programs if p.logs)
        at = next(i for i, b in enumerate(program.recording.barriers) if b)
        program.recording.barriers[at] = None
        with pytest.raises(
            Fault, match=f"dispatch {at} .* has no barrier after dispatch .* is read after it is written"
        ):
            program.submit()
