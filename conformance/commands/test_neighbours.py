"""The text of a generation beside other programs on the same GPU, and while they start and are killed, equals that of
the run alone (perf.neighbours). On a CPU driver a small part of it runs, which proves the harness.

HYBRID_CONFORMANCE=long: 4B and 27B, 2000 tokens each, beside products, copies and two more engines, twenty kills.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from conformance.support.devices import open_backend
from conformance.support.models import BOTH, MODELS, cut
from conformance.support.profile import LONG
from hybrid.checkpoint import open_checkpoint
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.perf import neighbour, neighbours
from hybrid.perf.neighbours import Neighbour, NeighbourFailed, Trials

DEMO = MODELS / "demo-gemma3-q8_0.gguf"
SIZES = ("gemma3-4b", "gemma3-27b") if LONG else ("gemma3-270m",)
TOKENS, KILLS = (2000, 20) if LONG else (300, 3)
LIMIT = 540.0
PROMPT, TEXT = 8, 16 if LONG else 8  # of the demonstration model


@pytest.fixture(scope="module")
def kind():
    device = open_backend("vulkan")
    yield device.info.kind
    device.close()


@pytest.fixture(scope="module")
def engine():
    """Three layers of the demonstration model, on whatever driver answers."""
    with open_checkpoint(DEMO) as checkpoint, open_backend("vulkan") as device:
        yield Engine(cut(checkpoint, BOTH), device, EngineConfig(ctx=PROMPT + TEXT))


@pytest.fixture
def trials(engine):
    return Trials(engine, PROMPT, TEXT, time.monotonic() + 120, selector(engine.device))


def selector(device: Any) -> list[str]:
    return ["--device", device.name.split(" ")[0]]


@pytest.mark.parametrize("size", SIZES)
def test_beside_products_and_engines_and_through_kills_the_text_is_that_of_the_run_alone(kind, size, capsys):
    if kind == "cpu":
        pytest.skip("a CPU driver runs one program's workgroups one after another: this needs a real GPU")
    device = os.environ.get("HYBRID_VULKAN_DEVICE", "gpu")
    wanted = [
        "--device",
        device,
        "--beside",
        "matrix",
        "--beside",
        "copy",
        "--beside",
        "engines",
        "--kills",
        str(KILLS),
    ]
    code = neighbours.main(["--random", size, "--tokens", str(TOKENS), *wanted, "--limit", str(LIMIT), "--json"])
    out, errors = capsys.readouterr()
    assert code == 0, errors
    found = json.loads(out)
    assert (
        found["same"]
        and [t["tokens"] for t in found["trials"]] == [TOKENS] * 6
        and found["trials"][-1]["kills"] == KILLS
    )


@pytest.mark.slow
def test_a_neighbour_and_a_kill_leave_the_text_as_it_is(trials):
    """The harness itself, small enough for a CPU driver."""
    found = neighbours.run_all(trials, {"copy": [["--kind", "copy"]]}, 1, ("copy",), lambda trial: None)
    assert [t.name for t in found] == ["alone", "alone, again", "beside copy", "1 starts and kills"]
    assert [t.first_difference for t in found] == [None] * 4 and [t.tokens for t in found] == [TEXT] * 4
    (said,) = found[2].neighbours
    assert "submits of copy" in said and int(said.split()[0]) > 0, "the neighbour made no progress"
    assert found[3].kills == 1


@pytest.mark.slow
def test_a_token_that_changes_beside_a_neighbour_is_found(trials, monkeypatch):
    trials.alone()
    read = trials.engine.runner.tokens

    def changed(flight):
        found, counts = read(flight)
        return [t ^ (flight.scheduled.context == PROMPT + 5) for t in found], counts

    monkeypatch.setattr(trials.engine.runner, "tokens", changed)
    again = trials.alone()
    assert again.first_difference == 5 and "DIFFERS from token 5 on" in again.line()


@pytest.mark.slow
def test_a_neighbour_that_cannot_work_or_ends_too_early_shows_nothing(kind):
    begin = time.monotonic()
    wrong = Neighbour(["--kind", "copy", "--device", "vulkan:99"], 5)
    short = Neighbour(["--kind", "copy", "--device", "vulkan"], 0.1)
    with pytest.raises(NeighbourFailed, match=r"not busy in the time that was left \(0 s\): raise --limit"):
        short.wait_busy(begin)
    with pytest.raises(NeighbourFailed, match=r"there is no vulkan:99"):
        wrong.wait_busy(begin + 60)
    short.wait_busy(begin + 60)
    short.wait_ended(begin + 60)
    with pytest.raises(NeighbourFailed, match=r"ended too early: \d+ submits of copy"):
        short.stop()
    wrong.kill()


@pytest.mark.parametrize(
    ("main", "options", "said"),
    [
        (neighbour.main, ["--kind", "engine"], "--kind engine needs MODEL or --random NAME"),
        (neighbour.main, ["--kind", "copy", str(DEMO)], "the other kinds take neither"),
        (neighbour.main, ["--kind", "copy", "--device", "auto"], "use gpu, vulkan or vulkan:N"),
        (neighbours.main, [str(DEMO), "--device", "cpu"], "use gpu, vulkan or vulkan:N"),
        (neighbours.main, [str(DEMO), "--kills", "-1"], "--kills -1 is negative"),
        (neighbours.main, [], "name a MODEL, or give --random NAME"),
    ],
)
def test_wrong_usage_is_reported_before_any_start(main, options, said, capsys):
    assert main(options) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
