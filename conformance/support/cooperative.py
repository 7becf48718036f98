"""Decode passes whose workgroups wait for one another, against separate steps: engines and faults for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from conformance.support.devices import main_device
from conformance.support.synthetic import tiny
from hybrid.core.plan import CONTROL_TENSOR, FAULT_WORD
from hybrid.core.tensor import Tensor
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine

HPARAMS = tiny(
    n_layers=2, head_dim=32, ffn=576
)  # 18 blocks of h for at most 16 workgroups: several compute the last two
LAYER = {"workgroups": "1 * cores", "threads": 256}
# KV splits of few positions, so that several workgroups have partial results of a head.
ATTENTION = {"groups": "2 * cores", "min_split": 16, "subgroups": 8, "ahead": 2}
# Unused control words (mutants/workgroup_flags): the context length from which a mutant is active, and the mutant's number.
SINCE_WORD, MUTANT_WORD = 6, 7


@contextmanager
def tuned(device: Any, merge: int = 2, layer: bool = True) -> Iterator[None]:
    """Merge attention in plans compiled inside the context: one dispatch for each layer."""
    with ExitStack() as forced:
        forced.enter_context(device.tuning.forced("layer", LAYER if layer else {**LAYER, "workgroups": 0}))
        forced.enter_context(device.tuning.forced("decode_attention", {**ATTENTION, "merge": merge}))
        yield


def engine(device: Any, checkpoint: Any, **options: Any) -> Engine:
    """An engine on an otherwise empty device."""
    main_device(device).reset()
    return Engine(checkpoint, device, EngineConfig(weights="q8_0", **{"ctx": 96, "chunk": 16, **options}))


def set_control(made: Engine, words: dict[int, int]) -> None:
    """Set control words for every pass until the rows are set up again. Waits for earlier passes."""
    made.device.wait()
    control: np.ndarray = made.device.read(CONTROL_TENSOR).array
    control[list(words)] = list(words.values())
    made.device.write(CONTROL_TENSOR, Tensor.of(control))


def give_up(made: Engine) -> None:
    """Set the fault of a wait that timed out: every later pass is aborted."""
    set_control(made, {FAULT_WORD: 1})


def layers(program: Any) -> int:
    """Number of dispatches of a Vulkan program that run a whole layer."""
    return sum(d.kernel.name.startswith("layer.") for d in program.recording.dispatches)
