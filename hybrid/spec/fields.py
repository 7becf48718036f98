"""The tables an operation's TOML is made of. op.py puts them together and checks them against one another."""

from __future__ import annotations

import itertools
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
    "abs": "what the operation makes of absolute values (|x| @ |w|.T for a matrix product)",
    "ref": "the reference value itself",
    "values": "the result with the absolute values of what is averaged (the sum of p|v| for attention)",
    "softmax": "attention whose products are all rounded as coarsely as its scores: sum p|v| (8 + |q||k|)",
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
    "two_best": "two equal largest logits: the lower id wins",
    "all_equal": "all logits equal",
    "neg_inf": "-infinity in all but a few logits",
    "nan": "one NaN, of either sign, in every second row (of logits: nothing is chosen there)",
    "pos_inf": "+infinity in one logit of every second row: nothing is chosen there",
    "nothing_left": "every logit -infinity: nothing is chosen",
    "greedy": "temperature 0",
    "every_filter": "temperature, top-k, top-p and min-p at once",
    "all_drawn": "no filter: every id may be drawn",
    "top_k_one": "top-k 1: the same choice as greedy",
    "min_p_border": "min-p, with logits that a cut off by a thousandth would keep or drop",
    "no_message": "an inbox without a message",
    "other_pass": "messages of the pass before and the one after only",
    "host_rows": "every token and position from the host",
    "going_on": "every row continues its slot",
    "ahead": "guesses at positions after the next one",
    "last_set": "the message in the inbox's last place",
    "outside": "slots, table indices and tables that are not there: nothing is written for them",
    "guessed": "every token from guesses, of whichever slot",
    "following": "every row where another model's tokens end, or behind",
    "no_rows": "a message with table entries alone",
    "top_p_border": "top-p, with logits that a cut off by a thousandth would keep or drop",
    "neutral": "no penalty and no bias",
    "every_penalty": "repetition, presence and frequency penalties and as many biases as there is room for",
    "all_generated": "the same, of a sequence without a prompt",
    "none_generated": "the same, of a prompt alone",
    "no_mask": "-1 in every row",
    "nothing_allowed": "masks without a bit",
    "one_logprob": "one of the most likely ids is asked for",
    "every_logprob": "the 20 most likely ids are asked for",
    "some_logprobs": "the 3 most likely ids in every second slot, none in the others",
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
    "vulkanMemoryModel": "Vulkan's memory model, which cooperative matrices are written to",
    "vulkanMemoryModelDeviceScope": "its operations of device scope",
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
    """Names of lists of types written out."""
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
    """Operations that a region is made of, in order; its oracle is their composition."""
    summary: str
    source: str
    """Where the definition comes from."""


class Axis(Model):
    role: AxisRole
    min: int = Field(ge=0)
    max: int = Field(ge=1)
    multiple_of: int = Field(ge=1)
    """Where nothing is written: those of the role."""
    reduction: bool = False
    """Sums run over it."""

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
    """What values a tensor holds: the property tests draw them, and a caller must keep to them."""

    dist: Literal[
        "normal", "uniform", "integers", "permutation", "rope", "sampling", "penalties", "inbox", "runs", "zeros"
    ]
    scale: float | None = None
    """normal: the standard deviation."""
    low: Expr | None = None
    """uniform, integers, permutation: the lowest value."""
    high: Expr | None = None
    """uniform: the highest value; integers, permutation: one more than the highest."""

    def model_post_init(self, context: object) -> None:
        need = {
            "normal": ("scale",),
            "uniform": ("low", "high"),
            "integers": ("low", "high"),
            "permutation": ("low", "high"),
        }.get(self.dist, ())
        for key in ("scale", "low", "high"):
            if (key in need) != (getattr(self, key) is not None):
                what = "is missing; it is needed" if key in need else "has no meaning; remove it"
                raise FieldError(key, f"{what} for dist = {self.dist!r}")


class Tolerance(Model):
    """How near to the oracle's float64 result an output must be.

    scaled_bound  |e| <= c_out*u_out*|ref| + c*sqrt(reduction)*u_acc*scale for every element, u = 2^-24 for f32,
                  2^-11 for f16, 2^-8 for bf16; u_acc is that of the backend's accumulate, else numerics'
    codes         int8 activations (q8_act) and caches (q8_0): the scaled bound of the value before it is quantised,
    plus half a
                  code step; a code may be one off where the value is within `tie` codes of a half-integer; the stored
                  sum is exact
    choice        a chosen index: equal to the oracle's, or one whose score is within `tie` of the best
    exact         equal
    """

    metric: Literal["scaled_bound", "codes", "choice", "exact"] = "scaled_bound"
    scale: Literal["abs", "ref", "values", "softmax", "head_max"] | None = None
    reduction: Expr = Expr(1)
    c: float = Field(0.0, ge=0)
    c_out: float = Field(1.0, ge=1)
    """2 where both sides are rounded to the storage type (state), or where the device may round towards zero."""
    tie: float | None = Field(None, ge=0)

    def model_post_init(self, context: object) -> None:
        if self.metric in ("scaled_bound", "codes") and self.scale is None:
            raise FieldError("scale", f"is missing; metric = {self.metric!r} needs one of {', '.join(SCALES)}")
        if self.metric in ("codes", "choice") and self.tie is None:
            raise FieldError("tie", f"is missing; metric = {self.metric!r} needs it")

    def rounded_to(self, dtype: str) -> Tolerance:
        """Of the same numbers, as f32 judged by this one, in another type."""
        codes = {"metric": "codes", "c_out": 1.0, "tie": TIE}
        return self.model_copy(update=codes if DTYPES[dtype].quantised and self.metric == "scaled_bound" else {})


TIE = 1e-4  # in codes: how near to a half-integer a value may be for its code to be one off
EXACT = Tolerance.model_validate({"metric": "exact"})


class TensorSpec(Model):
    shape: tuple[Expr, ...] = Field(min_length=1)
    dtype: DTypeList
    """Storage types it may have, or `same:NAME`."""
    role: Literal["activation", "weight", "index", "table", "cache"] = "activation"
    summary: str = ""
    domain: Domain | None = None
    given: tuple[str, ...] = ()
    """Verified from the device's own value of these earlier outputs, so that a rounding there is not counted twice."""
    tolerance: dict[str, Tolerance] = Field(default_factory=dict)
    """By dtype; goes before the operation's [tolerance] table."""

    @cached_property
    def same(self) -> str | None:
        """The tensor whose dtype this one shares."""
        return self.dtype[0][5:] if self.dtype[0].startswith("same:") else None


class Attribute(Model):
    type: Literal["int", "float", "str"]
    summary: str = ""
    values: tuple[Scalar, ...] | None = None
    min: Expr | None = None
    max: Expr | None = None
    default: Scalar | None = None
    """Absent: every step must give it."""
    draw: tuple[Expr, ...] = ()
    """What conformance tries, the usual one first: numbers, or expressions over the axes."""


class Constraints(Model):
    exprs: tuple[Expr, ...] = ()
    distinct: tuple[tuple[str, ...], ...] = ()
    """Groups of index tensors whose rows, read together, are pairwise different."""


class DTypeRule(Model):
    """When every tensor of `when` has one of its dtypes, those of `require` must have one of theirs."""

    when: dict[str, DTypeList]
    require: dict[str, DTypeList]

    def allows(self, dtypes: Mapping[str, str]) -> bool:
        """Whether an assignment of dtypes to all tensors keeps the rule."""
        applies = all(dtypes[t] in allowed for t, allowed in self.when.items())
        return not applies or all(dtypes[t] in allowed for t, allowed in self.require.items())


class MatrixUnits(Model):
    """Where a device with matrix units (f16_matrices) may round every operand of a product to f16 once: u_f16*scale is
    then added to the bounds with scale = "abs"."""

    dtypes: dict[str, DTypeList]
    """Tensor -> the types of which it must have one."""
    when: Expr = Expr(1)
    """Condition on the axes."""


class Numerics(Model):
    accumulate: Literal["f32", "none"] = "f32"
    """Type of sums; none: nothing is added up."""
    integer_part: Literal["none", "bit_exact"] = "none"
    """bit_exact: integer dot products are compared for equality."""
    operands: dict[str, str] = Field(default_factory=dict)
    """Type of the activations -> type that the numbers of weights beside them are rounded to (nearest even) before they
    are multiplied; beside other types they are taken as they are."""
    matrices: MatrixUnits | None = None
    exact: bool = False
    """Small integers give the same bits in every order of summation, and then equality is demanded."""
    determinism: Literal["bitwise", "run_to_run", "none"] = "run_to_run"
    """bitwise: the same bits on every device; run_to_run: the same bits each time on one device, whatever the other
    rows of the batch are."""
    nonfinite: Literal["forbid", "propagate", "report"] = "forbid"
    """forbid: finite inputs are demanded and outputs are finite; propagate: an output is non-finite exactly where the
    oracle's is; report: they are valid inputs, and a result says where they were."""


class Cost(Model):
    flops: Expr
    bytes: Expr


class Edge(Model):
    cases: tuple[str, ...] = Field(min_length=1)
    """AXIS=SIZE (an expression that may use `tile`, or `prime`), ATTRIBUTE=VALUE, or TENSOR=KIND (see EDGE_VALUES)."""


class Workload(Model):
    """A call at a size that matters, by name: derived from a model and a pass."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    bind: dict[str, int]
    attrs: dict[str, Scalar] = Field(default_factory=dict)
    dtypes: dict[str, DTypeName] = Field(default_factory=dict)
    """Tensors not named take the first dtype that fits."""
    tags: tuple[Tag, ...] = ()
    _origin: str = PrivateAttr("")

    @property
    def origin(self) -> str:
        """The key of the [[workloads]] that it is derived from."""
        return self._origin

    def derived_from(self, key: str) -> Workload:
        """Itself, knowing its origin."""
        self._origin = key
        return self


class Variant(Model):
    """What differs between the workloads that a model gives for one pass."""

    bind: dict[str, Expr] = Field(default_factory=dict)
    """Axis -> expression over the model's hyper-parameters (hybrid.core.hparams) and the pass's sizes. An axis that is
    not written has the size that goes by its role."""
    attrs: dict[str, Scalar] = Field(default_factory=dict)
    """Expressions likewise, for attributes that are numbers."""
    dtypes: dict[str, DTypeName] = Field(default_factory=dict)
    passes: tuple[str, ...] | None = None
    """Of specs/workloads.toml."""


class Workloads(Variant):
    """Workloads that models give: one for each model, variant and pass, called MODEL.VARIANT.PASS."""

    models: tuple[str, ...] | None = None
    """Patterns (`gemma3-*`) of names of specs/models and of the demonstration models. None: those whose schedule has
    the operation."""
    variants: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")], Variant] = Field(default_factory=dict)
    """By the middle part of the id; what they say goes before what the table itself says."""
    tags: tuple[Tag, ...] = ()
    """Beside the pass's own, and perf or demo."""


Number = int | float
Values = Number | tuple[Number | tuple[Number, ...], ...]


class Backend(Model):
    """Limits of an operation on one backend; the default is none."""

    requires: tuple[Feature, ...] = ()
    """Device features without which no case runs."""
    requires_for: Annotated[dict[DTypeName, tuple[Feature, ...]], BeforeValidator(_listed_keys)] = Field(
        default_factory=dict
    )
    """Further features when any tensor has this dtype."""
    uses: tuple[Feature, ...] = ()
    """Features that some of its kernels use where a device has them; others run where it does not."""
    limits: tuple[Expr, ...] = ()
    """Conditions on axes and attributes beyond the operation's own constraints."""
    dtypes: dict[str, DTypeList] = Field(default_factory=dict)
    """Narrower dtypes than the operation allows, by tensor. Of weights it takes those that the backend computes with."""
    static: tuple[str, ...] = ()
    """Axes that must be known when the kernel is built."""
    tile: dict[str, int] = Field(default_factory=dict)
    """Axis sizes the kernel works in: edge shapes are taken around them."""
    variants: tuple[dict[str, Values], ...] = ()
    """Sizes and attributes at which it chooses another kernel, each combination of the lists: of NAME a number or
    several; of "NAME,NAME" lists of numbers that belong together."""
    accumulate: Literal["bf16"] | None = None
    """The unit of its rounding where that is coarser than the operation's."""
    tolerance: dict[str, Tolerance] = Field(default_factory=dict)
    """By dtype: how its results are judged where its arithmetic is coarser than the operation's; goes before every
    other."""
    except_edges: dict[str, str] = Field(default_factory=dict)
    """Edge cases it is not held to, with the reason."""

    def sizes(self) -> Iterator[dict[str, Number]]:
        """`variants` one by one."""
        for table in self.variants:
            listed = [values if isinstance(values, tuple) else (values,) for values in table.values()]
            for chosen in itertools.product(*listed):
                each = [c if isinstance(c, tuple) else (c,) for c in chosen]
                yield {n: v for key, c in zip(table, each, strict=True) for n, v in zip(key.split(","), c, strict=True)}


NO_LIMITS = Backend()
