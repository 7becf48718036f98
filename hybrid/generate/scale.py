"""generate --batch --ray: the prompts of a file as a Ray dataset, mapped by a pool of engines, one for each device.

Ray Data hands out parts of the file, gives what a lost engine had to another one, and keeps the order. A part holds
some times as many prompts as an engine runs together, so that few of them wait for the last of a part.
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
"""Parts for each engine, where there are prompts enough: the last to end waits for no more than one of them."""
MOST = 8
"""Times as many prompts in a part as an engine runs together, at most."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """How a prompt becomes ids."""

    chat: bool
    system: str
    parse_special: bool


class Devices:
    """An actor that says which device the next engine is for; one that is started again gets the next in turn."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._next = list(names), 0

    def take(self) -> str:
        self._next += 1
        return self._names[(self._next - 1) % len(self._names)]


class Engine:
    """Maps parts of the dataset: rows with `asked`, JSON of [index, prompt, options, line], get `result`, JSON of a
    result or of why there is none."""

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
    """Options that went through JSON, where token ids became text."""
    bias = options.get("logit_bias")
    return {**options, **({"logit_bias": {int(k): v for k, v in bias.items()}} if bias else {})}


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines to be: load are options of hybrid.load, but for the device."""

    load: Mapping[str, Any]
    devices: Sequence[str]

    def results(
        self, rest: Sequence[Asked], first: int, options: Mapping[str, Any], prompts: Prompts
    ) -> Iterator[dict[str, Any]]:
        """Of each prompt, in order, as they come; `first`: the first one's index."""
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
    """Prompts of a part."""
    return max(slots, min(MOST * slots, -(-prompts // (PARTS * engines))))


@contextmanager
def engines(load: Mapping[str, Any], devices: Sequence[str], address: str | None = None) -> Iterator[Pool]:
    """address: a running cluster's; without one, Ray is started on this machine and ended with the block."""
    with cluster(address):
        import ray.data

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield Pool(load, devices)
