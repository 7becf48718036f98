"""python -m hybrid.bench --acceptance: guesses of a set rightness, counted, with a draft whose passes are run and without."""

from __future__ import annotations

import json

import pytest

from hybrid.bench import __main__ as bench

pytestmark = pytest.mark.slow

SMALL = ["--random", "gemma3-270m", "--layers", "1", "--vocab", "512", "--device", "cpu", "-n", "13", "-r", "1"]


def test_guesses_of_a_set_rightness_are_counted(capsys):
    assert bench.main([*SMALL, "--acceptance", "1,0,0.5", "--speculate", "3", "--json"]) == 0
    right, wrong, half = json.loads(capsys.readouterr().out)["guessed"]
    assert (right["passes"], right["verified"], right["drafted"], right["accepted"]) == (4, 3, 9, 9), "a token, 3 times 4"
    assert wrong["accepted"] == 0 and wrong["passes"] == 13 and wrong["verified"] == 11, "no guess is left for the last token"
    assert 0 < half["accepted"] < half["drafted"] and half["tokens_of_a_verification_expected"] == 1.875
    assert all(g["plain"] > 0 and g["speed"] > 0 and set(g["pass_ms"]) <= {"1", "2", "3", "4"} for g in (right, wrong, half))


def test_a_drafts_passes_are_run_and_its_guesses_are_not_used(capsys):
    options = ["--acceptance", "1", "--speculate", "auto,3", "--draft-random", "gemma3-270m", "--ctx-depth", "4"]
    assert bench.main([*SMALL, *options, "--draft-device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "guesses of draft random/gemma3-270m on cpu, right by set rates" in said[1] and "tokens/pass" in said[3]
    assert "100 %" in said[5] and float(said[5].split()[10]) > 0, "drafting has taken time"


@pytest.mark.parametrize(("options", "says"), [
    (["--acceptance", "1.5"], "is no list of probabilities such as 0.6,0.8"),
    (["--acceptance", "1", "--speculate", "17"], "is no list of auto and numbers from 1 to 16"),
    (["--acceptance", "1", "-b", "2"], "--acceptance is of one sequence"),
    (["--draft", "small.gguf"], "belong to --acceptance"),
    (["--acceptance", "1", "--draft-device", "cpu"], "--draft-device belongs to"),
    (["--acceptance", "1", "--draft", "a", "--draft-random", "b"], "one of the two"),
])  # fmt: skip
def test_misuse_is_one_line(capsys, options, says):
    try:
        assert bench.main([*SMALL, *options]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert says in capsys.readouterr().err
