"""What streams, teacher forcing and void passes use of an engine: they are called by it, and import this in its
place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hybrid.checkpoint import Checkpoint
from hybrid.core.device import Device, Program
from hybrid.core.plan import TensorDecl
from hybrid.engine.choosing import Choosing
from hybrid.engine.chunks import Chunk
from hybrid.engine.inbox import Rows
from hybrid.engine.kv import BlockTables
from hybrid.engine.lock import EngineLock
from hybrid.engine.sampling import Sampling
from hybrid.planning.cache import CacheShape
from hybrid.planning.passes import PassSizes
from hybrid.planning.planner import Target
from hybrid.spec.schedule import Phase
from hybrid.spec.step import Option


class PassRunner(Protocol):
    """See Engine, which has all of these."""

    checkpoint: Checkpoint
    device: Device
    target: Target
    choosing: Choosing
    tables: BlockTables
    sizes: PassSizes
    cache: CacheShape
    lock: EngineLock
    positions: dict[int, int]
    cooperative: bool
    faults: list[str]

    def admit(self, length: int | None = None, sampling: Sampling | None = None) -> int: ...
    def release(self, slot: int) -> None: ...
    def check(self, prompts: Mapping[int, Sequence[int]]) -> None: ...
    def submit_prefill(self, prompts: Mapping[int, Sequence[int]]) -> int: ...
    def submit_decode(self, slots: Sequence[int], times: int = 1) -> int: ...
    def run_chunk(self, chunk: Chunk, program: Program) -> int: ...
    def rewind(self, slot: int, position: int, anyway: bool = False) -> bool: ...
    def wait(self, ticket: int | None = None) -> None: ...
    def token(self, slot: int, position: int, ticket: int | None = None) -> int: ...
    def result(self, decl: TensorDecl) -> None: ...
    def next_pipeline_slot(self) -> int: ...
    def forget_programs(self, phase: Phase) -> None: ...
    def submit_scheduled(self, program: Program, rows: Rows | None) -> int: ...
    def settle(self) -> None: ...
    def warm_up(self, rows: int = 1, options: Collection[Option] = ()) -> None: ...

    def program(
        self,
        phase: Phase,
        rows: int,
        outs: int,
        capture: bool = False,
        sample: bool = True,
        pipeline_slot: int = 0,
        options: Collection[Option] = (),
    ) -> Program: ...
