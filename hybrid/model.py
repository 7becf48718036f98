"""The public face: a checkpoint on a device, with text in and text out."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Literal, NoReturn

import numpy as np

from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core import interrupts
from hybrid.core.dtypes import CacheChoice
from hybrid.core.errors import DeviceLost as DeviceLost
from hybrid.core.hparams import HParams
from hybrid.core.units import parse_bytes
from hybrid.devices.opening import NpuKind, Opened
from hybrid.engine import batch
from hybrid.engine.chunks import token_ids
from hybrid.engine.config import MOST_GUESSES, EngineConfig
from hybrid.engine.constraint import Constraint
from hybrid.engine.drafting import Drafting, most_guesses
from hybrid.engine.drafts import Drafter
from hybrid.engine.engine import Engine
from hybrid.engine.handle import Handle
from hybrid.engine.job import Job
from hybrid.engine.loading import LoadClock
from hybrid.engine.metrics import Metrics
from hybrid.engine.options import Options
from hybrid.engine.pace import Counts
from hybrid.engine.request import Request
from hybrid.engine.serving import QUEUE, Serving
from hybrid.engine.session import Session, in_own_slot
from hybrid.engine.stats import EngineReport, Stats
from hybrid.planning.cost import plan_cost
from hybrid.planning.planner import PrecisionName
from hybrid.ready import drafter_for, ready
from hybrid.spec.schedule import Schedule

CLOSED = "this model is closed: load it again"


def load(
    path: str | os.PathLike[str] | Checkpoint,
    device: str | Opened = "auto",
    schedule: str | os.PathLike[str] | Schedule | None = None,
    weights: str | None = None,
    ctx: int | None = None,
    kv: CacheChoice = "auto",
    precision: PrecisionName = "auto",
    *,
    deterministic: bool = False,
    slots: int | None = None,
    queue: int = QUEUE,
    memory: int | str | None = None,
    chunk: int | None = None,
    profile: bool = False,
    progress: bool = False,
    npu: NpuKind = "npu",
    draft: str | os.PathLike[str] | Checkpoint | Drafter | None = None,
    draft_device: str | None = None,
    speculate: Literal["auto"] | int | None = None,
    warm: bool = False,
) -> Model:
    """Open a .gguf file or a Hugging Face directory (or take an open checkpoint) and make it ready on a device.

    device: auto (a real GPU, else cpu), cpu, vulkan, vulkan:N, another chain of the schedule, or open ones. schedule: a
    file (default: the shipped one of the checkpoint's family). weights: q8_0, q4_0, q4_1, q5_1, f16, bf16 or f32
    converts matrices while loading. ctx: tokens per sequence (default: the model's, at most 4096). precision: auto
    (quantised weights: int8 activations and f16 KV; others: float32, or what quantised ones beside them take on matrix
    units), exact (float32), fast (unquantised weights: f16). kv overrides the cache's type. slots: sequences that run
    at a time, for each of which the cache has room at its longest (default: a few, which share the room of one).
    queue: submitted requests that may wait beside those that run. memory: bytes on the device, or text such as 16GiB:
    the cache gets what weights and activations leave of it (default: what `slots` sequences need at their longest).
    chunk: rows of a prefill pass (default: what suits the device).
    deterministic: the same bits for the same tokens, however a prompt is cut and whatever runs beside it; slower.
    profile: time every step. progress: a bar for slow loads. npu: what a schedule's NPU steps run on, the hardware or,
    only when asked for, its simulator.
    draft: guesses of the next tokens, which passes of several rows verify, so that a text is the same, sooner: a
    smaller model with the same tokenizer (on draft_device; default: where this one runs. In turns with it, or, where
    passes of the two need nothing in common, while it verifies), or "lookup": what followed the last tokens where they
    stood before. speculate: how many are guessed, auto (by what is accepted and what passes take here), a number, or 0
    for none; alone it means "lookup". warm: make what passes of many sequences need now, so that no request waits for
    that. Raises ValueError (files, options, schedules) or RuntimeError (no device) with one line that says what to do.
    """
    guesses = most_guesses(draft, speculate)
    config = EngineConfig(
        guesses=guesses,
        precision=precision,
        kv=kv,
        weights=weights,
        ctx=ctx,
        slots=1 if slots is None else slots,
        shared=slots is None,
        memory=parse_bytes(memory) if isinstance(memory, str) else memory,
        chunk=chunk,
        deterministic=deterministic,
        profile=profile,
        progress=progress,
    )
    clock = LoadClock()
    with clock.phase("open"):
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    try:
        made = ready(checkpoint, device, schedule, config, clock, npu, warm)
        try:
            drafter = drafter_for(made, draft, draft_device, slots, warm) if guesses else None
            if warm:
                # looks through all that was made, 0.15 s for a model of 62 layers: not in the midst of a request
                gc.collect()
        except BaseException:
            made.close()
            raise
    except BaseException:
        checkpoint.close()
        raise
    return Model(checkpoint, made.opened, made.engine, queue, drafter, guesses if isinstance(speculate, int) else None)


class Model:
    """Made by `load`. Threads may share it: they work one at a time, in the order in which they asked, and a generation
    lets others in after each piece of text. `slots` says how many generations and sessions may be open at a time.
    `stats` are those of whichever generation ended last."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        opened: Opened,
        engine: Engine,
        queue: int = QUEUE,
        drafter: Drafter | None = None,
        k: int | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.engine = engine
        self.device = opened.device.name
        """What runs it, for example `vulkan:0 (NVIDIA H200)` or `cpu`."""
        self.passed_over = opened.passed_over
        self.load = engine.clock.load()
        """What loading took."""
        self.stats: Stats | None = None
        """Of the last generation that ended."""
        self._opened: Opened | None = opened
        self._serving = Serving(engine, checkpoint.tokenizer, opened.device.check_open, queue, drafter, k)
        self._apart = engine.device.pipeline_depth > 1 or not engine.blocks.reuse

    @property
    def drafting(self) -> Drafting | None:
        """Guesses of what comes next, where it was loaded with any, and how many were right."""
        return self._serving.drafting

    @property
    def hparams(self) -> HParams:
        return self.checkpoint.hparams

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.checkpoint.tokenizer.eos_ids

    def encode(self, text: str, bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids; with parse_special, control tokens such as <start_of_turn> are recognised in the text."""
        return self.checkpoint.tokenizer.encode(text, bos=bos, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD, control tokens print nothing."""
        return self.checkpoint.tokenizer.decode(ids)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Teacher forcing: float32 [len(ids), vocab], every row of the file's vocabulary, after soft-cap, unmasked."""
        return self._engine().logits(token_ids(ids))

    def hidden_states(self, ids: Sequence[int], streams: bool = False) -> np.ndarray:
        """float32 [layers + 1, len(ids), hidden]: after the scaled embedding and after each layer. Of several residual
        streams (Gemma 3n) the one that layers compute on; `streams`: all, [layers + 1, len(ids), streams, hidden]."""
        return self._engine().hidden_states(token_ids(ids), streams=streams)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        session: Session | None = None,
        tokens_per_submit: int = 1,
        *,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int = 0,
        speculate: int | None = None,
    ) -> Generator[str, None, None]:
        """Pieces of text as they come; joined they are `decode` of the generated ids, cut before a stop string.

        Ids are used verbatim; text gets a begin-of-text token. Ends after max_tokens, at an end-of-text token (unless
        ignore_eos), at a stop string, or at the context's end; `stats` says which. With a `session`, what the prompt
        shares with the session's last sequence is not run again. With several tokens_per_submit pieces come that many
        at a time, with less work for the host; an end of text is then noticed late, and nothing is guessed. speculate:
        guesses of a pass (default: as the model was loaded; 0: none; auto: where it was loaded so). logprobs: as for
        `submit`, in `stats`. How tokens are chosen: hybrid.engine.sampling.Sampling. Raises at once for wrong
        arguments.
        """
        engine = self._engine()
        if not isinstance(tokens_per_submit, int) or tokens_per_submit < 1:
            raise ValueError(f"tokens_per_submit must be a positive integer, not {tokens_per_submit!r}")
        options = Options.among({**locals(), "speculate": self._guesses(speculate)})
        request = self._serving.request(self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt), options)
        if session is not None and not session.of(engine):
            raise ValueError("the session belongs to another model: use one that this model made")
        if self._apart and logprobs:
            raise ValueError(
                "logprobs come with requests that are scheduled: load without draft and speculate, or use submit"
            )
        if self._apart:
            steps = in_own_slot(engine, request, session, tokens_per_submit, self._engine, self._note)
            return engine.lock.steps(steps)
        return self._run(engine, request, options, session, tokens_per_submit)

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: int = 0,
        priority: int = 0,
        deadline: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        constraint: Constraint | None = None,
        speculate: int | None = None,
    ) -> Handle:
        """Put a request into the queue, from any thread; returns at once. Requests run together, up to `slots` at a
        time, and are read from the handle, in threads or with asyncio.

        As for `generate`. logprobs: how many of the most likely tokens come with each token (0: none; at most 20), by
        the model's own distribution. constraint: says before each token which may come (hybrid.engine.constraint).
        priority: greater ones are begun first. deadline: seconds from now after which it ends (finish `deadline`).
        ValueError for wrong options, ContextExceeded for a prompt that is too long, QueueFull where too many wait.
        """
        self._engine()
        options = Options.among({**locals(), "speculate": self._guesses(speculate)})
        return self._serving.submit(self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt), options)

    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], *, progress: bool = False, **options: Any
    ) -> list[str]:
        """The texts of several prompts, in their order; `options` are those of `submit`. progress: a bar on standard
        error. The first error of a request ends the others and is raised."""
        self._engine()
        return batch.texts(self.submit, prompts, options, progress)

    def metrics(self) -> Metrics:
        """What submitted requests have taken and done, up to now."""
        return self._serving.metrics()

    def session(self) -> Session:
        """For a conversation: one generation at a time. What its prompts have in common with what was said before is
        found in the cache, as it is without a session."""
        return Session(self._engine())

    def _guesses(self, speculate: object) -> object:
        """Of a request's passes, as `Options` has them: auto is what a model does that was loaded so. ValueError."""
        if speculate != "auto" or self.drafting is None:
            return speculate
        if self.drafting.k is not None:
            raise ValueError(
                f"speculate: the model was loaded with {self.drafting.k} guesses of a pass: ask for a number, 0 to "
                f"{MOST_GUESSES}, or load it with speculate='auto'"
            )
        return None

    def _run(
        self, engine: Engine, request: Request, options: Options, session: Session | None, at_once: int
    ) -> Generator[str, None, None]:
        """The pieces of a request's text, which takes its turn with all others from the first piece on until it is
        closed."""
        self._engine()  # it may have been closed since `generate`
        serving, mark = self._serving, None if session is None else session.enter()
        try:
            with engine.lock:
                cached = serving.cached(request.prompt)
                with interrupts.allowed():
                    engine.warm_up(
                        len(request.prompt) - cached, request.sampling.options()
                    )  # compiling is no part of the speeds
                job = serving.begin(request, options, 1 if options.logprobs else at_once)
            try:
                while (piece := serving.piece(job)) is not None:
                    yield piece
                    if session is not None and session.running is not mark and request.finish is None:
                        self._engine()  # or it is the model that was closed
                        raise ValueError("the session was closed while this generation ran: it cannot go on")
            finally:
                engine.lock.call_soon(lambda: self._end(job))  # closed by the garbage collector: not in midst of a pass
        finally:
            if session is not None:
                session.leave(mark)

    def _end(self, job: Job) -> None:
        """A generation is over, whatever the reason."""
        if self._opened is None:  # closed in the middle
            return
        self._serving.end(job)
        job.request.cached = job.stream.cached
        job.request.logprobs = tuple(job.logprobs) if job.options.logprobs else None
        self._note(job.request, self._serving.runner.decoded, job.guessed)

    def _note(self, request: Request, passes: int, counts: Counts | None = None) -> None:
        """`stats` are those of this request from now on."""
        if self._opened is not None:
            context = len(request.prompt) + len(request.out) // 2
            self.stats = request.stats(self._report(self.engine, context, passes, counts or Counts()))

    def _report(self, engine: Engine, context: int, passes: int, counts: Counts) -> EngineReport:
        """The engine's part of statistics. context: mean length of the sequence; passes: decode passes since the
        prefill; counts: of guesses, where there were any."""
        done = engine.counters.minus(engine.prefilled)
        counted = [f.name for f in fields(done) if f.name not in ("bytes_up", "bytes_down")]
        return EngineReport(
            device=self.device,
            passed_over=(*self.passed_over, *engine.device.failures, *engine.faults),
            precision=engine.precision,
            bytes_per_token=plan_cost(engine.program("decode", 1, 1).plan, context).nbytes,
            per_pass={name: getattr(done, name) / max(passes, 1) for name in counted},
            carried=engine.device.copies,
            notes=self.checkpoint.notes,
            load=self.load,
            reencoded=tuple(r.line() for r in engine.reencoded),
            memory=dict(engine.device.memory()),
            threads=engine.device.threads,
            guessed=counts.line(self.drafting.name) if self.drafting is not None else "",
            drafted=counts.drafted,
            accepted=counts.accepted,
        )

    def close(self) -> None:
        """Free every device object and let go of the files; the model cannot be used afterwards. Requests that have not
        ended fail."""
        self._serving.close(ValueError(CLOSED))
        with self.engine.lock:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                self.engine.positions.clear()
                opened.device.close()
                self.checkpoint.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Model holds a device and open files, so it cannot be pickled, copied or sent to another process: "
            f"load it there, hybrid.load({str(self.checkpoint.path)!r})"
        )

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _engine(self) -> Engine:
        if self._opened is None:
            raise ValueError(CLOSED)
        self._opened.device.check_open()
        return self.engine
