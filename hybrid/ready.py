"""Make an engine and its drafter for a checkpoint. On an error everything opened here is closed."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from hybrid.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from hybrid.core import garbage
from hybrid.core.device import Device
from hybrid.devices.opening import NpuKind, Opened, open_again, opening_devices
from hybrid.engine.assistant import Assistant, check_pair, lent_to
from hybrid.engine.loading import EngineConfig, LoadClock, OverBudget, fitted, with_budget
from hybrid.engine.loop import QUEUE, Engine
from hybrid.engine.runner import Runner
from hybrid.engine.speculation import LENT, Drafter, DraftModel, Lookup
from hybrid.kernels.host.memory import usable_bytes
from hybrid.spec.schedule import Schedule, find_schedule, named_schedule


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine with compiled programs; `close` closes its devices but not the checkpoint."""

    opened: Opened
    engine: Engine

    def close(self) -> None:
        self.opened.device.close()


def ready(
    checkpoint: Checkpoint,
    device: str | Opened,
    schedule: str | os.PathLike[str] | Schedule | None,
    config: EngineConfig,
    clock: LoadClock | None = None,
    npu: NpuKind = "npu",
    warm: bool = False,
    queue: int = QUEUE,
    prove: bool = True,
) -> Ready:
    """Open devices and make an engine; arguments as of hybrid.load. clock: records load times."""
    named, clock, given = schedule, clock or LoadClock(), schedule is not None
    if schedule is None:
        schedule = find_schedule(checkpoint.hparams.family)
    elif not isinstance(schedule, Schedule):
        schedule = named_schedule(os.fspath(schedule))
    with opening_devices(schedule, device, npu) if isinstance(device, str) else nullcontext(lambda: device) as found:
        with clock.phase("tokenizer"):
            checkpoint.tokenizer  # noqa: B018 (made at first use)
        with clock.phase("device"):
            opened = found()
    try:
        if not given:
            opened, schedule, config = with_budget(opened, schedule, config, checkpoint)
        engine = Engine(checkpoint, opened.device, config, schedule=schedule, clock=clock, queue=queue)
        with clock.phase("pipelines"):
            engine.runner.warm_up()
            if warm:
                engine.runner.warm()
        garbage.trim()
        with clock.phase("proof"):
            right = not prove or proved(opened, checkpoint, config, schedule)
    except BaseException:
        opened.device.close()
        raise
    if right:
        return Ready(opened, engine)
    opened.device.close()
    if not isinstance(device, str):
        raise RuntimeError(f"{opened.main.name} computes wrong results (python -m hybrid.prove): open it again")
    return ready(checkpoint, device, named, config, clock, npu, warm, queue, prove)


def has_room(checkpoint: Checkpoint, device: Device, config: EngineConfig, schedule: str | None = None) -> bool:
    """Whether a model fits the device's free memory: with every weight and a full context for each slot; of an embedding
    model one longest text. schedule: by name (default: the family's)."""
    free = usable_bytes() if device.available is None else device.available
    embeds = checkpoint.hparams.dimensions > 0
    if config.memory is not None and not embeds:
        return config.memory <= free
    found = find_schedule(checkpoint.hparams.family) if schedule is None or embeds else named_schedule(schedule)
    try:
        _, budget = fitted(replace(config, memory=free, blocks=(0, 0)), checkpoint, device, found)
    except OverBudget:
        return False
    return budget is not None and not budget.spill and budget.sequences >= (1 if embeds else config.slots)


def proved(opened: Opened, checkpoint: Checkpoint, config: EngineConfig, schedule: Schedule) -> bool:
    """Whether the main device computes the model's plans rightly (hybrid.proving.first_load)."""
    if opened.main.backend != "vulkan":
        return True
    from hybrid.proving import Subject, first_load

    return first_load(opened.main, Subject(checkpoint, config, schedule))  # type: ignore[arg-type]  # by its backend


def drafter_for(
    model: Ready,
    draft: str | os.PathLike[str] | Checkpoint | Drafter | None,
    slots: int | None,
    warm: bool = False,
    prove: bool = True,
) -> Drafter:
    """The drafter for hybrid.load's `draft`. warm, prove: as of hybrid.load. ValueError for a draft model with a
    different tokenizer or a shorter context, or if the engine cannot verify drafts."""
    if model.engine.sizes.wanted < 2:
        raise ValueError(
            "deterministic on cpu runs one row a pass, so it cannot verify drafts: load without draft and speculate"
        )
    if draft is None or draft == "lookup":
        return Lookup()
    if not isinstance(draft, str | os.PathLike | Checkpoint):
        return draft
    found = draft if isinstance(draft, Checkpoint) else open_checkpoint(draft)
    if found.hparams.backbone:
        return assistant_for(model, found, warm, prove)
    opened: Opened | None = None
    try:
        _check_pieces(found, model.engine.checkpoint)
        ctx = model.engine.cache.ctx
        if ctx > found.hparams.context_length:
            raise ValueError(
                f"{found.path}: as a draft it needs the model's context of {ctx} tokens, and was made for "
                f"{found.hparams.context_length}: load with ctx={found.hparams.context_length}"
            )
        schedule = find_schedule(found.hparams.family)
        opened = open_again(model.opened, schedule, LENT)
        config = EngineConfig(ctx=ctx, slots=1 if slots is None else slots, shared=slots is None)
        if prove:
            _check_proved(opened, found, config, schedule)
        runner = Runner(found, opened.device, config, schedule)
        if warm:
            runner.warm(draft=True)
        else:
            runner.warm_up()

        return DraftModel(runner, f"draft {found.path} on {opened.device.name}", partial(_close, opened, found))
    except BaseException:
        _close(opened, found)
        raise


def assistant_for(model: Ready, found: Checkpoint, warm: bool = False, prove: bool = True) -> Assistant:
    """The drafter of a checkpoint that reads its target's cache. ValueError for a pair that does not belong together."""
    engine, opened = model.engine, None
    read = engine.runner
    try:
        check_pair(found, read)
        _check_pieces(found, read.checkpoint)
        schedule, lent = find_schedule(found.hparams.family), lent_to(found.hparams, read)
        opened = open_again(model.opened, schedule, lent)
        kv = read.plan("decode", 1, 1).tensors[lent["kv.global.k"]].dtype
        config = EngineConfig(ctx=engine.cache.ctx, slots=engine.cache.slots, chunk=1, kv=kv)  # type: ignore[arg-type]
        if prove:
            _check_proved(opened, found, config, schedule)
        runner = Runner(found, opened.device, config, schedule, read=read)
        runner.warm(draft=True) if warm else runner.warm_up()
        close = partial(_close, opened, found)
        return Assistant(runner, f"assistant {found.path} on {opened.device.name}", lent, close)
    except BaseException:
        _close(opened, found)
        raise


def _check_pieces(draft: Checkpoint, target: Checkpoint) -> None:
    """ValueError for a draft whose files have another tokenizer; sidecars may have none."""
    try:
        theirs = draft.tokenizer.vocabulary.pieces
    except CheckpointError:
        return
    ours = target.tokenizer.vocabulary.pieces
    if ours != theirs:
        raise ValueError(
            f"{draft.path}: as a draft it needs the model's tokenizer, and has another ({len(theirs)} tokens, the model "
            f"{len(ours)}, or other pieces)"
        )


def _check_proved(opened: Opened, draft: Checkpoint, config: EngineConfig, schedule: Schedule) -> None:
    if not proved(opened, draft, config, schedule):
        raise RuntimeError(
            f"{opened.main.name} computes wrong results with {draft.path} (python -m hybrid.prove): load it again, and "
            "other kernels are used"
        )


def _close(opened: Opened | None, checkpoint: Checkpoint) -> None:
    if opened is not None:
        opened.device.close()
    checkpoint.close()
