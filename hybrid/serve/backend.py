"""The model that a server answers with: loaded in the background, loaded again after its device was lost, closed at the
end."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hybrid.cli import LOST, describe
from hybrid.core import garbage
from hybrid.core.errors import DeviceLost
from hybrid.devices.energy import meter_for
from hybrid.serve.errors import unavailable
from hybrid.serve.power import Joules

if TYPE_CHECKING:
    from hybrid.model import Model
    from hybrid.serve.settings import OnLoss

State = Literal["loading", "ready", "lost", "stopping"]
WAITS = (0.0, 2.0, 10.0, 30.0)
"""Seconds before each attempt to load a model again whose device was lost; after the last one the process ends."""


class Backend:
    """`end(code, line)` asks the process to end. All methods belong to the event loop's thread."""

    def __init__(
        self,
        load: Callable[[], Model],
        end: Callable[[int, str], None],
        on_loss: OnLoss = "restart",
        waits: tuple[float, ...] = WAITS,
    ) -> None:
        self._load, self._end, self._on_loss, self._waits = load, end, on_loss, waits
        self._model: Model | None = None
        self._task: asyncio.Task[None] | None = None
        self.state: State = "loading"
        self.losses = 0
        """Times that the device was lost."""
        self.joules: Joules | None = None
        """Of the device, once a model has been loaded."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def model(self) -> Model:
        """ApiError 503 while there is none."""
        if self.state == "stopping":
            raise unavailable("the server is stopping: send the request elsewhere", "stopping")
        if self._model is None or self.state != "ready":
            why = (
                "the device was lost and the model is loaded again"
                if self.state == "lost"
                else "the model is being loaded"
            )
            raise unavailable(f"{why}: try again", "not_ready")
        return self._model

    @property
    def loaded(self) -> Model | None:
        """The model, also while it drains; None while there is none."""
        return self._model

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._first())

    async def _first(self) -> None:
        try:
            model = await asyncio.to_thread(self._loaded_and_kept)
            self.joules = await asyncio.to_thread(_joules, model)
        except Exception as error:
            self._end(LOST if isinstance(error, DeviceLost) else 1, f"error: {describe(error)}")
            return
        self._watch = asyncio.get_running_loop().create_task(self.joules.watch())
        self._take(model)

    def _loaded_and_kept(self) -> Model:
        """What a model consists of lives until it is closed: no collection in the midst of requests looks through
        it."""
        gc.unfreeze()  # what was left of one before
        model = self._load()
        garbage.keep()
        return model

    def _take(self, model: Model) -> None:
        self._model = model
        if self.state != "stopping":
            self.state = "ready"
        print(f"ready: {model.checkpoint.name} on {model.device}", file=sys.stderr, flush=True)

    def lost(self, model: Model, error: DeviceLost) -> None:
        """A request of `model` found its device lost. The first to say so starts what follows."""
        if model is not self._model or self.state != "ready":
            return
        self.losses += 1
        self.state = "lost"
        if self._on_loss == "exit":
            self._end(LOST, f"error: the device was lost: {describe(error)}")
            return
        print(f"the device was lost ({describe(error)}): loading the model again", file=sys.stderr, flush=True)
        self._task = asyncio.get_running_loop().create_task(self._again(model))

    async def _again(self, old: Model) -> None:
        self._model = None
        try:
            await asyncio.to_thread(old.close)
        except Exception as error:  # what was on the device is gone in any case
            print(f"while the lost model was closed: {describe(error)}", file=sys.stderr, flush=True)
        said = ""
        for wait in self._waits:
            await asyncio.sleep(wait)
            try:
                model = await asyncio.to_thread(self._loaded_and_kept)
            except Exception as error:
                said = describe(error)
                print(f"loading again failed: {said}", file=sys.stderr, flush=True)
            else:
                self._take(model)
                return
        self._end(LOST, f"error: the device was lost and the model could not be loaded again: {said}")

    def stop(self) -> None:
        """No more requests; those that run go on."""
        self.state = "stopping"

    async def close(self) -> None:
        """Free the model. A load that runs is waited for: a thread cannot be ended."""
        self.state = "stopping"
        if self._task is not None:
            task: asyncio.Task[Any] = self._task
            await asyncio.gather(task, return_exceptions=True)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        model, self._model = self._model, None
        if model is not None:
            await asyncio.to_thread(model.close)


def _joules(model: Model) -> Joules:
    """Of what runs a model; of several devices, the main one."""
    device = model.engine.device
    return Joules(meter_for(getattr(device, "main", device)))
