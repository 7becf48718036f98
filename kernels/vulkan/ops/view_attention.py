"""view_attention: the kernels of attention, whose rows see the positions that `views` names."""

from __future__ import annotations

from hybrid.kernels.vulkan.ops.attention import record

__all__ = ["record"]
