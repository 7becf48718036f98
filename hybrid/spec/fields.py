"""Tables of an operation's TOML file; op.py combines and cross-checks them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from hybrid.core.dtypes import DTYPES, LISTS
from hybrid.core.errors import FieldError, nearest
from hybrid.spec.axes import roles
from hybrid.spec.expr import RESERVED, Expr
from hybrid.spec.load import Model

BackendName = Literal["oracle", "cpu", "vulkan", "npu"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
MAIN_DEVICES: dict[str, tuple[str, str]] = {"vulkan": ("vulkan:gpu", r"vulkan(:(\d+|gpu))?"), "cpu": ("cpu", "cpu")}
"""Backends that run whole models, in the order in which --device auto tries them: the name that it tries, and what
--device may say for the backend (a regular expression). hybrid/devices/opening.py opens them."""
Scalar = int | float | str
Tag = Literal["decode", "prefill", "batch", "perf", "demo"]

SCALES: dict[str, str] = {
    "abs": "the operation's result for absolute values (|x| @ |w|.T for a matrix product)",
    "ref": "the reference value itself",
    "values": "the result with absolute values of the averaged values (the sum of p|v| for attention)",
    "softmax": "attention with all products rounded as coarsely as its scores: sum p|v| (8 + |q||k|)",
    "head_max": "the largest |reference| of the element's head",
}
EDGE_VALUES: dict[str, str] = {
    "all_zero": "every element 0",
    "one_hot": "one element of a row set, the rest 0",
    "large": "magnitudes of 1e4",
    "tiny": "magnitudes of 1e-20",
    "equal": "every element the same",
    "half_codes": "values half-way between two int8 codes",
    "max_scale_block": "a block with the largest scale its type can store",
    "negative_scale_block": "blocks whose stored scale is negative",
    "outlier": "one element of a block 1e4 times the others",
    "first": "index 0 everywhere",
    "last": "the largest index everywhere",
    "repeated": "the same index in every row",
    "reversed": "descending indices",
    "mixed_slots": "rows of several sequences, interleaved",
    "empty_cache": "position 0: a row sees only itself",
    "full_cache": "the last position the block table covers",
    "block_edge": "positions on both sides of a block's end",
    "window_edge": "positions window-1, window and window+1",
    "ring": "a block table that uses each block again, as sliding layers do",
    "saturated": "gates of +-30, where tanh is 1 to the last bit",
    "two_best": "two equal largest logits; the lower id wins",
    "all_equal": "all logits equal",
    "neg_inf": "-infinity in all but a few logits",
    "nan": "one NaN, of either sign, in every second row (of logits: no token is sampled)",
    "pos_inf": "+infinity in one logit of every second row: no token is sampled",
    "nothing_left": "every logit -infinity: no token is sampled",
    "greedy": "temperature 0",
    "every_filter": "temperature, top-k, top-p and min-p at once",
    "all_drawn": "no filter: every id may be sampled",
    "top_k_one": "top-k 1: equal to greedy",
    "min_p_border": "min-p, with logits within a thousandth of the threshold",
    "no_message": "an inbox without a message",
    "other_pass": "messages of the previous and the next pass only",
    "host_rows": "every token and position from the host",
    "going_on": "every row continues its slot's sequence",
    "ahead": "draft tokens at positions after the next one",
    "last_set": "the message in the inbox's last set",
    "outside": "slots, table indices and tables out of range: their writes are dropped",
    "drafted": "every token is a draft token, of any slot",
    "one_expert": "all rows are of one expert, in the middle",
    "last_expert": "all rows are of the last expert",
    "following": "every row at or after the end of the draft model's tokens",
    "no_rows": "a message with table entries only",
    "top_p_border": "top-p, with logits within a thousandth of the threshold",
    "neutral": "no penalty and no bias",
    "every_penalty": "repetition, presence and frequency penalties and the largest number of biases",
    "all_generated": "every_penalty, for a sequence without a prompt",
    "none_generated": "every_penalty, for a prompt without generated tokens",
    "no_mask": "-1 in every row",
    "nothing_allowed": "masks without a set bit",
    "one_logprob": "logprobs of the most likely id",
    "every_logprob": "logprobs of the 20 most likely ids",
    "some_logprobs": "logprobs of the 3 most likely ids in every second slot only",
}
# Vulkan names are those of kernels/vulkan/features.py.
FEATURES: dict[str, str] = {
    "shaderInt8": "8-bit integer arithmetic",
    "shaderInt16": "16-bit integer arithmetic",
    "shaderInt64": "64-bit integer arithmetic",
    "shaderFloat16": "half-precision arithmetic",
    "storageBuffer8BitAccess": "8-bit elements in storage buffers",
    "storageBuffer16BitAccess": "16-bit elements in storage buffers",
    "uniformAndStorageBuffer16BitAccess": "16-bit elements in any buffer",
    "shaderIntegerDotProduct": "packed 4x8-bit dot products",
    "subgroup vote": "any and all over a subgroup",
    "subgroup arithmetic": "reductions over a subgroup",
    "subgroup ballot": "bit masks of a subgroup's lanes",
    "subgroup shuffle": "exchange of values inside a subgroup",
    "cooperativeMatrix": "matrix units (VK_KHR_cooperative_matrix)",
    "vulkanMemoryModel": "the Vulkan memory model, which cooperative matrices require",
    "vulkanMemoryModelDeviceScope": "device scope in the Vulkan memory model",
}


def _known(table: dict[str, str] | dict[str, object], what: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in table:
            raise ValueError(f"unknown {what} {value!r}{nearest(value, table)}")
        return value

    return AfterValidator(check)


def _dtype(value: str) -> str:
    if value not in DTYPES and not value.startswith("same:"):
        raise ValueError(f"unknown dtype {value!r}{nearest(value, [*DTYPES, *LISTS, 'same:NAME'])}")
    return value


def _role(value: str) -> str:
    if value not in roles():
        raise ValueError(f"{value!r} is no role of specs/axes.toml{nearest(value, roles())}")
    return value


def _listed(value: object) -> object:
    """Expand names of type lists."""
    if not isinstance(value, (str, tuple)):
        return value
    names = (value,) if isinstance(value, str) else value
    return tuple(dtype for name in names for dtype in (LISTS.get(name, (name,)) if isinstance(name, str) else (name,)))


def _listed_keys(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {dtype: item for key, item in value.items() for dtype in LISTS.get(key, (key,))}


def _name(value: str) -> str:
    if not value.isidentifier() or not value.isascii() or value in RESERVED:
        reserved = ", ".join(sorted(RESERVED))
        raise ValueError(f"{value!r} cannot be a name: use letters, digits and _, and none of {reserved}")
    return value


Name = Annotated[str, AfterValidator(_name)]
DTypeName = Annotated[str, AfterValidator(_dtype)]
DTypeList = Annotated[tuple[DTypeName, ...], BeforeValidator(_listed), Field(min_length=1)]
AxisRole = Annotated[str, AfterValidator(_role)]
Feature = Annotated[str, _known(FEATURES, "feature")]
Reason = Annotated[str, Field(min_length=1)]


class Head(Model):
    name: Name
    kind: Literal["op", "region"] = "op"
    members: tuple[str, ...] = ()
    """Member operations of a region, in order; the region's oracle is their composition."""
    summary: str
    source: str
    """Source of the definition."""


class Axis(Model):
    role: AxisRole
    min: int = Field(ge=0)
    max: int = Field(ge=1)
    multiple_of: int = Field(ge=1)
    """Default: the role's."""
    reduction: bool = False
    """Whether it is a reduction axis."""

    @model_validator(mode="before")
    @classmethod
    def _of_role(cls, data: object) -> object:
        role = roles().get(data["role"]) if isinstance(data, dict) and isinstance(data.get("role"), str) else None
        if role is None or not isinstance(data, dict):
            return data
        return {"min": role.min, "max": role.max, "multiple_of": role.multiple_of, **data}

    def model_post_init(self, context: object) -> None:
        if self.max < self.min:
            raise FieldError("max", f"{self.max} is below min = {self.min}")


class Domain(Model):
    """Value domain of an input: property tests draw from it, and callers must respect it."""

    dist: Literal[
        "normal",
        "uniform",
        "integers",
        "permutation",
        "rope",
        "sampling",
        "penalties",
        "inbox",
        "runs",
        "places",
        "spans",
        "order",
        "subset",
        "after_rows",
        "ranges",
        "zeros",
    ]
    """places: a permutation of the live pairs. spans: consecutive parts of the live rows, some of them empty; order:
    the part of each row. subset: different integers in a row. after_rows: of each slot the position after one of its
    rows. ranges: pairs, the second not below the first."""
    scale: float | None = None
    """normal: the standard deviation."""
    low: Expr | None = None
    """uniform, integers, permutation, subset, ranges: the lowest value."""
    high: Expr | None = None
    """uniform: the highest value; integers, permutation, subset, ranges: the exclusive upper bound."""

    def model_post_init(self, context: object) -> None:
        need = {
            "normal": ("scale",),
            "uniform": ("low", "high"),
            "integers": ("low", "high"),
            "permutation": ("low", "high"),
            "subset": ("low", "high"),
            "ranges": ("low", "high"),
        }.get(self.dist, ())
        for key in ("scale", "low", "high"):
            if (key in need) != (getattr(self, key) is not None):
                what = "is missing; it is needed" if key in need else "has no meaning; remove it"
                raise FieldError(key, f"{what} for dist = {self.dist!r}")


class Tolerance(Model):
    """Permitted error of an output relative to the oracle's float64 result.

    scaled_bound  |e| <= c_out*u_out*|ref| + c*sqrt(reduction)*u_acc*scale for every element, u = 2^-24 for f32,
                  2^-11 for f16, 2^-8 for bf16; u_acc is that of the backend's accumulate, else numerics'
    codes         int8 activations (q8_act) and caches (q8_0): the scaled bound of the value before quantisation plus
                  half a code step; a code may be off by one if the value is within `tie` codes of a half-integer; the
                  stored sum is exact
    choice        a sampled index: equal to the oracle's, or one with a score within `tie` of the best
    exact         equal
    """

    metric: Literal["scaled_bound", "codes", "choice", "exact"] = "scaled_bound"
    scale: Literal["abs", "ref", "values", "softmax", "head_max"] | None = None
    reduction: Expr = Expr(1)
    c: float = Field(0.0, ge=0)
    c_out: float = Field(1.0, ge=1)
    """2 if both sides are rounded to the storage type (state), or the device may round towards zero."""
    tie: float | None = Field(None, ge=0)

    def model_post_init(self, context: object) -> None:
        if self.metric in ("scaled_bound", "codes") and self.scale is None:
            raise FieldError("scale", f"is missing; metric = {self.metric!r} needs one of {', '.join(SCALES)}")
        if self.metric in ("codes", "choice") and self.tie is None:
            raise FieldError("tie", f"is missing; metric = {self.metric!r} needs it")

    def rounded_to(self, dtype: str) -> Tolerance:
        """This f32 tolerance for the same values rounded to another type."""
        codes = {"metric": "codes", "c_out": 1.0, "tie": TIE}
        return self.model_copy(update=codes if DTYPES[dtype].quantised and self.metric == "scaled_bound" else {})


TIE = 1e-4  # in codes: a value this close to a half-integer may have a code that is off by one
EXACT = Tolerance.model_validate({"metric": "exact"})


class TensorSpec(Model):
    shape: tuple[Expr, ...] = Field(min_length=1)
    dtype: DTypeList
    """Permitted storage types, or `same:NAME`."""
    role: Literal["activation", "weight", "index", "table", "cache"] = "activation"
    summary: str = ""
    domain: Domain | None = None
    given: tuple[str, ...] = ()
    """Earlier outputs whose device values are the reference's inputs, so that their rounding is not counted twice."""
    tolerance: dict[str, Tolerance] = Field(default_factory=dict)
    """By dtype; overrides the operation's [tolerance] table."""

    @cached_property
    def same(self) -> str | None:
        """The tensor that determines this one's dtype."""
        return self.dtype[0][5:] if self.dtype[0].startswith("same:") else None


class Attribute(Model):
    type: Literal["int", "float", "str"]
    summary: str = ""
    values: tuple[Scalar, ...] | None = None
    min: Expr | None = None
    max: Expr | None = None
    default: Scalar | None = None
    """None: required in every step."""
    draw: tuple[Expr, ...] = ()
    """Values for conformance tests, the usual one first, at least two: numbers, or expressions over the axes. Default:
    `values`."""


class Constraints(Model):
    exprs: tuple[Expr, ...] = ()
    distinct: tuple[tuple[str, ...], ...] = ()
    """Groups of index tensors whose combined rows are pairwise different."""


class DTypeRule(Model):
    """If every tensor of `when` has one of its dtypes, those of `require` must have one of theirs."""

    when: dict[str, DTypeList]
    require: dict[str, DTypeList]

    def allows(self, dtypes: Mapping[str, str]) -> bool:
        """Whether an assignment of dtypes to all tensors satisfies the rule."""
        applies = all(dtypes[t] in allowed for t, allowed in self.when.items())
        return not applies or all(dtypes[t] in allowed for t, allowed in self.require.items())


class MatrixUnits(Model):
    """Cases in which matrix units (f16_matrices) may round each operand of a product to f16 once. u_f16*scale is then
    added to the bounds with scale = "abs"."""

    dtypes: dict[str, DTypeList]
    """Tensor -> types for which this holds."""
    when: Expr = Expr(1)
    """Condition on the axes."""


class Numerics(Model):
    accumulate: Literal["f32", "none"] = "f32"
    """Type of accumulators; none: no sums."""
    integer_part: Literal["none", "bit_exact"] = "none"
    """bit_exact: integer dot products are compared for equality."""
    operands: dict[str, str] = Field(default_factory=dict)
    """Activation type -> type to which weights are rounded (nearest even) before the product. With other activation
    types weights are not rounded."""
    matrices: MatrixUnits | None = None
    exact: bool = False
    """Whether tests with small integers require equality, since such sums are exact in every order."""
    determinism: Literal["bitwise", "run_to_run", "none"] = "run_to_run"
    """bitwise: the same bits on every device; run_to_run: the same bits in each run on one device, independent of the
    batch's other rows."""
    nonfinite: Literal["forbid", "propagate", "report"] = "forbid"
    """forbid: inputs must be finite and outputs are; propagate: an output is non-finite exactly where the oracle's is;
    report: valid inputs, reported in a result."""


class Cost(Model):
    flops: Expr
    bytes: Expr


class Edge(Model):
    cases: tuple[str, ...] = Field(min_length=1)
    """AXIS=SIZE (an expression that may use `tile`, or `prime`), ATTRIBUTE=VALUE, or TENSOR=KIND (see EDGE_VALUES);
    several at once with commas between them: "D=64, window=91, positions=full_cache"."""

    @staticmethod
    def settings(case: str) -> list[tuple[str, str]]:
        """(NAME, VALUE) of each setting of a case; VALUE is empty where it is missing."""
        parts = re.split(r",(?=\s*\w*\s*=)", case)
        return [(name.strip(), value.strip()) for name, _, value in (part.partition("=") for part in parts)]


class Workload(Model):
    """A named call of realistic size, derived from a model and a pass."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    bind: dict[str, int]
    attrs: dict[str, Scalar] = Field(default_factory=dict)
    dtypes: dict[str, DTypeName] = Field(default_factory=dict)
    """Other tensors have the first valid dtype."""
    tags: tuple[Tag, ...] = ()
    _origin: str = PrivateAttr("")

    @property
    def origin(self) -> str:
        """The key of its [[workloads]] table."""
        return self._origin

    def derived_from(self, key: str) -> Workload:
        """Set `origin`; returns self."""
        self._origin = key
        return self


class Variant(Model):
    """One variant of a model's workloads for a pass."""

    bind: dict[str, Expr] = Field(default_factory=dict)
    """Axis -> expression over the model's hyper-parameters (hybrid.core.hparams) and the pass's sizes. Other axes have
    their role's size."""
    attrs: dict[str, Scalar] = Field(default_factory=dict)
    """Attribute -> value; numbers may be expressions as in `bind`."""
    dtypes: dict[str, DTypeName] = Field(default_factory=dict)
    passes: tuple[str, ...] | None = None
    """Names of passes in specs/workloads.toml."""


class Workloads(Variant):
    """Workloads derived from models: one for each model, variant and pass, named MODEL.VARIANT.PASS."""

    models: tuple[str, ...] | None = None
    """Patterns (`gemma3-*`) of names of specs/models and of the demonstration models. None: those whose schedule has
    the operation."""
    variants: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")], Variant] = Field(default_factory=dict)
    """By the middle part of the id; a variant's fields override the table's."""
    tags: tuple[Tag, ...] = ()
    """Added to the pass's tags and perf or demo."""


Number = int | float
Values = Number | tuple[Number | tuple[Number, ...], ...]


class Backend(Model):
    """Limits of an operation on one backend; the default is none."""

    requires: tuple[Feature, ...] = ()
    """Required device features."""
    requires_for: Annotated[dict[DTypeName, tuple[Feature, ...]], BeforeValidator(_listed_keys)] = Field(
        default_factory=dict
    )
    """Additional features required if any tensor has this dtype."""
    uses: tuple[Feature, ...] = ()
    """Optional features: some kernels use them, with fallback kernels on other devices."""
    limits: tuple[Expr, ...] = ()
    """Conditions on axes and attributes beyond the operation's own constraints."""
    dtypes: dict[str, DTypeList] = Field(default_factory=dict)
    """Supported dtypes by tensor, if fewer than declared. For weights the default is the backend's native types."""
    static: tuple[str, ...] = ()
    """Axes that are compile-time constants of the kernel."""
    tile: dict[str, int] = Field(default_factory=dict)
    """The kernel's tile sizes by axis; edge shapes are around their multiples."""
    variants: tuple[dict[str, Values], ...] = ()
    """Sizes and attributes that select different kernels, as a product of lists. NAME has a number or several;
    "NAME,NAME" has lists of corresponding numbers."""
    accumulate: Literal["bf16"] | None = None
    """The accumulator type, if coarser than the operation's."""
    tolerance: dict[str, Tolerance] = Field(default_factory=dict)
    """By dtype, for arithmetic that is coarser than the operation's; overrides every other tolerance."""
    except_edges: dict[str, str] = Field(default_factory=dict)
    """Excluded edge cases, with reasons."""

    def sizes(self) -> Iterator[dict[str, Number]]:
        """Every combination of `variants`."""
        for table in self.variants:
            listed = [values if isinstance(values, tuple) else (values,) for values in table.values()]
            for chosen in itertools.product(*listed):
                each = [c if isinstance(c, tuple) else (c,) for c in chosen]
                yield {n: v for key, c in zip(table, each, strict=True) for n, v in zip(key.split(","), c, strict=True)}


NO_LIMITS = Backend()
