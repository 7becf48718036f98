"""What workgroups tell one another while they run (mail.slang): a layer that begins before attention has ended makes the bits
that it makes behind a barrier, and what was told is forgotten when all have heard it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from conformance.devices import Devices, left_zero, need_compiler, open_backend, spy_kernels
from conformance.mutate import Saboteur, load, mutated_spirv
from conformance.synthetic import tiny, write_hf
from conformance.test_engine_cpu import IDS
from hybrid.checkpoint import open_checkpoint
from hybrid.engine import Engine

pytestmark = pytest.mark.slow

LAYER = {"workgroups": 132, "threads": 256}
# Stretches of few positions, so that several workgroups have parts of a head.
ATTENTION = {"groups": 264, "min_split": 16, "subgroups": 8, "ahead": 2}
SABOTEURS = list(load(Path(__file__).parent / "saboteurs" / "mail"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_checkpoint(write_hf(tmp_path_factory.mktemp("mail"), tiny(head_dim=32), dtype="f32"))


def decode(device: Any, checkpoint: Any, merge: int, tell: int) -> tuple[list[int], bytes, int]:
    """Tokens, the bits of the last layer's keys, and the barriers of a token. Nothing told may be left."""
    device.reset()
    with ExitStack() as forced:
        forced.enter_context(device.tuning.forced("layer", LAYER))
        forced.enter_context(device.tuning.forced("decode_attention", {**ATTENTION, "merge": merge, "tell": tell}))
        made = Engine(checkpoint, device, weights="q8_0")
        tokens = [made.prefill({0: IDS[:40]})[0], *made.decode(24)[0]]
        programs = [p for p in device.programs if any("layer." in d.kernel.name for d in p.recording.dispatches)]
        assert programs, "no layer was recorded as one dispatch"
        device.wait()
        assert all(left_zero(device, program) for program in programs)
        keys = device.read(f"kv.{checkpoint.hparams.n_layers - 1}.k")
        assert any(part.any() for part in keys.parts)
        return tokens, b"".join(p.tobytes() for p in keys.parts), programs[0].barriers


@pytest.mark.parametrize("merge", [1, 2])
def test_a_layer_that_begins_early_makes_the_same_text(devices: Devices, checkpoint: Any, merge: int) -> None:
    device = devices.get("vulkan")
    behind, early = (decode(device, checkpoint, merge, tell) for tell in (0, 1))
    assert early[:2] == behind[:2]
    assert behind[2] - early[2] == checkpoint.hparams.n_layers - 1  # one barrier less for each layer but the last


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=lambda s: s.name)
def test_caught(devices: Devices, checkpoint: Any, saboteur: Saboteur, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiler()
    sound = devices.get("vulkan")
    chosen = spy_kernels(sound, monkeypatch)
    wanted = decode(sound, checkpoint, 2, 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_backend("vulkan", spirv=mutated_spirv(saboteur, chosen, tmp_path)) as device, pytest.raises(AssertionError):
        assert decode(device, checkpoint, 2, 1) == wanted
