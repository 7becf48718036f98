"""How an engine runs a checkpoint, and what follows from it for a device: row counts of passes, cache sizes, the plans'
target."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import get_args

from hybrid.checkpoint import Checkpoint
from hybrid.core.device import Device
from hybrid.core.dtypes import CACHE_CHOICES, CacheChoice
from hybrid.core.hparams import HParams
from hybrid.core.numeric import np
from hybrid.engine.weights import stored_types
from hybrid.planning.cache import DEFAULT_CTX, MAX_SLOTS, CacheShape
from hybrid.planning.passes import PassSizes, capabilities_of, chunk_of, decode_buckets_of, fixed_rows, pass_sizes
from hybrid.planning.planner import PrecisionName, Target
from hybrid.spec.schedule import Schedule

MOST_GUESSES = 16
SHARING = 4


def check_guesses(speculate: object) -> int:
    """The most tokens to guess in a pass, by what a user asks for. ValueError."""
    if speculate == "auto":
        return MOST_GUESSES
    if isinstance(speculate, bool) or not isinstance(speculate, int | np.integer) or not 0 <= speculate <= MOST_GUESSES:
        raise ValueError(
            f"speculate must be auto, or a number of tokens to guess, 0 to {MOST_GUESSES}, not {speculate!r}"
        )
    return int(speculate)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Checked when made: ValueError names the field and what it may be. None: decided by the model or the device."""

    precision: PrecisionName = "auto"
    """auto: quantised weights with int8 activations and an f16 KV cache, others in float32, or as quantised ones beside
    them on matrix units; exact: float32; fast: unquantised weights with f16 activations."""
    kv: CacheChoice = "auto"
    """Storage type of the KV cache; auto: by `precision`."""
    weights: str | None = None
    """Storage type that matrices are converted to while loading (default: the file's)."""
    ctx: int | None = None
    """Positions per sequence (default: the model's context, at most DEFAULT_CTX)."""
    slots: int = 1
    """Sequences that the KV cache holds at a time."""
    blocks: tuple[int, int] = (0, 0)
    """Blocks of the KV cache in global and in local layers (0: what `slots` sequences need at their longest). With
    fewer, scheduled sequences take turns."""
    shared: bool = False
    """In place of `slots` and `blocks`: SHARING slots, with blocks for one sequence at its longest."""
    memory: int | None = None
    """Bytes on the device: the KV cache takes what weights and activations leave of them, in place of `blocks`."""
    chunk: int | None = None
    """Most rows of a prefill pass (default: what fills the device's matrix units)."""
    n_tokens: int | None = None
    """Ids below this may be chosen (default: the tokenizer's size)."""
    deterministic: bool = False
    """Passes of one size only, whatever runs in them, so that a row's bits depend neither on how its prompt was cut nor
    on what runs beside it. Slower: prompts go through a few rows at a time; on cpu one row, and one sequence."""
    guesses: int = 0
    """Most guessed tokens that a pass verifies (hybrid/engine/drafting.py)."""
    profile: bool = False
    """Time every step (Engine.trace), at the cost of a wait after each pass."""
    progress: bool = False
    """A progress bar on standard error while weights load."""

    def __post_init__(self) -> None:
        for name, known in (("kv", CACHE_CHOICES), ("precision", get_args(PrecisionName))):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: use one of {', '.join(known)}")
        if not isinstance(self.slots, Integral) or not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots must be 1..{MAX_SLOTS}, not {self.slots!r}")
        if not isinstance(self.guesses, Integral) or not 0 <= self.guesses <= MOST_GUESSES:
            raise ValueError(f"guesses must be 0..{MOST_GUESSES}, not {self.guesses!r}")
        for name in ("ctx", "chunk", "n_tokens", "memory"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or (value < 1 and name != "ctx")):
                raise ValueError(f"{name} must be a positive integer, or None for the default, not {value!r}")

    def context(self, hparams: HParams) -> int:
        """Positions per sequence for a model. ValueError where it was made for fewer."""
        ctx = min(hparams.context_length, DEFAULT_CTX) if self.ctx is None else self.ctx
        if not 1 <= ctx <= hparams.context_length:
            raise ValueError(
                f"ctx {ctx} is outside 1..{hparams.context_length}, the context that the model was made for"
            )
        return ctx


def sizes_for(config: EngineConfig, hparams: HParams, device: Device) -> PassSizes:
    """Row counts that plans are made for. ValueError where the device cannot be deterministic for so many slots."""
    can = capabilities_of(device.has)
    chunk = chunk_of(can) if config.chunk is None else config.chunk
    fixed = fixed_rows(device.backend, config.slots) if config.deterministic else None
    return pass_sizes(
        hparams, config.context(hparams), config.slots, chunk, fixed, config.guesses, decode_buckets_of(can)
    )


def target_for(
    config: EngineConfig, checkpoint: Checkpoint, device: Device, schedule: Schedule, sizes: PassSizes
) -> Target:
    """What all plans of the engine share. ValueError for weights that the device cannot hold as the configuration
    says."""
    hp = checkpoint.hparams
    n_tokens = checkpoint.tokenizer.n_tokens if config.n_tokens is None else config.n_tokens
    return Target(
        schedule,
        hp,
        stored_types(checkpoint, config.weights, device.backend),
        CacheShape.of(hp, config.context(hp), config.slots, sizes.rows[-1], device.pipeline_depth, config.blocks),
        min(hp.vocab, n_tokens),
        config.precision,
        config.kv,
        device.backend,
        capabilities_of(device.has),
        device.few_rows(hp.hidden),
    )
