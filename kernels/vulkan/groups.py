"""How steps become dispatches: the types of a binding, which records one step, and of a fused group's recorder, which
records consecutive steps in fewer dispatches, mostly one, where one kernel computes what their operations do together,
or in as many that hand a result on as their own bindings do not.

A fused group leaves in memory what its steps would have left one after another: every tensor that one of them writes.
So its proof needs no definition of its own: conformance judges each step by its operation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

Tensors = Mapping[str, DeviceTensor]
"""By the operation's argument."""
Binding = Callable[[Recorder, Any, Tensors], None]
"""Records one step (hybrid.core.plan.Step)."""
Group = Callable[[Recorder, Sequence[Step], Sequence[Tensors]], bool]
"""Records these steps; False, with nothing recorded, where the kernel does not fit."""
