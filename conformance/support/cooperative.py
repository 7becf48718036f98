"""Decode passes whose workgroups wait for one another, and the same by separate steps: engines and faults for tests."""

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
# Words of control that nothing else uses (mutants/mailbox): the length of the context from which a mutant is active,
# and which.
SINCE_WORD, MUTANT_WORD = 6, 7


@contextmanager
def tuned(device: Any, merge: int = 2, layer: bool = True) -> Iterator[None]:
    """Plans compiled inside merge attention so, and have a dispatch for each layer."""
    with ExitStack() as forced:
        forced.enter_context(device.tuning.forced("layer", LAYER if layer else {**LAYER, "workgroups": 0}))
        forced.enter_context(device.tuning.forced("decode_attention", {**ATTENTION, "merge": merge}))
        yield


def engine(device: Any, checkpoint: Any, **options: Any) -> Engine:
    """On a device that holds nothing else."""
    main_device(device).reset()
    return Engine(checkpoint, device, EngineConfig(weights="q8_0", **{"ctx": 96, "chunk": 16, **options}))


def set_control(made: Engine, words: dict[int, int]) -> None:
    """Words of control for every pass until the rows are set up anew. Waits for those before."""
    made.device.wait()
    control: np.ndarray = made.device.read(CONTROL_TENSOR).array
    control[list(words)] = list(words.values())
    made.device.write(CONTROL_TENSOR, Tensor.of(control))


def give_up(made: Engine) -> None:
    """As a kernel does whose wait times out: every pass from now on is aborted."""
    set_control(made, {FAULT_WORD: 1})


def layers(program: Any) -> int:
    """Dispatches of a Vulkan program that are a whole layer."""
    return sum(d.kernel.name.startswith("layer.") for d in program.recording.dispatches)
