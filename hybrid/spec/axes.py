"""Roles of axes (specs/axes.toml): the sizes of an axis in workloads and conformance cases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from hybrid.core.places import SPECS
from hybrid.spec.expr import Expr
from hybrid.spec.load import Model, load_toml

Positive = Annotated[int, Field(gt=0)]


class Role(Model):
    max: Positive
    min: int = Field(1, ge=0)
    multiple_of: Positive = 1
    """Default of the axes' multiple_of."""
    size: Expr | None = None
    """Size in workloads: an expression over the model's hyper-parameters and the pass's sizes. None: each workload
    gives it."""
    edge: Positive
    """Size in edge cases."""
    most: Positive
    """Largest size in random cases, in units of multiple_of."""
    prime: Positive | None = None
    split: Positive | None = None
    """Size at which weights are split into ranges."""


class Roles(Model):
    """specs/axes.toml."""

    schema_: Literal[1] = Field(alias="schema")
    roles: dict[str, Role]


@cache
def roles() -> Mapping[str, Role]:
    return load_toml(SPECS / "axes.toml", Roles).roles
