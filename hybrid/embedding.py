"""The class of embedding models, and its loading.

import hybrid
with hybrid.load_embedder("google/embeddinggemma-300m") as model:
    query, *texts = model.embed(["What is asyncio?"], task="query"), *model.embed(documents, task="document")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType

import numpy as np

from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.core import garbage
from hybrid.core.errors import nearest
from hybrid.core.hparams import HParams
from hybrid.devices.opening import Opened, opening_devices
from hybrid.engine.embedding import TEXTS, Embedder, whole_texts
from hybrid.engine.loading import EngineConfig, LoadClock
from hybrid.engine.stats import Metrics
from hybrid.planning.planner import PrecisionName
from hybrid.ready import proved
from hybrid.spec.schedule import find_schedule

CLOSED = "this model is closed: load it again"


def load_embedder(
    path: str | os.PathLike[str] | Checkpoint,
    device: str | Opened = "auto",
    *,
    weights: str | None = None,
    requantize: bool = False,
    ctx: int | None = None,
    precision: PrecisionName = "auto",
    chunk: int | None = None,
    slots: int = TEXTS,
    progress: bool = False,
    warm: bool = False,
    prove: bool = True,
) -> EmbeddingModel:
    """Load an embedding model: a .gguf file, a Hugging Face directory or an open checkpoint. ctx: most tokens of a text
    (default: the model's, at most 2048). chunk: rows of a pass, at least ctx (default: by the device). slots: most texts of
    a pass. Other arguments as of hybrid.load. ValueError or RuntimeError with a one-line message and its fix."""
    config = EngineConfig(
        precision=precision, weights=weights, requantize=requantize, ctx=ctx, slots=slots, chunk=chunk
    )
    clock = LoadClock()
    with clock.phase("open"):
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    try:
        with clock.shown(progress):
            opened, embedder = _ready(checkpoint, device, config, clock, warm, prove)
    except BaseException:
        checkpoint.close()
        raise
    return EmbeddingModel(checkpoint, opened, embedder)


def _ready(
    checkpoint: Checkpoint, device: str | Opened, config: EngineConfig, clock: LoadClock, warm: bool, prove: bool
) -> tuple[Opened, Embedder]:
    """Open devices and load the model. On an error everything opened here is closed."""
    schedule = find_schedule(checkpoint.hparams.family)
    with opening_devices(schedule, device, "npu") if isinstance(device, str) else nullcontext(lambda: device) as found:
        with clock.phase("tokenizer"):
            checkpoint.tokenizer  # noqa: B018 (made at first use)
        with clock.phase("device"):
            opened = found()
    try:
        embedder = Embedder(checkpoint, opened.device, config, schedule, clock)
        with clock.phase("pipelines"):
            if warm:
                embedder.warm()
        garbage.trim()
        with clock.phase("proof"):
            right = not prove or proved(opened, checkpoint, whole_texts(config, checkpoint, opened.device), schedule)
    except BaseException:
        opened.device.close()
        raise
    if right:
        return opened, embedder
    opened.device.close()
    if not isinstance(device, str):
        raise RuntimeError(f"{opened.main.name} computes wrong results (python -m hybrid.prove): open it again")
    return _ready(checkpoint, device, config, clock, warm, prove)


class EmbeddingModel:
    """A loaded embedding model, made by `load_embedder`. Thread-safe: texts of several threads share passes."""

    def __init__(self, checkpoint: Checkpoint, opened: Opened, engine: Embedder) -> None:
        self.checkpoint, self.engine = checkpoint, engine
        self.device = opened.device.name
        """The device's name, for example `vulkan:0 (NVIDIA H200)` or `cpu`."""
        self.passed_over = opened.passed_over
        self.load = engine.clock.load()
        """Times of loading."""
        self._opened: Opened | None = opened

    @property
    def hparams(self) -> HParams:
        return self.checkpoint.hparams

    @property
    def dimensions(self) -> int:
        """Numbers of a vector."""
        return self.hparams.dimensions

    @property
    def tasks(self) -> tuple[str, ...]:
        """Values of `task`."""
        return tuple(self.checkpoint.prompts)

    def encode(self, text: str, task: str | None = None, truncate: bool = False) -> list[int]:
        """Ids of a text behind the task's prompt. truncate: leave out what the model does not take. ValueError for an unknown
        task."""
        prompts = self.checkpoint.prompts
        if task is not None and task not in prompts:
            raise ValueError(f"the model knows no task {task!r}{nearest(task, prompts)}")
        ids = self.checkpoint.tokenizer.encode(text if task is None else prompts[task] + text)
        return self.cut(ids) if truncate else ids

    def cut(self, ids: list[int]) -> list[int]:
        """The ids that the model takes, of a longer text: the first ones, and the last if that ends every text."""
        most, after = self.engine.cache.ctx, self.checkpoint.tokenizer.vocabulary.after_id
        if len(ids) <= most:
            return ids
        return ids[:most] if after is None or ids[-1] != after else [*ids[: most - 1], after]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, as of hybrid.Model."""
        return self.checkpoint.tokenizer.decode(ids)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        task: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> np.ndarray:
        """Vectors float32 [texts, dimensions], each of length 1. texts: strings, or ids that are taken as they are. task: one
        of `tasks`; None: no prompt. dimensions: keep so many numbers of each vector (default: all). truncate: cut texts that
        are too long instead of refusing them.

        Raises ContextExceeded for a text that is too long; ValueError for a wrong argument."""
        if isinstance(texts, str):
            raise ValueError("embed takes a list of texts: put the text into one")
        if not all(isinstance(text, str | Sequence | np.ndarray) for text in texts):
            raise ValueError("embed takes texts, or lists of their ids")
        self.check_dimensions(dimensions)
        if self._opened is None:
            raise ValueError(CLOSED)
        self._opened.device.check_open()
        ids = [self.encode(t, task, truncate) if isinstance(t, str) else list(t) for t in texts]
        return normalised(self.engine.embed([self.cut(one) for one in ids] if truncate else ids), dimensions)

    def check_dimensions(self, dimensions: int | None) -> None:
        """ValueError for a number of dimensions that the model does not have."""
        if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= self.dimensions):
            raise ValueError(f"dimensions must be 1 to {self.dimensions}, not {dimensions}")

    def metrics(self) -> Metrics:
        """A snapshot of the engine's counters."""
        return self.engine.metrics()

    def close(self) -> None:
        """Free all device objects and close the files."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.device.close()
            self.checkpoint.close()

    def __enter__(self) -> EmbeddingModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def normalised(vectors: np.ndarray, dimensions: int | None = None) -> np.ndarray:
    """The first `dimensions` numbers of vectors [n, dimensions], each vector divided by its length; zeros stay."""
    kept = vectors[:, :dimensions]
    return kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.float32(1e-12))
