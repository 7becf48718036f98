"""A sequence that stays in the KV cache between generations: a conversation pays for new tokens only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import TracebackType

from hybrid.engine.engine import Engine
from hybrid.engine.request import Request
from hybrid.engine.sampling import Sampling

Note = Callable[[Request, int], object]


class Session:
    """Made by `Model.session()`, given to `Model.generate`. Holds a slot of the cache from its first use until `close`.
    A prompt may differ from what came before: the prefix that both share is not run again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slot: int | None = None
        self._ids: list[int] = []
        """Tokens whose keys and values the cache holds."""
        self.running: object | None = None
        """Identifies the generation that runs in it; None between generations."""

    def of(self, engine: Engine) -> bool:
        """Whether this is a session of that engine."""
        return self._engine is engine

    def enter(self) -> object:
        """A generation runs in it: what identifies that."""
        if self.running is not None:
            raise ValueError("the session is in use by a generation that has not ended: end or close that one first")
        self.running = object()
        return self.running

    def leave(self, mark: object) -> None:
        """That generation has ended."""
        if self.running is mark:
            self.running = None

    def begin(self, ids: Sequence[int], sampling: Sampling, length: int | None = None) -> tuple[int, int]:
        """(slot, how many leading `ids` the cache holds: fewer than all, because the last one's logits are needed).
        length: positions to reserve in the cache where it holds no slot yet (default: the context)."""
        engine = self._engine
        if self.running is not None:
            raise ValueError("the session is in use by a generation that has not ended: end or close that one first")
        same = 0
        for mine, wanted in zip(self._ids, ids[:-1], strict=False):
            if mine != wanted:
                break
            same += 1
        if self._slot is not None and not engine.rewind(self._slot, same):
            self.close()
        if self._slot is None:
            same = 0
            self._slot = engine.admit(length, sampling, prompt=ids)
        else:
            engine.set_sampling(self._slot, sampling, ids)
        self._ids = list(ids[:same])
        self.running = object()
        return self._slot, same

    def end(self, ids: Sequence[int]) -> None:
        """After a generation, with its prompt and generated tokens; the last of them may not have been run."""
        self.running = None
        if self._slot is not None:
            self._ids = list(ids[: self._engine.positions[self._slot]])

    def close(self) -> None:
        """Free the slot. The session may be used again, from an empty cache; a generation that still runs in it
        fails."""
        with self._engine.lock:
            self._ids, self.running = [], None
            if self._slot is not None:
                slot, self._slot = self._slot, None
                if slot in self._engine.positions:  # else the model is closed
                    self._engine.wait()
                    self._engine.release(slot)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def in_own_slot(
    engine: Engine, request: Request, session: Session | None, at_once: int, check: Callable[[], object], note: Note
) -> Generator[str, None, None]:
    """The pieces of a request's text, in a slot of its own, which it holds from the first piece on until it is closed:
    passes of several devices at a time are not scheduled together with others. check: raises where the model is closed.
    note: told at the end of decode passes."""
    check()  # it may have been closed since it was asked for
    held = Session(engine) if session is None else session
    length = len(request.prompt) + request.limit if session is None else None
    slot, cached = held.begin(request.prompt, request.sampling, length)
    running, intact = held.running, True
    try:
        engine.warm_up(len(request.prompt) - cached, request.sampling.options())  # compiling is no part of the speeds
        for token in engine.stream(slot, request.begin(cached), request.limit, at_once):
            piece = request.push(token)
            if piece:
                yield piece
            if request.finish is not None:
                break
            if piece:  # whoever took it may have closed the model or the session
                check()
                if held.running is not running:
                    raise ValueError("the session was closed while this generation ran: it cannot go on")
    except GeneratorExit:
        raise
    except BaseException:
        intact = False  # interrupted or failed between two passes: what the cache holds is not known
        raise
    finally:
        request.cancel()

        def give_back() -> None:
            live = slot in engine.positions  # else the model was closed in the middle: nothing to give back
            if live:
                engine.wait()
            ours = live and held.running is running  # else the session was closed
            passes = engine.positions[slot] - len(request.prompt) if ours else 0
            if ours and intact and session is not None:
                session.end(request.ids)
            elif ours:
                held.close()
            note(request, passes)

        engine.lock.call_soon(give_back)  # collected as garbage, this may run while another thread holds the lock
