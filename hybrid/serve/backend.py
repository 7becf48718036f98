"""A served model: loaded in the background, reloaded after a device loss, put away for another, closed at shutdown."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hybrid.cli import LOST, describe
from hybrid.core import garbage
from hybrid.core.errors import DeviceLost
from hybrid.devices.energy import meter_for
from hybrid.serve.errors import log, unavailable
from hybrid.serve.power import Joules

if TYPE_CHECKING:
    from hybrid.model import Model
    from hybrid.serve.settings import OnLoss

State = Literal["away", "loading", "ready", "lost", "stopping"]
WAITS = (0.0, 2.0, 10.0, 30.0)
"""Seconds before each attempt to reload a model after a device loss; after the last attempt the process exits."""


class Backend:
    """`end(code, line)` requests the process's exit. Call all methods from the event loop's thread."""

    def __init__(
        self,
        load: Callable[[], Model],
        end: Callable[[int, str], None],
        on_loss: OnLoss = "restart",
        waits: tuple[float, ...] = WAITS,
        name: str = "",
    ) -> None:
        self.name = name
        """Of one of several models."""
        self._load, self._end, self._on_loss, self._waits = load, end, on_loss, waits
        self.loaded: Model | None = None
        """The model, also while draining; None if none is loaded."""
        self._task: asyncio.Task[None] | None = None
        self.state: State = "loading"
        self.forget: Callable[[Model], None] = lambda model: None
        """Called in a thread before a model is closed."""
        self.users = 0
        """Requests that use the model."""
        self.used = 0
        """Greater than that of models whose last use is longer ago."""
        self.draining = False
        """Whether the model takes no further requests: it is put away when those that use it have ended."""
        self.loads = 0
        """How often a model was loaded."""
        self.losses = 0
        """Device losses."""
        self.joules: Joules | None = None
        """The device's energy counter, after a model was loaded."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def model(self) -> Model:
        """The model. ApiError 503 if none is ready."""
        if self.state == "stopping":
            raise unavailable("the server is stopping: send the request elsewhere", "stopping")
        if self.loaded is None or self.state != "ready":
            whys = {"lost": "the device was lost and the model is loaded again", "away": "the model is not loaded"}
            raise unavailable(f"{whys.get(self.state, 'the model is being loaded')}: try again", "not_ready")
        return self.loaded

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

    async def load(self) -> None:
        """Load the model, which is away. Raises what loading raises."""
        try:
            self._take(await asyncio.to_thread(self._loaded_and_kept))
        except DeviceLost as error:
            if self._on_loss == "exit":
                self._end(LOST, f"error: the device was lost: {describe(error)}")
            raise

    async def put_away(self) -> None:
        """Free the model, after waiting for a running load. No request may use it."""
        await self.settled()
        if self.state != "stopping":
            self.state = "away"
        await self._free()
        await asyncio.to_thread(_collect)
        log(f"put away: {self.name}")

    async def settled(self) -> None:
        """Wait for a running load: a thread cannot be cancelled."""
        if self._task is not None:
            task: asyncio.Task[Any] = self._task
            await asyncio.gather(task, return_exceptions=True)

    async def _free(self) -> None:
        model, self.loaded = self.loaded, None
        if model is not None:
            await asyncio.to_thread(self._closed, model)

    def _closed(self, model: Model) -> None:
        self.forget(model)
        model.close()

    def _loaded_and_kept(self) -> Model:
        """Load a model and exclude its objects from garbage collection while it is served."""
        gc.unfreeze()  # objects of a previous model
        model = self._load()
        garbage.keep()
        return model

    def _take(self, model: Model) -> None:
        self.loaded = model
        self.loads += 1
        if self.state != "stopping":
            self.state = "ready"
        log(f"ready: {model.checkpoint.name} on {model.device}")

    def lost(self, model: Model, error: DeviceLost) -> None:
        """Handle a device loss that a request of `model` reports; only the first report counts."""
        if model is not self.loaded or self.state != "ready":
            return
        self.losses += 1
        self.state = "lost"
        if self._on_loss == "exit":
            self._end(LOST, f"error: the device was lost: {describe(error)}")
            return
        log(f"the device was lost ({describe(error)}): loading the model again")
        self._task = asyncio.get_running_loop().create_task(self._again(model))

    async def _again(self, old: Model) -> None:
        self.loaded = None
        try:
            await asyncio.to_thread(self._closed, old)
        except Exception as error:  # the device's memory is lost anyway
            log(f"error while closing the lost model: {describe(error)}")
        said = ""
        for wait in self._waits:
            await asyncio.sleep(wait)
            try:
                model = await asyncio.to_thread(self._loaded_and_kept)
            except Exception as error:
                said = describe(error)
                log(f"loading again failed: {said}")
            else:
                self._take(model)
                return
        self._end(LOST, f"error: the device was lost and the model could not be loaded again: {said}")

    def stop(self) -> None:
        """Refuse new requests; running ones continue."""
        self.state = "stopping"

    async def close(self) -> None:
        """Free the model, after waiting for a running load."""
        self.state = "stopping"
        await self.settled()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._free()


def _collect() -> None:
    """Give the memory of a model that was closed back to the system."""
    garbage.keep()
    garbage.trim()


def _joules(model: Model) -> Joules:
    """The energy counter of the model's main device."""
    device = model.engine.device
    return Joules(meter_for(getattr(device, "main", device)))
