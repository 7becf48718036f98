"""What the endpoints share: from a validated request to jobs, and from jobs to an answer."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from hybrid import __version__
from hybrid.core.errors import DeviceLost
from hybrid.engine.stats import TokenLogprob
from hybrid.serve.backend import Backend
from hybrid.serve.errors import ApiError, bad_request, internal, printable
from hybrid.serve.forms import Form, Tokens
from hybrid.serve.grammars import GrammarConstraint, Grammars
from hybrid.serve.guard import BEGAN, OUTCOME, outcome_of
from hybrid.serve.http import EventStream, Gone, Json, until_gone
from hybrid.serve.metrics import Metrics
from hybrid.serve.options import Seeds
from hybrid.serve.pools import FairPool, Parts
from hybrid.serve.running import Feed, Job
from hybrid.serve.settings import Settings
from hybrid.serve.tools import Format
from hybrid.serve.tools_json import JSON
from hybrid.serve.tools_marked import marked
from hybrid.text import chat

if TYPE_CHECKING:
    from hybrid.model import Model

T = TypeVar("T")
WAITING = b": waiting\n\n"
NOTE = "x-hybrid-note"
"""Header of an answer: what of the request was left out."""


class Service:
    """One for each server."""

    def __init__(self, backend: Backend, metrics: Metrics, settings: Settings) -> None:
        self.backend, self.metrics, self.settings = backend, metrics, settings
        self.seeds = Seeds(settings.seed)
        self._texts = FairPool("texts")
        self._templates = FairPool("templates", 4)
        self._grammars = FairPool("grammars", 2)
        self._scores = FairPool("scores")
        self._compiled: tuple[Model, Grammars] | None = None
        self._fingerprint: tuple[Model, str] | None = None

    def close(self) -> None:
        """End the processes of grammars."""
        if self._compiled is not None:
            self._compiled[1].close()

    def model(self, asked: str | None) -> Model:
        """The model, if it is the one that was asked for. ApiError 404 or 503."""
        model = self.backend.model
        if asked is not None and asked != self.name(model):
            raise ApiError(
                404,
                f"this server has one model, '{self.name(model)}' (GET /v1/models)",
                code="model_not_found",
                param="model",
            )
        return model

    def name(self, model: Model) -> str:
        return self.settings.name or model.checkpoint.name

    def fingerprint(self, model: Model) -> str:
        """Of what computes: the project, the device and the precision. The same where equal seeds give equal texts.
        Made once for a model: its precision is found by looking through its plans, which takes as long as several
        passes."""
        if self._fingerprint is None or self._fingerprint[0] is not model:
            what = repr((__version__, model.device, sorted(model.engine.runner.precision.items())))
            self._fingerprint = model, f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"
        return self._fingerprint[1]

    def tokens(self, model: Model) -> Tokens:
        return Tokens(model.checkpoint.tokenizer)

    def most(self, model: Model) -> int:
        """Tokens of a prompt at most."""
        ctx = model.engine.cache.ctx
        return min(self.settings.max_prompt or ctx, ctx)

    async def encode(
        self, request: Request, model: Model, text: str, *, bos: bool = True, guard: str | None = None
    ) -> list[int]:
        """Ids of a text. guard: of a conversation as chat.written gives it, whose control tokens are meant. ApiError
        400 for one that is too long, as soon as that is known."""
        tokenizer, most = model.checkpoint.tokenizer, self.most(model)
        self.check_length(model, len(text) - (text.count(guard) if guard else 0))
        parts = tokenizer.encode_parts(text, bos, guard is not None, guard or "")
        return await self._texts.run(self._client(request), _joined(parts, most), len(text))

    async def tokenize(
        self, request: Request, model: Model, text: str, bos: bool, guard: str | None = None
    ) -> list[int]:
        """Ids of a text of any length."""
        parts = model.checkpoint.tokenizer.encode_parts(text, bos, guard is not None, guard or "")
        return await self._texts.run(self._client(request), _joined(parts, None), len(text))

    async def aside(self, request: Request, work: Callable[..., T], *args: Any) -> T:
        """A call that takes a while, in the thread for texts."""
        return await self._texts.call(self._client(request), work, *args)

    async def written(
        self, request: Request, model: Model, messages: Sequence[Any], tools: Any = None
    ) -> tuple[str, str]:
        """A conversation as the model's template writes it, for `encode` with its guard."""
        c = model.checkpoint
        return await self._templates.call(
            self._client(request), chat.written, c.tokenizer, messages, c.chat_template, False, tools
        )

    def check_length(self, model: Model, characters: int) -> None:
        """ApiError 400 for a text that has too many tokens, however it is cut: no token has more characters than the
        longest."""
        most, least = self.most(model), characters // model.checkpoint.tokenizer.longest
        if least > most:
            raise _too_long(f"at least {least}", most)

    def check_count(self, model: Model, tokens: int) -> None:
        """ApiError 400 for a prompt of too many tokens."""
        if tokens > (most := self.most(model)):
            raise _too_long(str(tokens), most)

    def template(self, model: Model) -> str | None:
        """The chat template that is used; None where there is none."""
        try:
            return chat.template_of(model.checkpoint.tokenizer, model.checkpoint.chat_template)
        except chat.ChatError:
            return None

    def tool_format(self, model: Model) -> Format:
        """The one of the model's family: with marks where its vocabulary and its template have them."""
        found = marked(model.checkpoint.tokenizer) if "tool" in (model.checkpoint.chat_template or "") else None
        return found or JSON

    async def constraints(
        self, request: Request, model: Model, grammars: Sequence[str], param: str, n: int
    ) -> list[GrammarConstraint]:
        """n of the first of several grammars that can be compiled. ApiError 400, naming `param`; 429."""
        if self._compiled is None or self._compiled[0] is not model:
            former, self._compiled = self._compiled, (model, Grammars(model.checkpoint.tokenizer, model.hparams.vocab))
            if former is not None:
                await self._grammars.call(self._client(request), former[1].close)
        known = self._compiled[1]

        def made() -> list[GrammarConstraint]:
            first = known.constraint(grammars, param)
            return [first, *(first.copy() for _ in range(n - 1))]

        return await self._grammars.call(self._client(request), made)

    async def prompt_logprobs(
        self, request: Request, model: Model, ids: Sequence[int], top: int
    ) -> list[TokenLogprob | None]:
        """How likely each token of a prompt is after those before it, as `hybrid.perplexity` computes it; None for the
        first."""
        try:
            return await self._scores.call(self._client(request), _prompt_logprobs, model, ids, top)
        except ApiError as error:
            if error.code == "device_lost":
                self.backend.lost(model, DeviceLost(error.message))
            raise

    def _client(self, request: Request) -> str:
        """Who asks: clients take turns. The key where one is checked, else the address that the connection comes
        from."""
        address = request.client.host if request.client is not None else ""
        return request.headers.get("authorization", address) if self.settings.keys else address

    def count(self, n: int) -> None:
        """Refuses more choices than this server allows."""
        if n > self.settings.max_choices:
            raise bad_request(
                f"a request may have {self.settings.max_choices} choices here (n times its prompts), not {n}", "n"
            )

    async def answer(
        self, request: Request, jobs: Sequence[Job], form: Form, stream: bool, headers: dict[str, str] | None = None
    ) -> Response:
        """The jobs' answer in a form, as a stream or whole. ApiError where the queue is full or a job fails."""
        feed = Feed(self.backend, self.metrics, jobs, request.scope[BEGAN])
        if not stream:
            return Json(await self.unless_gone(request, self._whole(feed, form)), headers=headers)

        def ended(whole: bool) -> None:
            feed.cancel()
            if not whole:
                request.scope[OUTCOME] = "cancelled"

        return EventStream(self._chunks(feed, form, request), self.settings.idle, ended, headers)

    async def unless_gone(self, request: Request, work: Awaitable[T]) -> T:
        """The result of `work`, which ends where the client goes first. ApiError 499."""
        try:
            found: T = await until_gone(request, work)
        except Gone:
            raise ApiError(499, "the client went away", code="cancelled") from None
        return found

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


def note(parts: Iterable[str]) -> dict[str, str]:
    """Headers that say what was left out."""
    text = printable("; ".join(parts), 1000)
    return {NOTE: text.encode("ascii", "replace").decode()} if text else {}


def _joined(parts: Iterable[list[int]], most: int | None) -> Parts[list[int]]:
    ids: list[int] = []
    for part in parts:
        ids += part
        if most is not None and len(ids) > most:
            raise _too_long(f"more than {most}", most)
        yield None
    return ids


def _too_long(count: str, most: int) -> ApiError:
    return bad_request(
        f"the prompt has {count} tokens, and this server takes {most}: shorten it", code="context_length_exceeded"
    )


_ROWS = 16
"""Logits of so many rows are worked on at a time, in float64."""


def _prompt_logprobs(model: Model, ids: Sequence[int], top: int) -> list[TokenLogprob | None]:
    out: list[TokenLogprob | None] = [None]
    for logits in model.engine.logits_of([ids]):
        for start in range(0, len(logits), _ROWS):
            rows = logits[start : start + _ROWS].astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            for row in rows[: len(ids) - len(out)]:  # the last row predicts what is not there
                best = np.argpartition(row, -top)[-top:] if top else np.empty(0, int)
                best = best[np.argsort(-row[best], kind="stable")]
                token = ids[len(out)]
                out.append(TokenLogprob(token, float(row[token]), tuple((int(i), float(row[i])) for i in best)))
    return out
