"""Code that endpoints share: make jobs from a validated request, and an answer from jobs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from hybrid import __version__
from hybrid.core.errors import DeviceLost
from hybrid.engine.stats import TokenLogprob
from hybrid.serve.backend import Backend
from hybrid.serve.errors import ApiError, bad_request, internal, printable
from hybrid.serve.forms import Form
from hybrid.serve.grammars import GrammarConstraint, Grammars
from hybrid.serve.guard import BEGAN, OUTCOME, USE, key_of, outcome_of
from hybrid.serve.http import EventStream, Json, until_gone
from hybrid.serve.metrics import Metrics
from hybrid.serve.models import Models, Use
from hybrid.serve.pools import FairPool, Parts
from hybrid.serve.running import Feed, Job
from hybrid.serve.settings import Settings
from hybrid.serve.tools import Format
from hybrid.serve.tools_json import JSON
from hybrid.serve.tools_marked import marked
from hybrid.serve.tools_written import written
from hybrid.text import chat
from hybrid.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hybrid.checkpoint import Checkpoint
    from hybrid.embedding import EmbeddingModel
    from hybrid.model import Model

T = TypeVar("T")
LATEST = ":latest"
NOTE = "x-hybrid-note"
"""Response header: ignored parts of the request."""


_WRONG_KIND = {
    False: "this model makes embeddings and writes no text: POST /v1/embeddings",
    True: "this model writes text and makes no embeddings: serve and name an embedding model, such as "
    "google/embeddinggemma-300m",
}


class Service:
    """Shared state of the endpoints; one for each server."""

    def __init__(self, models: Models, metrics: Metrics, settings: Settings) -> None:
        self.models, self.metrics, self.settings = models, metrics, settings
        for backend in models.backends.values():
            backend.forget = self._forget
        self.seeds = Random(settings.seed)
        """Seeds of requests without one, reproducible by the server's base seed."""
        self.texts = FairPool("texts")
        self.templates = FairPool("templates", 4)
        self.grammars = FairPool("grammars", 2)
        self.scores = FairPool("scores")
        self.embeddings = FairPool("embeddings", 32)
        self.formats = WeakKeyDictionary[Tokenizer, dict[str, Format]]()
        """Tool-call formats by tokenizer and template."""
        self._compiled: dict[Model, Grammars] = {}
        self._fingerprints: dict[Model, str] = {}

    def close(self) -> None:
        """Stop the grammar processes."""
        for model in list(self._compiled):
            self._forget(model)

    def _forget(self, model: Model) -> None:
        """Stop the grammar processes of a model that is closed."""
        self._fingerprints.pop(model, None)
        if (grammars := self._compiled.pop(model, None)) is not None:
            grammars.close()

    def find(self, asked: str | None) -> Backend:
        """The model of this name, with or without Ollama's tag, loaded or not; the first for None. ApiError 404; 503 if
        the only model is not ready."""
        if asked is None:
            return self.models.first
        alone = self.models.alone
        known = {self.name(self.models.first.model): self.models.first} if alone else self.models.backends
        found = next((b for name, b in known.items() if name.removesuffix(LATEST) == asked.removesuffix(LATEST)), None)
        if found is None:
            has = "one model," if alone else "the models"
            names = ", ".join(f"'{name}'" for name in known)
            message = f"this server has {has} {names} (GET /v1/models)"
            raise ApiError(404, message, code="model_not_found", param="model")
        return found

    async def use(self, request: Request, asked: str | None, embeds: bool | None = None) -> Work:
        """A request's work with the model of this name, or the first. embeds: whether it must make embeddings, or must not.
        The model stays loaded until the request ends; a request has one, whatever it asks for later. One of several is
        loaded now if it is not. ApiError 400 for the other kind, 404, 429, 499 or 503."""
        backend = request.scope[USE].backend if USE in request.scope else self.find(asked)
        if embeds is not None and self.models.embeds(backend) != embeds:
            others = [b.name for b in self.models.backends.values() if b.name and self.models.embeds(b) == embeds]
            raise bad_request(_WRONG_KIND[embeds] + (f"; here: {', '.join(others)}" if others else ""), "model")
        if USE not in request.scope:
            request.scope[USE] = self.models.use(backend)
        use: Use = request.scope[USE]
        if use.granted.done():
            use.granted.result()
        else:
            await until_gone(request, use.granted)
        return Work(self, request, use.backend.model)

    def name(self, model: Model | EmbeddingModel) -> str:
        """The model's name in requests."""
        named = (name for name, backend in self.models.backends.items() if name and backend.loaded is model)
        return self.settings.name or next(named, model.checkpoint.name)

    def fingerprint(self, model: Model) -> str:
        """system_fingerprint: a digest of project version, device and precision. Equal fingerprints give equal texts
        for equal seeds. Cached for each model, since the precision is collected from all plans."""
        if model not in self._fingerprints:
            what = repr((__version__, model.device, sorted(model.engine.runner.precision.items())))
            self._fingerprints[model] = f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"
        return self._fingerprints[model]

    def compiled(self, model: Model) -> Grammars:
        """The grammars of a model."""
        if model not in self._compiled:
            self._compiled[model] = Grammars(model.checkpoint.tokenizer, model.hparams.vocab)
        return self._compiled[model]

    def client(self, request: Request) -> str:
        """The client's identity for fair scheduling: the API key if keys are required, else the peer address."""
        address = request.client.host if request.client is not None else ""
        return key_of(request.headers) if self.settings.keys else address

    async def aside(self, request: Request, work: Callable[..., T], *args: Any) -> T:
        """Run a long call in the text thread."""
        return await self.texts.call(self.client(request), work, *args)

    def template(self, c: Checkpoint) -> str | None:
        """The chat template in use, or None."""
        try:
            return chat.template_of(c.tokenizer, c.chat_template)
        except chat.ChatError:
            return None

    async def answer(
        self, request: Request, jobs: Sequence[Job], form: Form, stream: bool, notes: Iterable[str] = ()
    ) -> Response:
        """Run jobs and format their answer, streamed or whole. ApiError if the queue is full or a job fails."""
        headers = note(notes)
        feed = Feed(request.scope[USE].backend, self.metrics, jobs, request.scope[BEGAN])
        if not stream:
            return Json(await until_gone(request, self._whole(feed, form)), headers=headers)

        def ended(whole: bool) -> None:
            feed.cancel()
            if not whole:
                request.scope[OUTCOME] = "cancelled"

        return EventStream(self._chunks(feed, form, request), self.settings.idle, ended, headers, form.media)

    async def _whole(self, feed: Feed, form: Form) -> dict[str, Any]:
        async for batch in feed.batches():
            for item in batch:
                form.push(item)
        return form.whole()

    async def _chunks(self, feed: Feed, form: Form, request: Request) -> AsyncGenerator[bytes, None]:
        try:
            if chunk := form.open():
                yield chunk
            async for batch in feed.batches():
                chunk = b"".join(form.push(item) for item in batch) if batch else form.waiting()
                if chunk:
                    yield chunk
            yield form.close()
        except ApiError as error:
            request.scope[OUTCOME] = outcome_of(error.status)
            yield form.fail(error)
        except Exception as error:
            request.scope[OUTCOME] = "failed"
            yield form.fail(internal(error))


class Work:
    """A request's work with its model: a hybrid.model.Model, or a hybrid.embedding.EmbeddingModel."""

    def __init__(self, service: Service, request: Request, model: Any) -> None:
        self.service, self.request, self.model = service, request, model
        self._client = service.client(request)

    @property
    def most(self) -> int:
        """Most tokens of a prompt."""
        ctx: int = self.model.engine.cache.ctx
        return min(self.service.settings.max_prompt or ctx, ctx)

    def check_length(self, characters: int) -> None:
        """ApiError 400 for a text with too many tokens under every tokenisation, by the longest token's length."""
        least = characters // self.model.checkpoint.tokenizer.longest
        if least > self.most:
            raise _too_long(f"at least {least}", self.most)

    def check_ids(self, ids: list[int], param: str, most: int | None = None) -> None:
        """ApiError 400 for too many ids, or ids that are no tokens."""
        if most is not None and len(ids) > most:
            raise _too_long(str(len(ids)), most)
        vocab = self.model.hparams.vocab
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            raise bad_request(f"token ids are 0 to {vocab - 1}", param, "invalid_value")

    async def encode(self, text: str, *, bos: bool = True, guard: str | None = None, bounded: bool = True) -> list[int]:
        """Ids of a text. guard: for a rendered conversation (chat.written), marks its control tokens. bounded: ApiError
        400 as soon as the text is known to be too long."""
        if bounded:
            self.check_length(len(text) - (text.count(guard) if guard else 0))
        encode = self.model.checkpoint.tokenizer.encode_parts
        parts = encode(text, bos and guard is None, guard is not None, guard or "")
        joined = _joined(parts, self.most if bounded else None)
        return await self.service.texts.run(self._client, joined, len(text))

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """Run a long call in the text thread."""
        return await self.service.aside(self.request, work, *args)

    async def written(self, messages: Sequence[Any], tools: Any = None, **how: Any) -> tuple[str, str]:
        """Render a conversation with the model's chat template: (text, guard) for `encode`. how: of chat.written."""
        c = self.model.checkpoint
        template = (c.tool_template if tools is not None else None) or c.chat_template
        work = partial(chat.written, c.tokenizer, messages, template, False, tools, **how)
        return await self.service.templates.call(self._client, work)

    async def tool_format(self) -> Format:
        """The tool-call format of the model's template, else JSON."""
        c = self.model.checkpoint
        template = c.tool_template or c.chat_template or ""
        known = self.service.formats.setdefault(c.tokenizer, {})
        if template not in known:
            found = marked(c.tokenizer, template)
            found = found or await self.service.templates.call(self._client, written, c.tokenizer, template)
            known[template] = found or JSON
        return known[template]

    async def constraints(self, grammars: Sequence[str], param: str, n: int) -> list[GrammarConstraint]:
        """n constraints of the first of several grammars that compiles. ApiError 400, naming `param`; 429."""
        known = self.service.compiled(self.model)

        def made() -> list[GrammarConstraint]:
            first = known.constraint(grammars, param)
            return [first, *(first.copy() for _ in range(n - 1))]

        return await self.service.grammars.call(self._client, made)

    async def prompt_logprobs(self, ids: Sequence[int], top: int) -> list[TokenLogprob | None]:
        """Log probability of each prompt token given the previous ones, as in `hybrid.perplexity`; None for the
        first."""
        return await self._on_device(self.service.scores, _prompt_logprobs, self.model, ids, top)

    async def embedded(self, work: Callable[[], T]) -> T:
        """Run a call of an embedding model's engine: the texts of several share its passes."""
        return await self._on_device(self.service.embeddings, work)

    async def _on_device(self, pool: FairPool, work: Callable[..., T], *args: Any) -> T:
        """Run a call that reports a loss of the model's device by its error alone."""
        try:
            return await pool.call(self._client, work, *args)
        except ApiError as error:
            if error.code == "device_lost":
                self.request.scope[USE].backend.lost(self.model, DeviceLost(error.message))
            raise


def note(parts: Iterable[str]) -> dict[str, str]:
    """Headers with notes on ignored parts of a request."""
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
    message = f"the prompt has {count} tokens, and this server takes {most}: shorten it"
    return bad_request(message, code="context_length_exceeded")


_ROWS = 16
"""Rows of logits that are processed at once, in float64."""


def _prompt_logprobs(model: Model, ids: Sequence[int], top: int) -> list[TokenLogprob | None]:
    out: list[TokenLogprob | None] = [None]
    for logits in model.engine.logits_of([ids]):
        for start in range(0, len(logits), _ROWS):
            rows = logits[start : start + _ROWS].astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            for row in rows[: len(ids) - len(out)]:  # the last row has no next prompt token
                best = np.argpartition(row, -top)[-top:] if top else np.empty(0, int)
                best = best[np.argsort(-row[best], kind="stable")]
                token = ids[len(out)]
                out.append(TokenLogprob(token, float(row[token]), tuple((int(i), float(row[i])) for i in best)))
    return out
