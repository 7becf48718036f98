"""Drafters that read their target's cache (Gemma 4's assistants): all guesses of a sequence follow from the target's last
hidden state, without a cache, a scheduler or tokens of their own.

A pass makes one guess for each of its sequences, in the target's slots. The first pass takes the token and the hidden state
that the target left on the device; each later one takes the guess before. So the passes of the next guesses can be queued
behind a verification that is still running, whichever of its drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybrid.checkpoint import Checkpoint
from hybrid.core.hparams import HParams
from hybrid.core.plan import DRAFTS_TENSOR, TARGET_EMBEDDING
from hybrid.engine.request import Request
from hybrid.engine.runner import CONTINUES, DRAFTED, Runner
from hybrid.engine.scheduler import Pass, Run
from hybrid.engine.speculation import DeviceDrafter

HIDDEN_TENSOR = "last_hidden"
_KIND = {True: "local", False: "global"}


def lent_to(drafter: HParams, target: Runner) -> dict[str, str]:
    """Tensors of the drafter -> tensors of the target that they alias: the caches of its last layers that own one."""
    own = target.target.hparams.layers[: target.target.hparams.n_kv_layers]
    last = {_KIND[bool(layer.window)]: i for i, layer in enumerate(own)}
    kinds = {_KIND[bool(layer.window)] for layer in drafter.layers}
    found = {f"kv.{kind}.{part}": f"kv.{last[kind]}.{part}" for kind in kinds for part in "kv"}
    found |= {f"block_table.{kind}": f"block_table.{kind}" for kind in kinds}
    return {
        **found,
        "history": DRAFTS_TENSOR,
        "params": "params",
        "target_token": "next_token",
        "target_position": "next_position",
        "target_hidden": HIDDEN_TENSOR,
        TARGET_EMBEDDING: "token_embd.weight",
    }


def check_pair(drafter: Checkpoint, target: Runner) -> None:
    """ValueError where a drafter was made for another model than the target."""
    ours, hp = target.target.hparams, drafter.hparams
    where = f"{drafter.path}: this drafter was made for another model than {target.checkpoint.path}"
    if not any(step.args.get("kept") == HIDDEN_TENSOR for step in target.target.schedule.steps):
        name = target.target.schedule.schedule.name
        raise ValueError(f"{where}: its schedule {name} keeps no hidden state for a drafter")
    for what, theirs, own in (("hidden", hp.backbone, ours.hidden), ("vocab", hp.vocab, ours.vocab)):
        if theirs != own:
            raise ValueError(f"{where}: it needs {what} {theirs}, and that has {own}")
    cached = {bool(layer.window): layer for layer in ours.layers[: ours.n_kv_layers]}
    for i, layer in enumerate(hp.layers):
        source = cached.get(bool(layer.window))
        kind = f"{_KIND[bool(layer.window)]} layers"
        if source is None:
            raise ValueError(f"{where}: its layer {i} reads a cache of {kind}, and that has none")
        for key in ("head_dim", "n_kv_heads", "window", "rope_theta", "rope_factor", "rotated"):
            if getattr(source, key) != getattr(layer, key):
                raise ValueError(
                    f"{where}: its layer {i} needs {kind} of {key} {getattr(layer, key)}, and they have "
                    f"{getattr(source, key)}"
                )


@dataclass(slots=True)
class _Queued:
    """Guesses queued behind a verification of `drafts` drafts of a sequence of `known` tokens."""

    known: int
    drafts: int
    guesses: int


class Assistant(DeviceDrafter):
    """A drafter over `runner`, whose device is a sibling of the target's with the tensors of `lent_to`. ValueError where
    these differ from the target's."""

    def __init__(self, runner: Runner, name: str, lent: Mapping[str, str], close: Callable[[], object]) -> None:
        self.runner, self.name, self._close = runner, name, close
        apart = [own for own in lent if not runner.device.shares(own)]
        if apart:
            raise ValueError(f"{name}: {', '.join(sorted(apart))} cannot be shared with the target on this device")
        self.queues = runner.device.passes_ahead > 1
        self._queued: dict[Request, _Queued] = {}
        self._passes = 0

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Token words by which a verifying pass finds the guesses (DRAFTED). Does not wait."""
        ready = {request: (self.expects(request), most) for request, most in wanted.items() if request.slot is not None}
        for i in range(max((most for _, most in ready.values()), default=0)):
            self._guess([request for request, (made, most) in ready.items() if made <= i < most], i)
        self._queued.clear()
        self._proposed = self._flight
        return {request: [DRAFTED - (request.slot or 0)] * most for request, (_, most) in ready.items()}

    def queue_after(self, verified: Mapping[Request, int], most: int) -> bool:
        requests = [
            r for r in verified if r.slot is not None and len(r.ids) + verified[r] + most < self.runner.cache.ctx
        ]
        for i in range(most):
            self._guess(requests, i)
        self._queued = {r: _Queued(len(r.ids), verified[r], most) for r in requests}
        return bool(requests and most)

    def expects(self, request: Request) -> int:
        queued = self._queued.get(request)
        right = queued is not None and 0 < len(request.ids) - queued.known <= queued.drafts + 1
        return queued.guesses if queued is not None and right else 0

    def _guess(self, requests: list[Request], i: int) -> None:
        """Queue the pass of the i-th guess, i positions after the token that the target sampled last."""
        if not requests:
            return
        runs = [
            Run(r, r.slot, len(r.ids) - 1 + i, (DRAFTED - r.slot if i else CONTINUES,), 1, -1 - i)
            for r in requests
            if r.slot is not None
        ]
        self._passes += 1
        self._flight = self.runner.start(Pass(self._passes, runs, rows=len(runs), outs=len(runs)))

    def verified(self, request: Request, accepted: int) -> None:
        pass

    def _lose(self) -> None:
        self._queued.clear()

    def end(self, request: Request) -> None:
        self._queued.pop(request, None)

    def close(self) -> None:
        """Close its device, also after an error."""
        self._queued.clear()
        self._close()
