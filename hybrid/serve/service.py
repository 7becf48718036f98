"""What the endpoints share: from a validated request to jobs, and from jobs to an answer."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from hybrid import __version__
from hybrid.serve.backend import Backend
from hybrid.serve.errors import ApiError, bad_request, from_engine, internal
from hybrid.serve.forms import Form, Tokens
from hybrid.serve.guard import BEGAN, OUTCOME, outcome_of
from hybrid.serve.http import EventStream, Gone, Json, until_gone
from hybrid.serve.metrics import Metrics
from hybrid.serve.options import Seeds
from hybrid.serve.running import Feed, Job
from hybrid.serve.settings import Settings
from hybrid.serve.structured import MARKS, Grammars, marks_of
from hybrid.serve.tools import Format
from hybrid.serve.tools_json import JSON
from hybrid.serve.tools_marked import marked

if TYPE_CHECKING:
    from hybrid.engine.constraint import Constraint
    from hybrid.model import Model

WAITING = b": waiting\n\n"


class Service:
    """One for each server."""

    def __init__(self, backend: Backend, metrics: Metrics, settings: Settings) -> None:
        self.backend, self.metrics, self.settings = backend, metrics, settings
        self.seeds = Seeds(settings.seed)
        self._lock = threading.Lock()
        self._grammars: tuple[Model, Grammars] | None = None
        self._fingerprint: tuple[Model, str] | None = None

    def model(self, asked: str | None) -> Model:
        """The model, if it is the one that was asked for. ApiError 404 or 503."""
        model = self.backend.model
        if asked is not None and asked != self.name(model):
            raise ApiError(
                404, f"this server has one model, '{self.name(model)}' (GET /v1/models)", code="model_not_found", param="model"
            )
        return model

    def name(self, model: Model) -> str:
        return self.settings.name or model.checkpoint.name

    def fingerprint(self, model: Model) -> str:
        """Of what computes: the project, the device and the precision. The same where equal seeds give equal texts. Made once for
        a model: its precision is found by looking through its plans, which takes as long as several passes."""
        if self._fingerprint is None or self._fingerprint[0] is not model:
            what = repr((__version__, model.device, sorted(model.engine.precision.items())))
            self._fingerprint = model, f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"
        return self._fingerprint[1]

    def tokens(self, model: Model) -> Tokens:
        return Tokens(model.checkpoint.tokenizer)

    def grammars(self, model: Model) -> Grammars:
        """Made at first use, which takes a while: call it in a thread."""
        with self._lock:
            if self._grammars is None or self._grammars[0] is not model:
                self._grammars = model, Grammars(model.checkpoint.tokenizer, model.hparams.vocab)
            return self._grammars[1]

    def tool_format(self, model: Model) -> Format:
        """The one of the model's family: with marks where its vocabulary and its template have them."""
        marks = marks_of(model.checkpoint.tokenizer)
        if len(marks) == len(MARKS) and "tool" in (model.checkpoint.chat_template or ""):
            return marked(marks, model.checkpoint.tokenizer.token_bytes)
        return JSON

    def constraints(self, model: Model, lark: str, param: str, n: int) -> list[Constraint]:
        """n of one grammar; takes a while. ApiError 400, naming `param`."""
        first = self.grammars(model).constraint(lark, param)
        return [first, *(first.copy() for _ in range(n - 1))]

    def count(self, n: int) -> None:
        """Refuses more choices than this server allows."""
        if n > self.settings.max_choices:
            raise bad_request(f"a request may have {self.settings.max_choices} choices here (n times its prompts), not {n}", "n")

    async def answer(self, request: Request, jobs: Sequence[Job], form: Form, stream: bool) -> Response:
        """The jobs' answer in a form, as a stream or whole. ApiError where the queue is full or a job fails."""
        feed = Feed(self.backend, self.metrics, jobs, request.scope[BEGAN])
        if not stream:
            return Json(await self.unless_gone(request, self._whole(feed, form)))

        def ended(whole: bool) -> None:
            feed.cancel()
            if not whole:
                request.scope[OUTCOME] = "cancelled"

        return EventStream(self._chunks(feed, form, request), self.settings.idle, ended)

    async def unless_gone(self, request: Request, work: Any) -> Any:
        try:
            return await until_gone(request, work)
        except Gone:
            raise ApiError(499, "the client went away", code="cancelled") from None

    async def _whole(self, feed: Feed, form: Form) -> dict[str, Any]:
        async for batch in feed.batches():
            for item in batch:
                form.push(item)
        return form.whole()

    async def _chunks(self, feed: Feed, form: Form, request: Request) -> AsyncIterator[bytes]:
        try:
            if chunk := form.open():
                yield chunk
            async for batch in feed.batches():
                chunk = b"".join(form.push(item) for item in batch) if batch else WAITING
                if chunk:
                    yield chunk
            yield form.close()
        except ApiError as error:
            request.scope[OUTCOME] = outcome_of(error.status)
            yield form.fail(error)
        except Exception as error:
            request.scope[OUTCOME] = "failed"
            yield form.fail(internal(error))
        finally:
            feed.cancel()


async def aside(work: Any, *args: Any) -> Any:
    """A call that takes a while, in a thread; its errors as refusals."""
    try:
        return await asyncio.to_thread(work, *args)
    except Exception as error:
        raise from_engine(error) from None
