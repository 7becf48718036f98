"""The commands and the engine's services run Gemma 3n and Gemma 4 without family-specific code: tiny models, real
command lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.support.devices import BACKENDS, for_model
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny_gemma3n, tiny_gemma4, write_hf
from hybrid import generate, inspect, perplexity, schedule
from hybrid.bench import __main__ as bench
from hybrid.convert import __main__ as convert
from hybrid.core.hparams import HParams
from hybrid.kernels.vulkan.kernel import kernels_digest

FAMILIES: dict[str, Callable[..., HParams]] = {"gemma3n": tiny_gemma3n, "gemma4": tiny_gemma4}
TEXT = "def read_file(path):\n    with open(path) as f:\n        return f.read()\n" * 3


# Prefix reuse: on cpu in f16; on Vulkan in q8_0, of one family, which changes with the kernels. All in the long
# profile.
TURN = list(FAMILIES)[int(kernels_digest(), 16) % 2]
FOUND = [
    (f, b, kv)
    for f, b, kv in product(FAMILIES, BACKENDS, ("f16", "q8_0"))
    if LONG or (b, kv) == ("cpu", "f16") or (f, b, kv) == (TURN, "vulkan", "q8_0")
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    hp = FAMILIES[request.param]()
    hp = replace(
        hp, layers=tuple(replace(layer, head_dim=2 * layer.head_dim) for layer in hp.layers)
    )  # blocks of 32, for q8_0
    return request.param, write_hf(tmp_path_factory.mktemp(request.param), hp)


def said(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(w) for w in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_file_goes_through_every_command(
    folder: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, source = folder
    made, text = tmp_path / "made.gguf", tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    said(convert.main, capsys, source, made, "--type", "q8_0")
    about = json.loads(said(inspect.main, capsys, made, "--json"))
    assert about["hparams"]["family"] == family
    assert family in said(schedule.main, capsys, "show", family, made, "--device", "vulkan")
    losses = [
        json.loads(said(perplexity.main, capsys, path, text, "--device", "cpu", "--chunk", 64, "--json"))
        for path in (source, made)
    ]
    assert losses[0]["nats_per_token"] > 0 and abs(losses[0]["nats_per_token"] - losses[1]["nats_per_token"]) < 0.05
    speeds = json.loads(
        said(bench.main, capsys, made, "--device", "cpu", "-p", 8, "-n", 2, "-b", "1,2", "-r", 1, "--json")
    )
    assert {t["batch"] for t in speeds["results"]} == {1, 2}
    assert said(generate.main, capsys, made, "--device", "cpu", "--prompt", "def f(", "-n", 3, "--ignore-eos")


@pytest.mark.parametrize(("folder", "backend", "kv"), FOUND, indirect=["folder"])
@pytest.mark.slow
def test_prefixes_are_found_again(folder: tuple[str, Path], backend: str, kv: Any) -> None:
    """Layers that read an earlier layer's cache find it unchanged: bit for bit, where passes have one size."""
    prompts = [[2, *range(10, 80)], [2, *range(10, 60), 7, 8]]

    with hybrid.load(
        folder[1], for_model(backend), ctx=128, chunk=32, kv=kv, memory="200MiB", deterministic=True
    ) as model:

        def texts(asked: list[list[int]]) -> list[tuple[int, ...]]:
            model.engine.runner.blocks.clear()  # empty the cache
            results = [model.submit(prompt, max_tokens=4, ignore_eos=True).result() for prompt in asked]
            assert [r.usage.cached_tokens > 0 for r in results] == [False] + [True] * (len(asked) - 1)
            return [r.ids for r in results]

        first, second = texts(prompts[:1]), texts(prompts[1:])
        assert texts(prompts * 2) == (first + second) * 2
