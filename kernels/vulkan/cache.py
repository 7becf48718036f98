"""Addressing of the paged KV cache: checks, and the numbers in push constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.core.dtypes import CACHE_TYPES
from hybrid.core.plan import Step
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.tensors import DeviceTensor


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Position p of slot s is in block table[s, p // block_size], line p % block_size."""

    dtype: str
    block_size: int
    table_width: int
    slots: int
    blocks: int

    @property
    def context(self) -> int:
        """Positions that a sequence's block table covers."""
        return self.table_width * self.block_size


def cache_layout(step: Step, t: Mapping[str, DeviceTensor]) -> CacheLayout:
    """Layout of a step's k_cache, v_cache [B,BS,HK,D] and block_table [S,MB]. VulkanError for one that the kernels
    cannot address."""
    d, dtype = step.bind["D"], t["k_cache"].dtype
    if d % 16:
        raise VulkanError(f"step {step.name}: the Vulkan kernels need a head_dim that is a multiple of 16, not D = {d}")
    if dtype == "q8_0" and d % 32:
        raise VulkanError(
            f"step {step.name}: a q8_0 KV cache has blocks of 32 elements of a head: D = {d} is no multiple"
        )
    if dtype not in CACHE_TYPES or t["v_cache"].dtype != dtype:
        raise VulkanError(
            f"step {step.name}: the KV cache must be {' or '.join(CACHE_TYPES)} (k and v alike), not "
            f"{dtype} and {t['v_cache'].dtype}"
        )
    slots, width = t["block_table"].shape
    blocks, block_size = t["k_cache"].shape[:2]
    return CacheLayout(dtype, block_size, width, slots, blocks)
