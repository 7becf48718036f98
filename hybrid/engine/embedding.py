"""Engine of embedding models: passes of whole texts, each text a slot, whose vectors the host reads.

Texts of all callers wait in one queue, of each as many as a pass may have. The caller that holds the lock runs passes, with
texts of others too, until its own are done. A pass has no message, no sampling and no decode phase, so that neither the scheduler nor the runner takes part.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hybrid.checkpoint import Checkpoint
from hybrid.core.device import Counters, Device, Program
from hybrid.core.errors import ContextExceeded
from hybrid.core.plan import CONTROL, CONTROL_TENSOR, CONTROL_WORDS
from hybrid.core.tensor import Tensor
from hybrid.engine.loading import EngineConfig, LoadClock, load_tensors, placed, sizes_for, target_for
from hybrid.engine.stats import Metrics
from hybrid.planning.cache import BLOCK, MOST_ROWS
from hybrid.planning.passes import bucket_of, capabilities_of, chunk_of
from hybrid.planning.pipeline import outlasting
from hybrid.planning.planner import plan
from hybrid.spec.schedule import Schedule, find_schedule

TEXTS = 128
"""Most texts of a pass."""
LONGEST = 2048
"""Default of the most tokens of a text. A pass holds a whole text, so its memory grows with this."""


def whole_texts(config: EngineConfig, checkpoint: Checkpoint, device: Device) -> EngineConfig:
    """The configuration with passes that hold the longest text, cache blocks for the rows of one, and the precision that
    `device` demands."""
    longest = min(checkpoint.hparams.context_length, LONGEST) if config.ctx is None else config.ctx
    ctx = replace(config, ctx=longest).context(checkpoint.hparams)
    if ctx > MOST_ROWS:
        raise ValueError(f"ctx {ctx}: a text runs in one pass, which has at most {MOST_ROWS} rows")
    rows = max(config.chunk or chunk_of(capabilities_of(device.has)), ctx)
    precision = "exact" if device.exact and config.precision == "auto" else config.precision
    return replace(config, ctx=ctx, chunk=rows, blocks=(rows // BLOCK + config.slots, 1), precision=precision)


class _Text:
    """A text in the queue, and its vector float32 [dimensions], or the error of its pass."""

    __slots__ = ("error", "ids", "vector")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.vector: np.ndarray | None = None
        self.error: BaseException | None = None

    @property
    def waits(self) -> bool:
        return self.vector is None and self.error is None


class Embedder:
    """One embedding model on one device, for up to `config.slots` texts a pass. schedule: default: the family's. clock:
    times loading. Closes neither the checkpoint nor the device. Thread-safe. ValueError for a checkpoint of a decoder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        config: EngineConfig | None = None,
        schedule: Schedule | None = None,
        clock: LoadClock | None = None,
    ) -> None:
        hp = checkpoint.hparams
        if not hp.dimensions:
            raise ValueError(f"{checkpoint.path} writes text and makes no embeddings: load an embedding model")
        self.clock = LoadClock() if clock is None else clock
        self.checkpoint, self.device = checkpoint, device
        self.config = whole_texts(config or EngineConfig(slots=TEXTS), checkpoint, device)
        self.sizes = sizes_for(self.config, hp, device)
        schedule = schedule or find_schedule(hp.family)
        self.target = target_for(self.config, checkpoint, device, schedule, self.sizes)
        self.cache = self.target.cache
        with self.clock.phase("plan"):
            self._largest = plan(self.target, self.sizes.rows[-1], self.cache.slots, "prefill")
        stored = placed(outlasting([self._largest]), 0)
        self.reencoded = load_tensors(checkpoint, device, self.target, self.sizes, [self._largest], stored, self.clock)
        """Matrices that were re-encoded in a type that the device supports."""
        self.passes = self.texts = self.tokens = 0
        """Totals of ended passes."""
        self.seconds = 0.0
        """Total time of passes, from the first write to the read vectors."""
        self._programs: dict[int, Program] = {}
        self._waiting = deque[_Text]()
        self._queue, self._passing = threading.Lock(), threading.Lock()

    def check(self, ids: Sequence[int]) -> None:
        """ValueError for a text without ids, or with one that the embedding lacks; ContextExceeded for a longer text than a
        pass holds."""
        if not len(ids):
            raise ValueError("a text has no token: it needs at least one")
        if len(ids) > self.cache.ctx:
            most = min(self.target.hparams.context_length, MOST_ROWS)
            more = f", or load the model with more (ctx, up to {most})" if self.cache.ctx < most else ""
            raise ContextExceeded(
                f"a text of {len(ids)} tokens does not fit in the {self.cache.ctx} of a pass: shorten or truncate it{more}"
            )
        vocab = self.target.hparams.vocab
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"a text has a token id outside 0..{vocab - 1}")

    def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Vectors float32 [texts, dimensions] of texts' ids, as the last matrix makes them: not normalised. Errors of `check`;
        ValueError for a vector that is not finite."""
        for ids in texts:
            self.check(ids)
        found = np.empty((len(texts), self.target.hparams.dimensions), np.float32)
        for first in range(0, len(texts), self.cache.slots):  # not all at once: other callers come between
            part = [_Text(ids) for ids in texts[first : first + self.cache.slots]]
            self._embed(part)
            for i, text in enumerate(part, first):
                assert text.vector is not None
                found[i] = text.vector
        return found

    def warm(self) -> None:
        """Compile the programs of all passes."""
        for rows in self.sizes.rows:
            self._program(rows)

    def metrics(self) -> Metrics:
        """A snapshot."""
        return Metrics(
            waiting=len(self._waiting),
            running=int(self._passing.locked()),
            prompt_tokens=self.tokens,
            passes=self.passes,
            finished={"embedded": self.texts},
        )

    @property
    def counters(self) -> Counters:
        return self.device.counters

    def _embed(self, own: Sequence[_Text]) -> None:
        """Put texts into the queue, and run passes until they have their vectors. The error of one of them."""
        with self._queue:
            self._waiting.extend(own)
        try:
            for text in own:
                while text.waits:
                    with self._passing:
                        if text.waits:
                            self._pass()
                if text.error is not None:
                    raise text.error
        except BaseException:
            with self._queue:
                left = set(own)
                self._waiting = deque(text for text in self._waiting if text not in left)
            raise

    def _pass(self) -> None:
        """Run one pass of the first waiting texts. An error of it is an error of each of them."""
        began = time.perf_counter()
        batch = self._taken()
        try:
            vectors = self._run([text.ids for text in batch])
        except Exception as error:
            for text in batch:
                text.error = error
            return
        except BaseException:  # an interrupt is of the caller alone
            with self._queue:
                self._waiting.extendleft(reversed(batch))
            raise
        for text, vector in zip(batch, vectors, strict=True):
            if np.isfinite(vector).all():
                text.vector = vector
            else:
                text.error = ValueError(
                    f"{self.checkpoint.path}: an embedding is NaN or infinite: a weight may be damaged (python -m "
                    "hybrid.inspect --check-finite), or activations are beyond float16: use precision exact"
                )
        self.passes, self.texts = self.passes + 1, self.texts + len(batch)
        self.tokens += sum(len(text.ids) for text in batch)
        self.seconds += time.perf_counter() - began

    def _taken(self) -> list[_Text]:
        """The first waiting texts, as many as fit in a pass."""
        batch, rows = list[_Text](), 0
        with self._queue:
            while self._waiting and len(batch) < self.cache.slots:
                rows += len(self._waiting[0].ids)
                if rows > self.sizes.rows[-1]:
                    break
                batch.append(self._waiting.popleft())
        return batch

    def _run(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Vectors float32 [texts, dimensions] of one pass."""
        lengths = np.array([len(ids) for ids in texts])
        program = self._program(bucket_of(int(lengths.sum()), self.sizes.rows))
        for name, array in self._inputs(texts, lengths).items():
            if name in program.plan.tensors:
                self.device.write(name, Tensor.of(array))
        return self.device.read("embeddings", 0, len(texts), program.submit()).array

    def _inputs(self, texts: Sequence[Sequence[int]], lengths: np.ndarray) -> dict[str, np.ndarray]:
        """What a pass of texts reads, by name."""
        ends, slots = np.cumsum(lengths), np.repeat(np.arange(len(texts)), lengths)
        starts, last = ends - lengths, lengths[slots] - 1
        positions, side = np.arange(ends[-1]) - starts[slots], self.target.hparams.window - 1
        near = np.maximum(0, positions - side), np.minimum(last, positions + side)
        blocks = -(-lengths // BLOCK)
        first, entries = np.cumsum(blocks) - blocks, np.arange(self.cache.table)
        control = np.zeros(CONTROL_WORDS, np.uint32)
        for word, count in (("rows", ends[-1]), ("outs", len(texts)), ("context", lengths.max())):
            control[CONTROL[word]] = count
        found = {
            "tokens": np.concatenate(list(texts)),
            "positions": positions,
            "slots": slots,
            "views.global": np.column_stack([np.zeros_like(last), last]),
            "views.local": np.column_stack(near),
            "ranges": np.column_stack([starts, ends - 1]),
            "block_table": np.where(entries < blocks[:, None], first[:, None] + entries, 0),
        }
        return {CONTROL_TENSOR: control, **{name: array.astype(np.int32) for name, array in found.items()}}

    def _program(self, rows: int) -> Program:
        """The compiled plan of a bucket of rows, which may all be texts; compiled on first use."""
        if rows not in self._programs:
            outs = min(rows, self.cache.slots)
            made = plan(self.target, rows, outs, "prefill", layout=self._largest)
            self._programs[rows] = self.device.compile(made, profile=self.config.profile, cooperative=False)
        return self._programs[rows]
