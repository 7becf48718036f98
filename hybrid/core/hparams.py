"""Hyper-parameters of a model, independent of the file format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

MAX_LAYERS = 10_000  # limits allocations for a damaged count


@dataclass(frozen=True, slots=True)
class LayerParams:
    """Shapes and constants of one layer. Validated on construction; ValueError names the field.

    `head_dim` and `ffn` count elements. The RoPE angle of pair i of a head is
    `position * theta^(-2i/head_dim) / factor`.
    """

    head_dim: int
    n_heads: int
    n_kv_heads: int
    window: int
    """Sliding window in positions, the row's own included; 0: full attention."""
    rope_theta: float
    ffn: int
    rope_factor: float = 1.0
    """Linear RoPE scaling."""
    rotated: float = 1.0
    """Fraction of a head's pairs that RoPE rotates, the first ones; the rest pass unchanged."""
    sparsity: float = 0.0
    """Fraction of gate activations set to zero, as a quantile of a normal distribution; 0: none."""
    kv_from: int | None = None
    """The layer whose KV cache this one reads without appending; None: its own cache."""
    k_as_v: bool = False
    """No value projection: values are the key projection's output before norm and RoPE."""
    scalar: float = 1.0
    """Factor on the residual stream after the layer."""
    n_experts: int = 0
    """0: the feed-forward is dense."""
    experts_used: int = 0
    expert_ffn: int = 0

    def __post_init__(self) -> None:
        _check_kinds(self)
        for name in ("head_dim", "n_heads", "n_kv_heads", "ffn"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name in ("rope_theta", "rope_factor"):
            _check_float32(name, getattr(self, name))
        _require(self.head_dim % 16 == 0, "head_dim", self.head_dim, "must be a multiple of 16")
        _require(self.ffn % 32 == 0, "ffn", self.ffn, "must be a multiple of 32")
        _require(
            self.n_heads % self.n_kv_heads == 0, "n_kv_heads", self.n_kv_heads, f"must divide n_heads {self.n_heads}"
        )
        _require(self.window >= 0, "window", self.window, "must not be negative (0 = none)")
        _require(0 < self.rotated <= 1, "rotated", self.rotated, "must be a share above 0, at most 1")
        _require(
            self.rotated_pairs > 0, "rotated", self.rotated, f"rotates none of the {self.head_dim // 2} pairs of a head"
        )
        _require(0 <= self.sparsity < 1, "sparsity", self.sparsity, "must be a share from 0, below 1")
        _require(abs(self.scalar) < 1e30, "scalar", self.scalar, "is beyond what float32 computes with")
        _require(
            0 <= self.experts_used <= self.n_experts,
            "experts_used",
            self.experts_used,
            f"must be at most n_experts {self.n_experts}",
        )
        mixture = self.n_experts > 0
        for name in ("experts_used", "expert_ffn"):
            _require((getattr(self, name) > 0) == mixture, name, getattr(self, name), "must be positive with experts")
        _require(self.expert_ffn % 32 == 0, "expert_ffn", self.expert_ffn, "must be a multiple of 32")
        for name in ("n_experts", "experts_used", "expert_ffn"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative (0 = none)")

    @property
    def rope_dim(self) -> int:
        """Width of the layer's RoPE table: cosines, then sines, of the rotated pairs, padded with angle 0 to a multiple
        of 4 pairs."""
        pairs = self.rotated_pairs
        return min(self.head_dim, -(-2 * pairs // 8) * 8)

    @property
    def rotated_pairs(self) -> int:
        return int(self.rotated * self.head_dim / 2)

    @property
    def sparsity_scale(self) -> float:
        """Activation threshold in standard deviations above the mean: the normal quantile of `sparsity`, or 0."""
        return NormalDist().inv_cdf(self.sparsity) if self.sparsity else 0.0

    @property
    def rotation(self) -> tuple[float, float, float, int]:
        """Parameters of the RoPE table; layers with equal ones share a table."""
        return self.rope_theta, self.rope_factor, self.rotated, self.head_dim

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of layers with the same plan shapes and attributes; excludes `kv_from`'s layer and `scalar`."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("kv_from", "scalar")}
        return (*own.values(), self.kv_from is None)

    def numbers(self, index: int) -> dict[str, int | float]:
        """Variables of schedule expressions for the layer of this index."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain |= {"kv_from": -1 if self.kv_from is None else self.kv_from, "k_as_v": int(self.k_as_v)}
        return plain | {
            "kv": index if self.kv_from is None else self.kv_from,
            "rope_dim": self.rope_dim,
            "sparsity_scale": self.sparsity_scale,
        }


@dataclass(frozen=True)
class HParams:
    """Shapes and constants of one decoder. Validated on construction; ValueError names the field.

    `hidden` counts elements; `vocab` counts rows of the embedding, possibly more than the tokenizer has.
    """

    family: str
    hidden: int
    vocab: int
    context_length: int
    layers: tuple[LayerParams, ...]
    attention_scale: float
    eps: float
    softcap: float
    """Cap of the final logits, softcap * tanh(x / softcap); 0 = none."""
    embed_scale: float
    tied: bool
    """Whether the output matrix is the embedding; otherwise the checkpoint has `output.weight`."""
    n_streams: int = 1
    """Residual streams (AltUp)."""
    altup_active: int = 0
    """The stream that layers compute on."""
    laurel_rank: int = 0
    """Inner size of the low-rank branch beside attention; 0: none."""
    per_layer_dim: int = 0
    """Width of a token's per-layer embedding; 0: none."""
    per_layer_vocab: int = 0
    """Rows of the per-layer embedding table; 0: per-layer embeddings come from a projection alone."""
    backbone: int = 0
    """Hidden size of the target of a drafter that reads its cache; 0: no such drafter."""
    clusters: int = 0
    """Clusters of a clustered head, a divisor of `vocab`; 0: the head scores all tokens."""
    clusters_used: int = 0
    dimensions: int = 0
    """Numbers of an embedding, of a model whose results are embeddings; 0: a decoder."""
    dense: int = 0
    """Width between the two matrices after mean pooling; 0: there is one matrix."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        _require(len(self.layers) > 0, "n_layers", len(self.layers), "must be positive")
        for name in ("hidden", "vocab", "context_length", "n_streams"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name in ("attention_scale", "eps", "embed_scale"):
            _check_float32(name, getattr(self, name))
        _require(self.softcap < 1e30, "softcap", self.softcap, "is beyond what float32 computes with")
        _require(self.hidden % 32 == 0, "hidden", self.hidden, "must be a multiple of 32")
        _require(self.softcap >= 0, "softcap", self.softcap, "must not be negative (0 = none)")
        for name in ("laurel_rank", "per_layer_dim", "per_layer_vocab", "backbone", "clusters", "dimensions", "dense"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative (0 = none)")
        _require(self.backbone % 32 == 0, "backbone", self.backbone, "must be a multiple of 32")
        if self.clusters:
            _require(self.vocab % self.clusters == 0, "clusters", self.clusters, f"must divide vocab {self.vocab}")
        _require(
            (0 < self.clusters_used <= self.clusters) if self.clusters else not self.clusters_used,
            "clusters_used",
            self.clusters_used,
            f"must be 1 to clusters {self.clusters}, or 0 without clusters",
        )
        _require(
            0 <= self.altup_active < self.n_streams,
            "altup_active",
            self.altup_active,
            f"must be one of {self.n_streams} streams",
        )
        _require(
            self.per_layer_dim > 0 or not self.per_layer_vocab,
            "per_layer_vocab",
            self.per_layer_vocab,
            "must be 0 without per_layer_dim",
        )
        windows = sorted({layer.window for layer in self.layers if layer.window})
        _require(len(windows) < 2, "window", windows, "must be one number for all layers that have a window")
        for index, layer in enumerate(self.layers):
            self._check_source(index, layer)

    def _check_source(self, index: int, layer: LayerParams) -> None:
        if layer.kv_from is None:
            _require(
                index <= self.n_kv_layers,
                "kv_from",
                "none",
                f"of layer {index}: layer {self.n_kv_layers} has no cache of its own, so none after it has",
            )
            return
        where = f"of layer {index} must be an earlier layer with a cache of its own"
        _require(0 <= layer.kv_from < self.n_kv_layers, "kv_from", layer.kv_from, where)
        source = self.layers[layer.kv_from]
        same = ("window", "head_dim", "n_kv_heads", "rope_theta", "rope_factor", "rotated")
        differs = next((name for name in same if getattr(source, name) != getattr(layer, name)), None)
        _require(differs is None, "kv_from", layer.kv_from, f"of layer {index}: the two differ in {differs}")

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def n_kv_layers(self) -> int:
        """Layers with their own KV cache: all before the first that reads another layer's."""
        return next((i for i, layer in enumerate(self.layers) if layer.kv_from is not None), len(self.layers))

    @cached_property
    def window(self) -> int:
        """Sliding window of local layers in positions, the row's own included; 0 if every layer is global."""
        return max(layer.window for layer in self.layers)

    @cached_property
    def layer_is_global(self) -> tuple[bool, ...]:
        """Which layers have full attention."""
        return tuple(layer.window == 0 for layer in self.layers)

    @property
    def numbers(self) -> dict[str, int | float]:
        """Variables of schedule expressions for the whole model."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("family", "layers", "tied")}
        return {**values, "n_layers": self.n_layers, "n_kv_layers": self.n_kv_layers}

    def only(self, kept: Iterable[int]) -> HParams:
        """The model with these layers only, ascending. ValueError if one reads the cache of a removed layer."""
        new = {old: index for index, old in enumerate(kept)}
        lost = next((o for o in new if self.layers[o].kv_from is not None and self.layers[o].kv_from not in new), None)
        if lost is not None:
            raise ValueError(f"layer {lost} reads the cache of layer {self.layers[lost].kv_from}, which is left out")
        layers = [self.layers[old] for old in new]
        return replace(
            self, layers=tuple(p if p.kv_from is None else replace(p, kv_from=new[p.kv_from]) for p in layers)
        )

    def first(self, count: int) -> HParams:
        """The model with its first `count` layers only."""
        return self.only(range(count))

    def as_dict(self) -> dict[str, Any]:
        """Plain values by field name, ready for JSON."""
        layers = [{f.name: getattr(layer, f.name) for f in fields(layer)} for layer in self.layers]
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "n_layers": self.n_layers, "layers": layers}


def common(layers: Sequence[LayerParams]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Fields equal in all layers, and a list with each layer's value for the other fields."""
    by_name = {f.name: [getattr(layer, f.name) for layer in layers] for f in fields(LayerParams)}
    alike = {name: values[0] for name, values in by_name.items() if all(v == values[0] for v in values)}
    return alike, {name: values for name, values in by_name.items() if name not in alike}


def alternating(
    n_layers: int,
    layer_is_global: Sequence[bool],
    window: int,
    shape: Mapping[str, Any],
    local: Mapping[str, Any],
    global_: Mapping[str, Any],
) -> tuple[LayerParams, ...]:
    """Layers of two kinds: `shape` holds common fields, `local` and `global_` those of layers with and without a
    window."""
    _require(
        len(layer_is_global) == n_layers,
        "layer_is_global",
        f"of {len(layer_is_global)} entries",
        f"must have one entry for each of the {n_layers} layers",
    )
    count = n_layers - sum(layer_is_global)
    _require(count == 0 or window > 0, "window", window, f"must be positive: {count} layers are local")
    kinds = {
        is_global: LayerParams(**{**shape, **(global_ if is_global else local)}, window=0 if is_global else window)
        for is_global in dict.fromkeys(layer_is_global)
    }
    return tuple(kinds[is_global] for is_global in layer_is_global)


def kv_sources(layer_is_global: Sequence[bool], shared: int) -> tuple[int | None, ...]:
    """kv_from of every layer, if each of the last `shared` layers reads the cache of the last unshared layer of its
    kind. ValueError if there is none."""
    first = len(layer_is_global) - shared
    if not 0 < first <= len(layer_is_global):
        raise ValueError(f"{shared} of {len(layer_is_global)} layers cannot read other layers' caches")
    found: list[int | None] = [None] * first
    for kind in layer_is_global[first:]:
        own = [i for i in range(first) if layer_is_global[i] == kind]
        if not own:
            raise ValueError(
                f"no {'global' if kind else 'local'} layer before layer {first} has a cache for later ones to read"
            )
        found.append(own[-1])
    return tuple(found)


def _check_kinds(record: HParams | LayerParams) -> None:
    """Check that int fields are whole numbers and float fields finite. ValueError."""
    for f in fields(record):
        kind, value = str(f.type), getattr(record, f.name)
        if kind.startswith("int") and value is None and kind != "int":
            continue
        if kind.startswith("int") and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{f.name} must be a whole number, not {value!r}")
        if kind == "float" and not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise ValueError(f"{f.name} must be a finite number, not {value!r}")


def _check_float32(name: str, value: float) -> None:
    _require(value > 0, name, value, "must be positive")
    _require(1e-30 < value < 1e30, name, value, "is beyond what float32 computes with")


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{name} {value} {rule}")
