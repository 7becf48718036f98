"""A checkpoint's engine on its devices, ready to run, and whoever guesses for it. What cannot be made ready is
closed."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass

from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core.plan import GUESSES_TENSOR, UNTIL_TENSOR
from hybrid.devices.opening import NpuKind, Opened, open_again, opening_devices
from hybrid.engine import warming
from hybrid.engine.config import EngineConfig
from hybrid.engine.draft_model import WATCHED, DraftModel
from hybrid.engine.drafting import check_drafting
from hybrid.engine.drafts import Drafter, Lookup
from hybrid.engine.engine import Engine
from hybrid.engine.loading import LoadClock
from hybrid.engine.room import with_room
from hybrid.spec.schedule import Schedule, find_schedule, named_schedule


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine whose programs are made; `close` ends its devices, not the checkpoint."""

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
) -> Ready:
    """As hybrid.load takes these. clock: notes what it takes."""
    clock, given = clock or LoadClock(), schedule is not None
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
            opened, schedule = with_room(opened, schedule, config, checkpoint)
        engine = Engine(checkpoint, opened.device, config, schedule=schedule, clock=clock)
        with clock.phase("pipelines"):
            engine.warm_up()
            if warm:
                warming.warm(engine)
    except BaseException:
        opened.device.close()
        raise
    return Ready(opened, engine)


def drafter_for(
    model: Ready,
    draft: str | os.PathLike[str] | Checkpoint | Drafter | None,
    device: str | None,
    slots: int | None,
    warm: bool = False,
) -> Drafter:
    """What hybrid.load was told to guess by; a model runs on `device`, or where those run that are open. warm: as of
    hybrid.load. ValueError for one with another tokenizer, and where the engine cannot verify guesses."""
    check_drafting(model.engine)
    if draft is None or draft == "lookup":
        return Lookup()
    if not isinstance(draft, str | os.PathLike | Checkpoint):
        return draft
    found = draft if isinstance(draft, Checkpoint) else open_checkpoint(draft)
    try:
        ours, theirs = (c.tokenizer.vocabulary.pieces for c in (model.engine.checkpoint, found))
        if ours != theirs:
            raise ValueError(
                f"{found.path}: as a draft it needs the model's tokenizer, and has another "
                f"({len(theirs)} tokens, the model {len(ours)}, or other pieces)"
            )
        ctx = min(model.engine.cache.ctx, found.hparams.context_length)
        where: str | Opened | None = device
        if where is None:
            lent = {"history": GUESSES_TENSOR, GUESSES_TENSOR: "history", UNTIL_TENSOR: "next_position"}
            where = open_again(model.opened, find_schedule(found.hparams.family), lent)
        config = EngineConfig(
            ctx=ctx, slots=1 if slots is None else slots, shared=slots is None, guesses=min(WATCHED, ctx) - 1
        )
        smaller = ready(found, where, None, config)
    except BaseException:
        found.close()
        raise

    def close() -> None:
        smaller.close()
        found.close()

    try:
        if warm:
            warming.warm(smaller.engine, draft=True)
        apart = model.engine.device.exclusive.isdisjoint(smaller.engine.device.exclusive)
        return DraftModel(smaller.engine, f"draft {found.path} on {smaller.opened.device.name}", close, apart)
    except BaseException:
        close()
        raise
