"""python -m hybrid.bench --acceptance: drafts of a set acceptance, counted, with and without running a draft's passes."""

from __future__ import annotations

import json

import pytest

from hybrid.bench import __main__ as bench
from hybrid.bench.acceptance import AcceptanceTests
from hybrid.bench.measure import Bench
from hybrid.bench.probe import Probes
from hybrid.checkpoint import random

pytestmark = pytest.mark.slow

SMALL = ["--random", "gemma3-270m", "--layers", "1", "--vocab", "512", "--device", "cpu", "-n", "13", "-r", "1"]


def test_drafts_of_a_set_acceptance_are_counted(capsys):
    assert bench.main([*SMALL, "--acceptance", "1,0,0.5", "--speculate", "3", "--json"]) == 0
    said = capsys.readouterr()
    right, wrong, half = json.loads(said.out)["speculation"]
    assert [line.split()[3] for line in said.err.splitlines() if " @ " in line] == ["1.00", "0.00", "0.50"], (
        "each when it is there"
    )
    assert (right["passes"], right["verified"], right["drafted"], right["accepted"]) == (4, 3, 9, 9), (
        "a token, 3 times 4"
    )
    assert wrong["accepted"] == 0 and wrong["passes"] == 13 and wrong["verified"] == 11, (
        "no draft is left for the last token"
    )
    assert 0 < half["accepted"] < half["drafted"] and half["tokens_of_a_verification_expected"] == 1.875
    assert all(
        g["plain"] > 0 and g["speed"] > 0 and set(g["pass_ms"]) <= {"1", "2", "3", "4"} for g in (right, wrong, half)
    )


def test_a_draft_models_passes_run_and_its_drafts_are_replaced(monkeypatch, capsys):
    """The draft's head has the requested type, the model's its own."""
    made, heads = random.random_checkpoint, list[str]()

    def noted(name, kind, head, *rest):
        heads.append(head)
        return made(name, kind, head, *rest)

    monkeypatch.setattr(random, "random_checkpoint", noted)
    options = [
        "--acceptance",
        "1",
        "--speculate",
        "auto,3",
        "--draft-random",
        "gemma3-270m",
        "--ctx-depth",
        "4",
        "--draft-head",
        "q4_0",
        "--head",
        "q8_0",
    ]
    assert bench.main([*SMALL, *options]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "drafts of draft random/gemma3-270m on cpu with set acceptance rates" in said[1] and "tokens/pass" in said[3]
    assert sorted(heads) == ["q4_0", "q8_0"]
    assert "100 %" in said[5] and float(said[5].split()[10]) > 0, "drafting took time"


@pytest.mark.parametrize("options", [["--acceptance", "1,0", "--speculate", "3"], ["-p", "0"]])
def test_a_run_that_is_cut_has_printed_what_it_has_measured(monkeypatch, capsys, options):
    """The second test never ends: a time limit ends the program."""
    tests = AcceptanceTests if "--acceptance" in options else Bench
    name = "run" if tests is AcceptanceTests else "decode"
    whole, begun = getattr(tests, name), list[int]()

    def cut(self, *args):
        begun.append(1)
        if len(begun) > 1:
            raise KeyboardInterrupt
        return whole(self, *args)

    monkeypatch.setattr(tests, name, cut)
    monkeypatch.setattr("hybrid.bench.probe.probe", lambda device: Probes(3000.0, "copy", 500.0, "matrix", {}))
    assert bench.main([*SMALL, "-n", "13,5", *options]) == 130
    said = capsys.readouterr().out.splitlines()
    assert len(begun) == 2 and sum(" @ " in line for line in said) == 1 and " 0 " in said[-1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--acceptance", "1.5"], "is no list of probabilities such as 0.6,0.8"),
        (["--acceptance", "1", "--speculate", "17"], "is no list of auto and numbers from 0 to 16"),
        (["--acceptance", "1", "-b", "2"], "--acceptance is of one sequence"),
        (["--draft", "small.gguf"], "--draft belongs to --acceptance or --requests: give that too, or leave it out"),
        (["--speculate", "auto"], "--speculate belongs to --acceptance or --requests: give"),
        (
            ["--acceptance", "0.5", "--deterministic", "--energy"],
            "--acceptance takes no --deterministic, no --energy: leave out",
        ),
        (["--acceptance", "0.5", "-p", "0", "--seed", "1"], "--acceptance takes no --prompt, no --seed"),
        (["--acceptance", "1", "--draft", "a", "--draft-head", "q4_0"], "--draft-head belongs to --draft-random"),
        (["--acceptance", "1", "--draft", "a", "--draft-random", "b"], "one of the two"),
    ],
)
def test_misuse_is_one_line(capsys, options, says):
    try:
        assert bench.main([*SMALL, *options]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert says in capsys.readouterr().err
