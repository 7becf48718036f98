"""The device `cpu`: a plan run by the oracle's functions in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybrid.kernels.host.device import HostDevice
from hybrid.kernels.oracle import ORACLE


class CpuDevice(HostDevice):
    """hybrid.core.device.Device on NumPy.

    memory, memory_budget, guard, products, ops: see HostDevice. overrides: functions that replace the oracle's, by operation
    (mutation tests)."""

    backend = "cpu"

    def __init__(
        self,
        *,
        memory: int | None = None,
        memory_budget: int | None = None,
        overrides: Mapping[str, Callable[..., tuple[np.ndarray, ...]]] | None = None,
        guard: int = 0,
        products: bool = True,
        ops: Mapping[str, Any] | None = None,
    ) -> None:
        functions = {**ORACLE, **(overrides or {})}
        super().__init__(
            "cpu", functions, memory=memory, memory_budget=memory_budget, guard=guard, products=products, ops=ops
        )
