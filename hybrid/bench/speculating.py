"""hybrid.bench --requests: the same requests once or several times on one model, without guesses and with some, so that
what guesses win or lose is not hidden by other texts, another load or another hour.

Each run begins as the first does: no prompt is found in the cache, and what guesses are worth is learned anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import hybrid
from hybrid.bench import requests
from hybrid.bench.guessing import NOISE, Rehearsed
from hybrid.bench.report import energy_dict
from hybrid.bench.requests import Request, Served, Submit
from hybrid.devices.energy import Meter
from hybrid.engine.draft_model import DraftModel
from hybrid.engine.drafts import Replay
from hybrid.engine.pace import WATCHES, Counts

WARM = 4  # tokens that the requests before a run generate


@dataclass(frozen=True, slots=True)
class Guesses:
    """Of a run: `k` of them in a pass (None: by their worth; 0: none), right with `rate` (None: as the draft happens to
    be)."""

    k: int | None = 0
    rate: float | None = None

    @property
    def title(self) -> str:
        """For people."""
        if self.k == 0:
            return "without guesses"
        right = "" if self.rate is None else f", each right with {self.rate:.2f} where those before it are"
        return f"guesses of a pass: {'auto' if self.k is None else self.k}{right}"


class Replays:
    """Guesses out of the known texts of several sequences, as of Replay each. A sequence is told by its length and its
    last token; whole texts are compared only where several have both, since comparing takes time that would be
    measured."""

    name = "replay"
    watches = WATCHES[0]

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], rate: float) -> None:
        """texts: what follows each prompt. ValueError for a rate that is no probability."""
        self._at: dict[tuple[int, int], list[tuple[list[int], Replay]]] = {}
        for seed, (prompt, answer) in enumerate(texts.items()):
            text = [*prompt, *answer]
            known = text, Replay(text, rate, seed)
            known[1].agreed(text, len(prompt))  # so that nothing is drawn while time is taken
            for end in range(len(prompt), len(text) + 1):
                self._at.setdefault((end, text[end - 1]), []).append(known)

    def fork(self) -> Replays:
        return self

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """None for a sequence that is not known."""
        found = self._of(ids)
        return [] if found is None else found.propose(ids, most)

    def agreed(self, ids: Sequence[int], since: int) -> tuple[int, int]:
        found = self._of(ids)
        return (0, 0) if found is None else found.agreed(ids, since)

    def close(self) -> None:
        pass

    def _of(self, ids: Sequence[int]) -> Replay | None:
        found = self._at.get((len(ids), ids[-1]), [])
        if len(found) > 1:
            return next((replay for text, replay in found if text[: len(ids)] == list(ids)), None)
        return found[0][1] if found else None


class Runs:
    """On a model that nothing else uses and that runs up to `slots` requests at a time. known: texts are drawn by noise
    alone, so that they are the same however passes round, and guesses of them can be right with a set rate."""

    def __init__(
        self,
        model: hybrid.Model,
        wanted: Sequence[Request],
        slots: int,
        meter: Meter | None = None,
        known: bool = False,
    ) -> None:
        self.model, self.wanted, self.slots, self.meter, self.known = model, wanted, slots, meter, known
        drafter = None if model.drafting is None else model.drafting.drafter
        self._rehearsed = Rehearsed(drafter) if known and isinstance(drafter, DraftModel) else None
        self._seeds = {request.ids: seed for seed, request in enumerate(wanted)}
        self._plain: tuple[dict[str, Any], list[tuple[int, ...]]] | None = None
        """The last run without guesses: what was reached, and its texts."""

    @property
    def name(self) -> str | None:
        """Whose guesses they are; None: there are none."""
        if self.model.drafting is None:
            return None
        return "known texts" if self.known and self._rehearsed is None else self.model.drafting.name

    def run(self, guesses: Guesses) -> dict[str, Any]:
        """What was reached, as plain data: `requests.summary` and, where a run without guesses came before, what the
        guesses of this one were and how it compares with that. RuntimeError for figures that are void."""
        submit = self._begin(guesses)
        requests.serve(submit, [replace(r, at=0.0, n=min(r.n, WARM)) for r in self.wanted[: self.slots]])
        self._forget()
        before, counted = self.model.metrics(), self._counts()
        with nullcontext() if self.meter is None else self.meter.running():
            served = requests.serve(submit, self.wanted)
        found = requests.summary(served, before, self.model.metrics())
        if self.meter is not None:
            found["energy"] = energy_dict(self.meter.take(), found["generated_tokens"])
        return self._compared(guesses, served, found, counted)

    def text(self, found: Mapping[str, Any]) -> list[str]:
        """For people."""
        lines = requests.text(found) + ([found["energy"]["line"]] if "energy" in found else [])
        if "guesses" not in found:
            return lines
        together = found["times_while_all_run"]
        inside = "" if together is None else f" ({together:.3f} while all run)"
        compared = f"{found['times']:.3f} times the tok/s of the last run without guesses{inside}"
        return [
            *lines,
            found["guesses"],
            f"{'compared':22}{compared}; {found['same_texts']} of {found['requests']} texts the same",
        ]

    def _begin(self, guesses: Guesses) -> Submit:
        """Let the model guess so; how requests are submitted then."""
        drafting, known, seeds = self.model.drafting, self.known, self._seeds
        if drafting is not None:
            with self.model.engine.lock:
                drafting.k = guesses.k
                if guesses.rate is not None:
                    drafting.drafter = self._replayed(guesses.rate)
        elif guesses.k != 0:
            raise ValueError("the model was loaded without guesses: load it with draft= or speculate=")
        self._forget()

        def submit(ids: tuple[int, ...], **options: Any) -> hybrid.Handle:
            drawn: dict[str, Any] = {"temperature": NOISE, "seed": seeds[ids]} if known else {}
            return self.model.submit(ids, **options, **drawn, speculate=0 if guesses.k == 0 else None)

        return submit

    def _replayed(self, rate: float) -> Replays | Rehearsed:
        assert self._plain is not None
        texts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for request, answer in zip(self.wanted, self._plain[1], strict=True):
            texts[request.ids] = max(
                answer, texts.get(request.ids, ()), key=len
            )  # of one prompt, one goes on as the other
        replays = Replays(texts, rate)
        if self._rehearsed is None:
            return replays
        self._rehearsed.replay = replays
        return self._rehearsed

    def _forget(self) -> None:
        """The prefixes in the cache, and what passes and guesses cost and how often they were right."""
        with self.model.engine.lock:
            self.model.engine.blocks.clear()
            if self.model.drafting is not None:
                self.model.drafting.forget()

    def _counts(self) -> Counts:
        return Counts() if self.model.drafting is None else replace(self.model.drafting.counts)

    def _faults(self) -> list[str]:
        """Why guessing has ended, or passes take longer than they did; of the model, and of the draft."""
        assert self.model.drafting is not None
        drafter = self.model.drafting.drafter
        return [*self.model.engine.faults, *(drafter.engine.faults if isinstance(drafter, DraftModel) else ())]

    def _compared(
        self, guesses: Guesses, served: Sequence[Served], found: dict[str, Any], before: Counts
    ) -> dict[str, Any]:
        drafting, texts, plain = self.model.drafting, [s.completion.ids for s in served], self._plain
        if guesses.k == 0:
            self._plain = found, texts
        if drafting is None or plain is None:
            return found
        if faults := self._faults():
            raise RuntimeError(f"{'; '.join(faults)}: the figures are void")
        same = sum(a == b for a, b in zip(texts, plain[1], strict=True))
        if self.known and same < len(texts):
            raise RuntimeError(f"{len(texts) - same} texts differ from those without guesses: the figures are void")
        after = self._counts()
        counts = Counts(**{f.name: getattr(after, f.name) - getattr(before, f.name) for f in fields(Counts)})
        together = found["tokens_per_second_while_all_run"], plain[0]["tokens_per_second_while_all_run"]
        return {
            "k": guesses.k,
            "rate": guesses.rate,
            **found,
            **{name: getattr(counts, name) for name in ("drafted", "accepted", "verified", "ready", "dropped")},
            "tokens_per_pass": counts.tokens / counts.passes if counts.passes else None,
            "guesses": counts.line(self.name or ""),
            "times": found["tokens_per_second"] / plain[0]["tokens_per_second"],
            "times_while_all_run": together[0] / together[1] if all(together) else None,
            "same_texts": same,
        }
