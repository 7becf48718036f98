"""The public API: load a checkpoint on a device and generate text."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

import numpy as np

from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.cli.progress import progress_bar
from hybrid.core import interrupts
from hybrid.core.dtypes import CacheChoice
from hybrid.core.errors import DeviceLost as DeviceLost
from hybrid.core.hparams import HParams
from hybrid.core.units import parse_bytes
from hybrid.devices.opening import NpuKind, Opened
from hybrid.engine.handle import Handle, outcomes
from hybrid.engine.loading import MOST_DRAFTS, EngineConfig, LoadClock
from hybrid.engine.loop import QUEUE, Engine
from hybrid.engine.request import Options, Request, token_ids
from hybrid.engine.speculation import Drafter, Speculator, most_drafts
from hybrid.engine.stats import EngineReport, Metrics, Stats
from hybrid.planning.cost import bytes_elsewhere, plan_cost
from hybrid.planning.planner import PrecisionName
from hybrid.ready import drafter_for, ready
from hybrid.spec.schedule import Schedule
from hybrid.text.chat import Message, encode

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
    requantize: bool = False,
    deterministic: bool = False,
    slots: int | None = None,
    queue: int = QUEUE,
    memory: int | str | None = None,
    chunk: int | None = None,
    profile: bool = False,
    progress: bool = False,
    npu: NpuKind = "npu",
    draft: str | os.PathLike[str] | Checkpoint | Drafter | None = None,
    speculate: Literal["auto"] | int | None = None,
    warm: bool = False,
    prove: bool = True,
) -> Model:
    """Load a .gguf file, a Hugging Face directory or an open checkpoint on a device.

    device: auto (a real GPU, else cpu), cpu, vulkan, vulkan:N, another chain of the schedule, or open devices.
    schedule: a file (default: the shipped one of the checkpoint's family).
    weights: convert matrices to f32, f16, bf16, q8_0, q4_0, q4_1, q5_1, q3_k, q2_k, iq4_nl or iq4_xs while loading.
    requantize: with `weights`, also matrices that are quantised in another type.
    ctx: tokens per sequence (default: the model's, at most 4096).
    precision: auto (quantised weights: int8 activations and f16 KV cache; unquantised weights: float32, or on matrix
    units the types of quantised weights in the same model), exact (float32), fast (f16 for unquantised weights).
    kv: the KV cache's type; overrides the precision.
    slots: sequences that run at a time, each with cache blocks for its full context (default: a few that share the
    blocks of one).
    queue: most waiting requests.
    memory: device memory budget in bytes or as text such as 16GiB; the cache gets the rest after weights and
    activations (default: enough for `slots` full contexts). A mixture's experts that do not fit go to host memory.
    chunk: rows of a prefill pass (default: by the device).
    deterministic: bit-identical results, independent of prompt chunks and other requests; slower.
    profile: time every step. progress: show a progress bar, if it takes more than a second.
    npu: run a schedule's NPU steps on the hardware, or on its simulator.
    draft: speculative decoding with a smaller model with the same tokenizer, with the model's assistant (a drafter that
    reads its cache), or with "lookup" (prompt lookup by n-grams). The generated text does not change.
    speculate: draft tokens of a pass: a number, 0 for none, or auto (by acceptance and measured pass times). Without
    draft it means "lookup".
    warm: compile passes of all batch sizes now, not on the first request that needs them.
    prove: before a model's first load on a Vulkan device and driver, run each of its kernels once against the oracle.

    Raises ValueError (files, options, schedules) or RuntimeError (no device) with a one-line message and its fix.
    """
    drafts = most_drafts(draft, speculate)
    config = EngineConfig(
        drafts=drafts,
        precision=precision,
        kv=kv,
        weights=weights,
        requantize=requantize,
        ctx=ctx,
        slots=1 if slots is None else slots,
        shared=slots is None,
        memory=parse_bytes(memory) if isinstance(memory, str) else memory,
        chunk=chunk,
        deterministic=deterministic,
        profile=profile,
    )
    clock = LoadClock()
    with clock.phase("open"):  # which may show how a file is fetched
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    try:
        if drafts and isinstance(draft, str | os.PathLike) and draft != "lookup":
            draft = open_checkpoint(draft)
        if drafts and isinstance(draft, Checkpoint) and draft.hparams.backbone:
            config = replace(config, hidden=True)
        with clock.shown(progress):
            made = ready(checkpoint, device, schedule, config, clock, npu, warm, queue, prove)
        try:
            if drafts:
                k = drafts if isinstance(speculate, int) else None
                made.engine.speculate(drafter_for(made, draft, slots, warm, prove), k)
            if warm:
                # a full collection takes long with a loaded model: do it before the first request
                gc.collect()
        except BaseException:
            made.close()
            raise
    except BaseException:
        checkpoint.close()
        if isinstance(draft, Checkpoint):
            draft.close()
        raise
    return Model(checkpoint, made.opened, made.engine)


class Model:
    """A loaded model, made by `load`. Thread-safe: calls are serialised in FIFO order, and a generation releases the
    lock after each piece of text."""

    def __init__(self, checkpoint: Checkpoint, opened: Opened, engine: Engine) -> None:
        self.checkpoint = checkpoint
        self.engine = engine
        self.device = opened.device.name
        """The device's name, for example `vulkan:0 (NVIDIA H200)` or `cpu`."""
        self.passed_over = opened.passed_over
        self.load = engine.runner.clock.load()
        """Times of loading."""
        self.stats: Stats | None = None
        """Statistics of the generation that ended last."""
        self._opened: Opened | None = opened

    @property
    def speculator(self) -> Speculator | None:
        """The speculation controller with its acceptance counts; None without speculation."""
        return self.engine.speculator

    @property
    def hparams(self) -> HParams:
        return self.checkpoint.hparams

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.checkpoint.tokenizer.eos_ids

    def encode(self, text: str, bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. parse_special: recognise control tokens such as <start_of_turn> in it."""
        return self.checkpoint.tokenizer.encode(text, bos=bos, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD; control tokens are omitted."""
        return self.checkpoint.tokenizer.decode(ids)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits, float32 [len(ids), vocab]: after soft-cap, unmasked, for every row of the
        embedding."""
        return self._engine().logits(token_ids(ids))

    def hidden_states(self, ids: Sequence[int], streams: bool = False) -> np.ndarray:
        """float32 [layers + 1, len(ids), hidden]: the residual stream after the scaled embedding and after each layer.
        With several streams (Gemma 3n) the active one; streams=True: all, [layers + 1, len(ids), streams, hidden]."""
        return self._engine().hidden_states(token_ids(ids), streams=streams)

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 64, **options: Any) -> Generator[str, None, None]:
        """Stream the generated text in pieces; joined, they are `decode` of the generated ids, cut before a stop
        string.

        Prompt ids are used verbatim; a text gets a begin-of-text token. Ends after max_tokens, at an end-of-text token
        (unless ignore_eos), at a stop string, or at the end of the context; `stats` has the reason. Reuses cached
        prefixes. options: hybrid.engine.request.Options; speculate may also be "auto". Validates arguments before
        returning the generator.
        """
        request = self._engine().request(*self._asked(prompt, {**options, "max_tokens": max_tokens}))
        return self._generate(request)

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = 1024,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Generator[str, None, None]:
        """Stream the answer to a conversation, [{"role": "user", "content": "..."}, ...], in the checkpoint's chat
        format. A thought comes with its marks. Control tokens inside messages are ordinary text. tools: descriptions
        for the template. options: of `generate`. ChatError (a ValueError) for messages that the template refuses."""
        if isinstance(messages, (str, Mapping)):
            raise ValueError("chat takes a list of messages; generate takes one text")
        c = self.checkpoint
        template = (c.tool_template if tools is not None else None) or c.chat_template
        return self.generate(encode(c.tokenizer, messages, template, tools=tools), max_tokens, **options)

    def submit(self, prompt: str | Sequence[int], **options: Any) -> Handle:
        """Enqueue a request from any thread without blocking. Up to `slots` requests run as a batch. Read results from
        the handle, in threads or with asyncio. options: hybrid.engine.request.Options. Raises ValueError for wrong
        options, ContextExceeded for a prompt that is too long, QueueFull.
        """
        return self._engine().submit(*self._asked(prompt, options))

    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], *, progress: bool = False, **options: Any
    ) -> list[str]:
        """Generated texts of several prompts, in order. options: of `submit`. progress: show a bar on standard error.
        The first error of a request is raised and cancels the rest."""
        self._engine()
        if isinstance(prompts, str):
            raise ValueError("generate_batch takes a list of prompts; generate takes one text")
        found: list[str] = []
        with progress_bar(len(prompts), "prompts", True, " prompts") if progress else nullcontext(None) as advance:
            for one in outcomes(partial(self.submit, p, **options) for p in prompts):
                if isinstance(one, Exception):
                    raise one
                found.append(one.text)
                if advance is not None:
                    advance(1)
        return found

    def metrics(self) -> Metrics:
        """A snapshot of the engine's counters."""
        return self.engine.metrics()

    def _asked(self, prompt: str | Sequence[int], options: dict[str, Any]) -> tuple[list[int], Options]:
        """The prompt's ids and the parsed options. ValueError."""
        if options.get("speculate") == "auto" and self.speculator is not None:
            if self.speculator.k is not None:
                raise ValueError(
                    f"speculate: the model was loaded with {self.speculator.k} draft tokens a pass: give a number, 0 to "
                    f"{MOST_DRAFTS}, or load it with speculate='auto'"
                )
            options = {**options, "speculate": None}
        return self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt), Options.of(options)

    def _generate(self, request: Request) -> Generator[str, None, None]:
        """Run a request in the caller's thread and stream its text."""
        engine = self._engine()  # it may have been closed since `generate`
        with engine.lock, interrupts.allowed():
            rest = request.n_prompt - engine.cached(request.prompt)
            engine.runner.warm_up(rest, request.options.options())  # excludes compilation from the statistics
        try:
            yield from engine.drive(request)
        finally:
            engine.finish([request])
            if self._opened is not None:
                self.stats = request.stats(self._report(request))

    def _report(self, request: Request) -> EngineReport:
        """Engine statistics for a request."""
        engine, runner, spec = self.engine, self.engine.runner, self.engine.drafting
        done = engine.counters.minus(runner.prefilled)
        counted = [f.name for f in fields(done) if f.name not in ("bytes_up", "bytes_down")]
        context = request.n_prompt + (len(request.ids) - request.n_prompt) // 2
        decode = runner.program("decode", 1, 1).plan
        return EngineReport(
            device=self.device,
            passed_over=(*self.passed_over, *engine.device.failures, *engine.faults),
            precision=runner.precision,
            bytes_per_token=plan_cost(decode, context).nbytes,
            bytes_elsewhere=bytes_elsewhere(decode, context, engine.device.backend, runner.spilled),
            per_pass={name: getattr(done, name) / max(runner.decoded, 1) for name in counted},
            carried=engine.device.copies,
            notes=self.checkpoint.notes,
            load=self.load,
            reencoded=tuple(r.line() for r in runner.reencoded),
            memory=dict(engine.device.memory()),
            threads=engine.device.threads,
            speculation=_speculation(spec.name, request) if spec and (self.speculator or request.drafted) else "",
            drafted=request.drafted,
            accepted=request.accepted,
        )

    def close(self) -> None:
        """Free all device objects and close the files. Unfinished requests fail; later calls raise ValueError."""
        self.engine.close(ValueError(CLOSED))
        with self.engine.lock:
            if self._opened is not None:
                opened, self._opened = self._opened, None
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


def _speculation(name: str, request: Request) -> str:
    """A line on a request's speculation."""
    share = f" ({100 * request.accepted / request.drafted:.0f} %)" if request.drafted else ""
    tokens = len(request.ids) - request.n_prompt
    rate = f"; {tokens / request.passes:.2f} tokens per pass" if request.passes else ""
    return f"speculation ({name}): drafted {request.drafted}, accepted {request.accepted}{share}{rate}"
