"""Types of bindings and fused groups: how steps become dispatches.

A binding records one step. A fused group records consecutive steps in fewer dispatches, mostly one. Some groups keep
the number of dispatches but pass kept partials between them.

A fused group writes every tensor that its steps would write. So conformance judges each step by its own operation's
definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

Tensors = Mapping[str, DeviceTensor]
"""By argument name."""
Binding = Callable[[Recorder, Any, Tensors], None]
"""Records one step (hybrid.core.plan.Step)."""
Group = Callable[[Recorder, Sequence[Step], Sequence[Tensors]], bool]
"""Records these steps. Returns False, with nothing recorded, where the kernel does not fit."""
