"""Several models in one server: each is loaded by the first request that names it, and put away for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hybrid.cli import describe
from hybrid.serve.backend import Backend, State
from hybrid.serve.errors import ApiError, busy, log, printable, unavailable

if TYPE_CHECKING:
    from hybrid.checkpoint import Checkpoint
    from hybrid.model import Model
    from hybrid.serve.settings import OnLoss

T = TypeVar("T")


class Source(NamedTuple):
    """How one of several models is opened and loaded. folder: of its files; error responses leave it out."""

    load: Callable[[], Model]
    folder: str
    open: Callable[[], Checkpoint]
    embeds: bool


@dataclass(frozen=True, slots=True)
class Several:
    """The models of a server. The first is loaded at the start."""

    sources: Mapping[str, Source]
    """By their names in requests."""
    keep: int | None
    """Most that stay loaded; None: as many as fit."""
    fits: Callable[[Model, str], bool]
    """Whether the model of this name fits the device's memory beside those that are loaded, of which one is given.
    Called in a thread."""
    queue: int
    """Most requests that wait for a model."""


Load = Callable[[], "Model"] | Several
"""What a server loads: its one model, or several by name."""


class Use:
    """A request's use of a model, from its arrival to the end of its answer. The model stays loaded meanwhile."""

    def __init__(self, models: Models, backend: Backend) -> None:
        self.backend, self._models = backend, models
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the request may use the model. ApiError if it cannot be loaded."""
        self.holds = False

    def end(self) -> None:
        self._models.end(self)


class Models:
    """Backends by name; with one model, its name is that of its checkpoint, and this is `""`. Call methods from the event
    loop's thread, unless they say otherwise. end(code, line): requests the process's exit."""

    def __init__(self, load: Load, end: Callable[[int, str], None], on_loss: OnLoss = "restart") -> None:
        self._several = load if isinstance(load, Several) else None
        loads = {n: s.load for n, s in load.sources.items()} if isinstance(load, Several) else {"": load}
        self.backends = {name: Backend(load, end, on_loss, name=name) for name, load in loads.items()}
        self.first = next(iter(self.backends.values()))
        for other in list(self.backends.values())[1:]:
            other.state = "away"
        self._waiting: list[Use] = []
        self._changed = asyncio.Event()
        self._turns: asyncio.Task[None] | None = None
        self._clock = count(1)

    @property
    def alone(self) -> bool:
        """Whether the server has one model, which is loaded at the start."""
        return self._several is None

    @property
    def state(self) -> State:
        """The one model's state. Of several: ready while requests are taken, also for models that are away."""
        states = {b.state for b in self.backends.values()}
        if self.alone or self.first.state in ("loading", "stopping"):
            return self.first.state
        return "lost" if "lost" in states and "ready" not in states else "ready"

    def embeds(self, backend: Backend) -> bool:
        """True for an embedding model. ApiError 503 if the only model is not ready."""
        if self._several is None:
            return backend.model.hparams.dimensions > 0
        return self._several.sources[backend.name].embeds

    def described(self, backend: Backend, describe: Callable[[Checkpoint], T]) -> T:
        """What `describe` says of a model's checkpoint, which is opened if the model is not loaded. Call it from any thread.
        ApiError 503."""
        model = backend.model if self._several is None else backend.loaded
        if model is not None:
            return describe(model.checkpoint)
        assert self._several is not None
        try:
            with self._several.sources[backend.name].open() as checkpoint:
                return describe(checkpoint)
        except ValueError as error:
            raise self._failed(backend, error) from None

    def use(self, backend: Backend) -> Use:
        """Begin a request's use of a model. If it is not loaded, the request waits. ApiError 429."""
        use = Use(self, backend)
        if self.alone or backend.state in ("lost", "stopping") or (backend.state == "ready" and not backend.draining):
            self._grant(use)
            return use
        assert self._several is not None
        if len(self._waiting) >= self._several.queue:
            raise busy("more requests wait for a model to be loaded than the queue holds: try again later", 5.0)
        self._waiting.append(use)
        if self._turns is None or self._turns.done():
            self._turns = asyncio.get_running_loop().create_task(self._take_turns())
        return use

    def end(self, use: Use) -> None:
        """End a request's use, or its wait. Idempotent."""
        if use.holds:
            use.holds = False
            use.backend.users -= 1
            use.backend.used = next(self._clock)
        elif use in self._waiting:
            self._waiting.remove(use)
        self._changed.set()

    def stop(self) -> None:
        """Refuse new and waiting requests; running ones continue."""
        for backend in self.backends.values():
            backend.stop()
        for use in list(self._waiting):
            self._refuse(use, unavailable("the server is stopping: send the request elsewhere", "stopping"))
        self._changed.set()

    async def close(self) -> None:
        """Free all models, after waiting for a running load."""
        self.stop()
        if self._turns is not None:
            turns: asyncio.Task[Any] = self._turns
            await asyncio.gather(turns, return_exceptions=True)
        for backend in self.backends.values():
            await backend.close()

    def _grant(self, use: Use) -> None:
        if not use.granted.done():
            use.holds = True
            use.backend.users += 1
            use.backend.used = next(self._clock)
            use.granted.set_result(None)

    def _refuse(self, use: Use, error: ApiError) -> None:
        if not use.granted.done():
            use.granted.set_exception(error)

    def _wanted(self, backend: Backend) -> bool:
        return any(use.backend is backend and not use.granted.done() for use in self._waiting)

    async def _take_turns(self) -> None:
        """Load the models that requests wait for, in the order of the longest wait, each for all that wait for it."""
        while self._waiting:
            backend = self._waiting[0].backend
            error: ApiError | None = None
            try:
                await backend.settled()
                if backend.state == "away" and await self._has_room(backend):
                    await backend.load()
            except Exception as failure:
                error = self._failed(backend, failure)
            for use in [use for use in self._waiting if use.backend is backend]:
                self._waiting.remove(use)
                if error is None:
                    self._grant(use)
                else:
                    self._refuse(use, error)

    async def _has_room(self, backend: Backend) -> bool:
        """Put models away until this one has room, the least recently used one first. False if no request waits for it
        any longer."""
        assert self._several is not None
        keep = self._several.keep
        while self._wanted(backend):
            for other in self.backends.values():
                await other.settled()
            there = [b for b in self.backends.values() if b.loaded is not None]
            if not there or (keep is not None and len(there) < keep):
                return True
            if keep is None and await asyncio.to_thread(self._several.fits, there[0].model, backend.name):
                return True
            await self._put_away(min(there, key=lambda b: (b.users > 0, b.used)), backend)
        return False

    async def _put_away(self, victim: Backend, wanted: Backend) -> None:
        """Put a model away when no request uses it any longer, unless all that wait for `wanted` have gone."""
        victim.draining = True
        try:
            while victim.users and self._wanted(wanted):
                self._changed.clear()
                await self._changed.wait()
            if self._wanted(wanted):
                await victim.put_away()
        finally:
            victim.draining = False

    def _failed(self, backend: Backend, failure: Exception) -> ApiError:
        if isinstance(failure, ApiError):
            return failure
        assert self._several is not None
        line = printable(describe(failure))
        log(f"error: {backend.name} could not be loaded: {line}")
        is_told = isinstance(failure, ValueError | RuntimeError | OSError | MemoryError)
        shown = line.replace(self._several.sources[backend.name].folder, "") if is_told else "its log says how"
        return unavailable(f"the model '{backend.name}' could not be loaded: {shown}", "load_failed")
