"""hybrid.bench --requests: run the same requests on one model without and with drafts, so that the comparison has the
same texts and load.

Before each run the prefix cache and the speculation controller are reset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import hybrid
from hybrid.bench import requests
from hybrid.bench.acceptance import NOISE
from hybrid.bench.report import energy_dict
from hybrid.bench.requests import Request, Served, Submit
from hybrid.devices.energy import Meter
from hybrid.engine.speculation import Replay
from hybrid.engine.stats import Metrics

WARM = 4  # tokens of each warm-up request


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculation of a run: `k` draft tokens of a pass (None: by the controller; 0: none), with acceptance `rate`
    (None: the drafter's own)."""

    k: int | None = 0
    rate: float | None = None

    @property
    def title(self) -> str:
        """A title for reports."""
        if self.k == 0:
            return "without drafts"
        right = "" if self.rate is None else f", acceptance {self.rate:.2f}"
        return f"draft tokens of a pass: {'auto' if self.k is None else self.k}{right}"


class Runs:
    """Runs on an otherwise idle model with up to `slots` running requests. known: sample by noise only, so that texts
    are independent of rounding and drafts of them can have a set acceptance rate."""

    def __init__(
        self,
        model: hybrid.Model,
        wanted: Sequence[Request],
        slots: int,
        meter: Meter | None = None,
        known: bool = False,
    ) -> None:
        self.model, self.wanted, self.slots, self.meter, self.known = model, wanted, slots, meter, known
        self._draft = None if model.speculator is None else model.speculator.draft
        self._seeds = {request.ids: seed for seed, request in enumerate(wanted)}
        self._plain: tuple[dict[str, Any], list[tuple[int, ...]]] | None = None
        """(summary, texts) of the last run without drafts."""

    @property
    def name(self) -> str | None:
        """The drafter's name, or None."""
        if self.model.speculator is None:
            return None
        return "known texts" if self.known and self._draft is None else self.model.speculator.name

    def run(self, drafts: Drafts) -> dict[str, Any]:
        """Run the requests; returns `requests.summary` and, after a run without drafts, the speculation statistics and
        the comparison. RuntimeError for an invalid measurement."""
        submit = self._begin(drafts)
        requests.serve(submit, [replace(r, at=0.0, n=min(r.n, WARM)) for r in self.wanted[: self.slots]])
        self._forget()
        before = self.model.metrics()
        with nullcontext() if self.meter is None else self.meter.running():
            served = requests.serve(submit, self.wanted)
        after = self.model.metrics()
        found = requests.summary(served, before, after)
        if self.meter is not None:
            found["energy"] = energy_dict(self.meter.take(), found["generated_tokens"])
        return self._compared(drafts, served, found, before, after)

    def text(self, found: Mapping[str, Any]) -> list[str]:
        """Report lines."""
        lines = requests.text(found) + ([found["energy"]["line"]] if "energy" in found else [])
        if "drafts" not in found:
            return lines
        together = found["times_while_all_run"]
        inside = "" if together is None else f" ({together:.3f} while all run)"
        compared = f"{found['times']:.3f} times the tok/s of the last run without drafts{inside}"
        return [
            *lines,
            found["drafts"],
            f"{'compared':22}{compared}; {found['same_texts']} of {found['requests']} texts the same",
        ]

    def _begin(self, drafts: Drafts) -> Submit:
        """Configure the model's speculation; returns the submit function."""
        speculator, known, seeds = self.model.speculator, self.known, self._seeds
        if speculator is not None:
            with self.model.engine.lock:
                speculator.k = drafts.k
                if drafts.rate is not None:
                    speculator.drafter = self._replayed(drafts.rate)
        elif drafts.k != 0:
            raise ValueError("the model was loaded without speculation: load it with draft= or speculate=")
        self._forget()

        def submit(ids: tuple[int, ...], **options: Any) -> hybrid.Handle:
            drawn: dict[str, Any] = {"temperature": NOISE, "seed": seeds[ids]} if known else {}
            return self.model.submit(ids, **options, **drawn, speculate=0 if drafts.k == 0 else None)

        return submit

    def _replayed(self, rate: float) -> Replay:
        assert self._plain is not None
        texts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for request, answer in zip(
            self.wanted, self._plain[1], strict=True
        ):  # of equal prompts, keep the longest answer
            texts[request.ids] = max(answer, texts.get(request.ids, ()), key=len)
        return Replay(texts, rate, self._draft)

    def _forget(self) -> None:
        """Reset the prefix cache, and the controller's pass times and acceptance."""
        with self.model.engine.lock:
            self.model.engine.runner.blocks.clear()
            if self.model.speculator is not None:
                self.model.speculator.forget()

    def _faults(self) -> list[str]:
        """Faults of the model and the draft model that stopped speculation or slowed passes."""
        return [*self.model.engine.faults, *(self._draft.runner.faults if self._draft is not None else ())]

    def _compared(
        self, drafts: Drafts, served: Sequence[Served], found: dict[str, Any], before: Metrics, after: Metrics
    ) -> dict[str, Any]:
        texts, plain = [s.completion.ids for s in served], self._plain
        if drafts.k == 0:
            self._plain = found, texts
        if self.model.speculator is None or plain is None:
            return found
        if faults := self._faults():
            raise RuntimeError(f"{'; '.join(faults)}: the measurement is invalid")
        same = sum(a == b for a, b in zip(texts, plain[1], strict=True))
        if self.known and same < len(texts):
            raise RuntimeError(
                f"{len(texts) - same} texts differ from those without drafts: the measurement is invalid"
            )
        drafted, accepted, verified = (
            getattr(after, name) - getattr(before, name) for name in ("drafted", "accepted", "verified")
        )
        share = f" ({100 * accepted / drafted:.0f} %)" if drafted else ""
        together = found["tokens_per_second_while_all_run"], plain[0]["tokens_per_second_while_all_run"]
        return {
            "k": drafts.k,
            "rate": drafts.rate,
            **found,
            "drafted": drafted,
            "accepted": accepted,
            "verified": verified,
            "drafts": f"speculation ({self.name}): drafted {drafted}, accepted {accepted}{share}",
            "times": found["tokens_per_second"] / plain[0]["tokens_per_second"],
            "times_while_all_run": together[0] / together[1] if all(together) else None,
            "same_texts": same,
        }
