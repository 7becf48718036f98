"""What a request asks for beside its prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from hybrid.engine.config import check_guesses
from hybrid.engine.constraint import Constraint
from hybrid.engine.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Options:
    """Checked when made: ValueError names the option and what it may be. See Model.submit."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    priority: int = 0
    deadline: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    constraint: Constraint | None = None
    speculate: int | None = None
    """Guesses of a pass; None: as the model was loaded."""

    def __post_init__(self) -> None:
        if not isinstance(self.priority, Integral):
            raise ValueError(f"priority must be an integer (0; greater ones go first), not {self.priority!r}")
        if self.deadline is not None and not (isinstance(self.deadline, Real) and 0 < self.deadline < math.inf):
            raise ValueError(f"deadline must be seconds from now, above 0, or None, not {self.deadline!r}")
        if self.speculate is not None:
            check_guesses(self.speculate)
        verbs = (getattr(self.constraint, name, None) for name in ("mask", "accept", "copy"))
        if self.constraint is not None and not all(map(callable, verbs)):
            raise ValueError(
                "constraint must have mask(), accept(token) and copy() (see hybrid.engine.constraint), not be "
                f"{self.constraint!r}"
            )

    @classmethod
    def among(cls, named: Mapping[str, Any]) -> Options:
        """Those options that are among values by their names; the others are as they are by default. Of a function's
        arguments: Model's methods name the options as this class does, with its defaults
        (conformance/engine/test_request.py)."""
        return cls(**{f.name: named[f.name] for f in fields(cls) if f.name in named})

    def sampling(self) -> Sampling:
        """The parameters of the sampler, which have the same names there."""
        return Sampling(**{f.name: getattr(self, f.name) for f in fields(Sampling)})
