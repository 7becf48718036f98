"""Roles of axes, from specs/axes.toml: how large an axis is in a workload and in conformance cases."""

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
    """Of axes that say nothing else."""
    size: Expr | None = None
    """Of a workload: over the model's hyper-parameters and the pass's sizes. None: each workload says."""
    edge: Positive
    """Size in edge cases."""
    most: Positive
    """Units of the axis's multiple_of in drawn cases."""
    prime: Positive | None = None
    split: Positive | None = None
    """Size at which weights are cut into ranges."""


class Roles(Model):
    """specs/axes.toml."""

    schema_: Literal[1] = Field(alias="schema")
    roles: dict[str, Role]


@cache
def roles() -> Mapping[str, Role]:
    return load_toml(SPECS / "axes.toml", Roles).roles
