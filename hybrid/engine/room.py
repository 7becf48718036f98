"""How many blocks of the KV cache a given memory has room for, said before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybrid.checkpoint import Checkpoint
from hybrid.core.device import Device
from hybrid.core.units import show_bytes
from hybrid.devices.opening import Opened, beside
from hybrid.engine.config import SHARING, EngineConfig, sizes_for
from hybrid.engine.weights import stored_types
from hybrid.planning.cache import CacheShape
from hybrid.planning.footprint import Footprint, footprint
from hybrid.planning.passes import capabilities_of, chunk_of, pass_sizes
from hybrid.planning.pipeline import pipeline_depth
from hybrid.spec.schedule import Schedule, find_schedule

BESIDE = 96 << 20
"""Bytes that are left to what no plan declares: staging, kernels' own scratch, command buffers."""
LEAST_KEPT = 16
"""Whole sequences that the cache may keep for prefixes, however few slots there are."""


class NoRoom(ValueError):
    """The memory does not hold the model with one sequence."""


@dataclass(frozen=True, slots=True)
class Room:
    """What goes where. sequences: of `context` positions, that the blocks hold at their longest."""

    memory: int
    weights: int
    rest: int
    """Activations, tables, what is read back, and BESIDE."""
    blocks: tuple[int, int]
    kv: int
    sequences: float
    context: int

    def line(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv, "activations and the rest": self.rest}
        shown = ", ".join(f"{what} {show_bytes(n)}" for what, n in parts.items())
        return f"memory {show_bytes(self.memory)}: {shown}: {self.sequences:.1f} sequences of {self.context} tokens"


def room_for(memory: int, held: Footprint, cache: CacheShape) -> Room:
    """Blocks for `memory` bytes. held: what the engine takes with `cache`, whose blocks are those of all slots. NoRoom
    says what is missing and what would fit."""
    rest = held.total - held.weights - held.kv_global - held.kv_local + BESIDE
    left = memory - held.weights - rest
    per_global, per_local = held.kv_global / cache.global_blocks, held.kv_local / cache.local_blocks
    one = per_global * cache.table + per_local * cache.ring
    if left < one:
        fits = int((left - per_local * cache.ring) // per_global) * cache.block if per_global else 0
        fix = f"ctx={fits} would fit" if fits >= cache.block else "use a smaller weight type"
        raise NoRoom(
            f"memory {show_bytes(memory)} is too little: weights take {show_bytes(held.weights)}, activations and the rest "
            f"{show_bytes(rest)}, one sequence of {cache.ctx} tokens {show_bytes(int(one))}, together "
            f"{show_bytes(int(held.weights + rest + one))}: {fix}, or give it more"
        )
    sequences = min(left / one, max(2 * cache.slots, LEAST_KEPT))
    blocks = (int(sequences * cache.table), int(sequences * cache.ring))
    kv = int(blocks[0] * per_global + blocks[1] * per_local)
    return Room(memory, held.weights, rest, blocks, kv, sequences, cache.ctx)


def with_room(
    opened: Opened, schedule: Schedule, config: EngineConfig, checkpoint: Checkpoint
) -> tuple[Opened, Schedule]:
    """The family's schedule, or where memory has no room for its weights the one that it names for that; `passed_over`
    says why."""
    if not schedule.schedule.without_room or not (missing := lacking(config, checkpoint, opened.device, schedule)):
        return opened, schedule
    instead = find_schedule(schedule.schedule.without_room)
    why = f"schedule {schedule.schedule.name}: {missing}; so {instead.schedule.name}"
    return beside(replace(opened, passed_over=(*opened.passed_over, why)), instead), instead


def lacking(config: EngineConfig, checkpoint: Checkpoint, device: Device, schedule: Schedule) -> str:
    """What is missing for a model by this schedule in `config.memory`, or in what the device has left; empty where
    nothing is, or the device does not know what it has."""
    memory = device.available if config.memory is None else config.memory
    if memory is None:
        return ""
    try:
        fitted(replace(config, memory=memory), checkpoint, device, schedule)
    except NoRoom as error:
        return str(error)
    return ""


def fitted(
    config: EngineConfig, checkpoint: Checkpoint, device: Device, schedule: Schedule
) -> tuple[EngineConfig, Room | None]:
    """The configuration with as many blocks as `config.memory` has room for; with `shared`
    slots that share those of one sequence; as it is where neither is asked for."""
    hp = checkpoint.hparams
    alone = device.pipeline_depth > 1 or (
        config.deterministic and device.backend == "cpu"
    )  # runs one sequence at a time
    if config.shared and not alone:
        config = replace(config, slots=SHARING)
        rows = sizes_for(config, hp, device).rows[-1]
        one = CacheShape.of(hp, config.context(hp), 1, rows)
        config = replace(config, blocks=(one.table, one.ring))
    if config.memory is None:
        return config, None
    capabilities = capabilities_of(device.has)
    context, chunk = config.context(hp), chunk_of(capabilities) if config.chunk is None else config.chunk
    weights = stored_types(checkpoint, config.weights, device.backend)
    held = footprint(
        hp,
        weights,
        batch=config.slots,
        context=context,
        chunk=chunk,
        precision=config.precision,
        kv=config.kv,
        capabilities=capabilities,
        again=device.second_layout,
        schedule=schedule,
        device=device.backend,
    )
    rows = pass_sizes(hp, context, config.slots, chunk).rows[-1]
    room = room_for(config.memory, held, CacheShape.of(hp, context, config.slots, rows, pipeline_depth(schedule)))
    return replace(config, blocks=room.blocks), room
