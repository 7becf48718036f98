"""generate --batch --ray: the prompts of a file as a Ray dataset, mapped by a pool of engines, one for each device.

Ray Data distributes parts of the file, retries a lost engine's parts, and keeps the order. A part has several times as
many prompts as an engine has slots, so that few slots idle at its end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hybrid.cli.cluster import cluster
from hybrid.engine.handle import Handle, outcomes
from hybrid.generate.many import Asked, encoded, result

PARTS = 4
"""Parts for each engine, given enough prompts, to balance load at the end."""
MOST = 8
"""Most prompts of a part, as a multiple of an engine's slots."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Options for encoding prompts."""

    chat: bool
    system: str
    parse_special: bool


class Devices:
    """An actor that assigns devices to engines, round-robin; a restarted engine gets the next one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._next = list(names), 0

    def take(self) -> str:
        self._next += 1
        return self._names[(self._next - 1) % len(self._names)]


class Engine:
    """Maps parts of the dataset: `asked` (JSON of [index, prompt, options, line]) to `result` (JSON of a result or an
    error)."""

    def __init__(
        self, load: Mapping[str, Any], devices: Any, options: Mapping[str, Any], prompts: Mapping[str, Any]
    ) -> None:
        import ray

        import hybrid

        self._model = hybrid.load(**load, device=ray.get(devices.take.remote()))
        self._options, self._prompts = options, Prompts(**prompts)

    def __call__(self, part: dict[str, Any]) -> dict[str, Any]:
        rows = [json.loads(str(row)) for row in part["asked"]]
        asked = [(index, Asked(prompt, options, where)) for index, prompt, options, where in rows]
        return {"result": [json.dumps(one) for one in self._results(asked)]}

    def _results(self, asked: Sequence[tuple[int, Asked]]) -> list[dict[str, Any]]:
        p = self._prompts

        def asked_for(a: Asked) -> Handle:
            ids = encoded(self._model, a.prompt, p.chat, p.system, p.parse_special)
            handle: Handle = self._model.submit(ids, **{**self._options, **_with_ids(a.options)})
            return handle

        done = outcomes(partial(asked_for, a) for _, a in asked)
        return [result(index, a, one) for (index, a), one in zip(asked, done, strict=True)]


def _with_ids(options: Mapping[str, Any]) -> dict[str, Any]:
    """Restore options after JSON, which turns token ids of keys into text."""
    bias = options.get("logit_bias")
    return {**options, **({"logit_bias": {int(k): v for k, v in bias.items()}} if bias else {})}


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of engines. load: options of hybrid.load, without the device."""

    load: Mapping[str, Any]
    devices: Sequence[str]

    def results(
        self, rest: Sequence[Asked], first: int, options: Mapping[str, Any], prompts: Prompts
    ) -> Iterator[dict[str, Any]]:
        """Stream the prompts' results in order. first: index of the first prompt."""
        import ray.data

        part = part_of(len(rest), len(self.devices), int(self.load["slots"]))
        rows = [{"asked": json.dumps([i, a.prompt, dict(a.options), a.where])} for i, a in enumerate(rest, first)]
        devices = ray.remote(num_cpus=0)(Devices).remote(list(self.devices))
        made = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // part)).map_batches(
            Engine,
            fn_constructor_args=(dict(self.load), devices, dict(options), asdict(prompts)),
            batch_size=part,
            compute=ray.data.ActorPoolStrategy(size=len(self.devices)),
            num_cpus=0,
        )
        for row in made.iter_rows():
            found: dict[str, Any] = json.loads(row["result"])
            yield found


def part_of(prompts: int, engines: int, slots: int) -> int:
    """Number of prompts of a part."""
    return max(slots, min(MOST * slots, -(-prompts // (PARTS * engines))))


@contextmanager
def engines(load: Mapping[str, Any], devices: Sequence[str], address: str | None = None) -> Iterator[Pool]:
    """Context manager of a pool of engines. address: of a running Ray cluster; None: start a local one for the
    block."""
    with cluster(address):
        import ray.data

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield Pool(load, devices)
