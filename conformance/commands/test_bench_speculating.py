"""python -m hybrid.bench --requests with drafts: their counts, beside the same requests without drafts."""

from __future__ import annotations

import json

import pytest

from conformance.support.garbage import UNTOUCHED
from conformance.support.paths import DEMO
from hybrid.bench import __main__ as bench
from hybrid.bench.speculating import Drafts, Runs
from hybrid.core import garbage
from hybrid.engine.request import Request
from hybrid.engine.speculation import Lookup, Replay


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench collects garbage once its model is loaded."""
    monkeypatch.setattr(garbage, "gc", UNTOUCHED)


SMALL = ["--random", "gemma3-270m", "--layers", "1", "--vocab", "512", "--device", "cpu"]
ASKED = ["-b", "3", "--requests", "4", "--prompt-lengths", "33,40", "--output-lengths", "7,13"]
COUNTED = {"k", "rate", "drafted", "accepted", "verified", "drafts", "times", "times_while_all_run", "same_texts"}


# --- known texts of several sequences --------------------------------------------------------------------------------


def drafted(known: Replay, prompt: tuple[int, ...], text: tuple[int, ...], most: int) -> list[int]:
    """Drafts for a request that has generated this text."""
    request = Request(0, prompt)
    request.ids += text
    return known.propose({request: most})[request]


def test_replay_drafts_by_the_sequences_text():
    known = Replay({(1, 2): (3, 4, 5), (6, 7, 8): (4, 9)}, 1.0)
    assert drafted(known, (1, 2), (3,), 5) == [4, 5] and drafted(known, (6, 7, 8), (), 1) == [4]
    assert drafted(known, (1, 2), (3, 4), 3) == [5] and drafted(known, (6, 7, 8), (4,), 3) == [9], (
        "as long, with the same last token"
    )
    assert drafted(known, (1, 2), (3, 4, 5), 2) == []
    assert drafted(known, (1, 2, 9), (), 2) == [], "no known text"
    assert drafted(Replay({(1, 2): (3, 4, 5)}, 0.0), (1, 2), (3,), 2) == [4 ^ 1, 5 ^ 1]
    with pytest.raises(ValueError, match=r"rate must be a probability, 0 to 1, not 1\.5"):
        Replay({}, 1.5)


def test_replay_drafts_for_concurrent_requests_until_they_end():
    known = Replay({(1,): (3, 4), (2,): (5, 6)}, 1.0)
    first, second = Request(0, [1]), Request(1, [2])
    assert known.propose({first: 1, second: 2}) == {first: [3], second: [5, 6]}
    known.end(first)
    second.ids.append(5)
    assert known.propose({second: 2}) == {second: [6]} and set(known._of) == {second}


def test_replay_accepts_drafts_at_different_positions():
    """A pass whose drafts are all right or all wrong would be unrealistic."""
    known = Replay({(n, 0): tuple(range(40)) for n in range(2)}, 0.5)
    first, second = (drafted(known, (n, 0), (0,), 39) for n in range(2))
    assert first != second and 5 < sum(a == b for a, b in zip(first, range(1, 40), strict=True)) < 35


def test_titles_describe_the_drafts_of_a_run():
    assert [Drafts().title, Drafts(None).title] == ["without drafts", "draft tokens of a pass: auto"]
    assert Drafts(3, 0.5).title == "draft tokens of a pass: 3, acceptance 0.50"


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_drafts_of_a_set_acceptance_are_counted_for_all_requests(capsys):
    assert bench.main([*SMALL, *ASKED, "--acceptance", "1,0", "--speculate", "3", "--json", "--energy"]) == 0
    out = json.loads(capsys.readouterr().out)
    plain, (right, wrong) = out["requests"], out["speculation"]
    assert out["draft"] == "known texts" and not COUNTED & set(plain) and set(right) == set(plain) | COUNTED
    for found in (right, wrong):
        assert all(found[name] == plain[name] for name in ("generated_tokens", "prompt_tokens"))
        assert found["same_texts"] == found["requests"] == 4 and found["cached_tokens"] == 0 and found["k"] == 3
        assert (
            found["times"] == found["tokens_per_second"] / plain["tokens_per_second"]
            and found["times_while_all_run"] is None
        )
        assert f"drafted {found['drafted']}, accepted {found['accepted']} " in found["drafts"]
    assert right["rate"] == 1 and right["drafted"] == right["accepted"] > right["verified"] > 0
    assert wrong["rate"] == 0 and wrong["accepted"] == 0 < wrong["verified"] <= wrong["drafted"]
    assert right["passes"] < wrong["passes"]


@pytest.mark.slow
def test_a_draft_model_is_measured_between_runs_without_drafts(capsys):
    """A draft with the same weights drafts all tokens correctly."""
    options = [
        *SMALL,
        "--precision",
        "exact",
        "-b",
        "2",
        "--requests",
        "2",
        "--prompt-lengths",
        "5",
        "--output-lengths",
        "13",
    ]
    assert bench.main([*options, "--draft-random", "gemma3-270m", "--speculate", "3,0,auto"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith(("without", "draft tokens of"))] == [
        "without drafts",
        "draft tokens of a pass: 3",
        "without drafts",
        "draft tokens of a pass: auto",
    ]
    three, none, auto = (
        line for line in said if line.startswith("speculation (draft random/gemma3-270m on cpu): drafted ")
    )
    assert three.endswith("drafted 18, accepted 18 (100 %)"), "13 tokens each: one, and three times four"
    assert none.endswith("drafted 0, accepted 0") and "drafted" in auto
    compared = [line for line in said if line.startswith("compared ")]
    assert len(compared) == 3 and all("times the tok/s of the last run without drafts" in line for line in compared)
    assert all(line.endswith("; 2 of 2 texts the same") for line in compared)


@pytest.mark.slow
def test_a_draft_may_only_cost_its_time(capsys):
    """Its passes are run, but the drafts are those of known texts."""
    options = ["--acceptance", "1", "--draft-random", "gemma3-270m", "--speculate", "2", "--json"]
    assert bench.main([*SMALL, *ASKED, *options]) == 0
    out = json.loads(capsys.readouterr().out)
    (found,) = out["speculation"]
    assert out["draft"] == "draft random/gemma3-270m on cpu" and found["drafted"] == found["accepted"] > 0


@pytest.mark.slow
def test_a_file_is_measured_with_prompt_lookup(capsys):
    options = ["-b", "2", "--requests", "2", "--prompt-lengths", "8", "--output-lengths", "40", "--speculate", "4"]
    assert bench.main([str(DEMO), "--device", "cpu", "--json", *options]) == 0
    said = capsys.readouterr()
    (found,) = json.loads(said.out)["speculation"]
    assert (
        found["drafts"].startswith("speculation (lookup): drafted ") and found["drafted"] > 0 and found["rate"] is None
    )
    assert said.err.count("between tokens") == 2, "each run when it is there"


@pytest.mark.slow
def test_a_failing_drafter_invalidates_the_figures(monkeypatch, capsys):
    def broken(self, wanted):
        raise OSError("gone")

    monkeypatch.setattr(Lookup, "propose", broken)
    assert bench.main([*SMALL, *ASKED, "--speculate", "2"]) == 1
    said = capsys.readouterr()
    assert "lookup: OSError: gone; speculation has ended: the measurement is invalid" in said.err.splitlines()[-1]
    assert "draft tokens of a pass" not in said.out


@pytest.mark.slow
def test_different_texts_invalidate_the_figures(monkeypatch, capsys):
    whole = Runs._replayed

    def changed(self, rate):
        self._plain = self._plain[0], [(1,)] * 4
        return whole(self, rate)

    monkeypatch.setattr(Runs, "_replayed", changed)
    assert bench.main([*SMALL, *ASKED, "--acceptance", "1"]) == 1
    assert "4 texts differ from those without drafts: the measurement is invalid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--requests", "2", "--speculate", "0"],
            "--speculate 0 alone: the run without drafts is always measured: add auto or a number",
        ),
        (["--requests", "2", "--draft", "a", "--draft-random", "b"], "--draft or --draft-random: one of the two"),
        (["--requests", "2", "--draft-head", "q8_0"], "--draft-head belongs to --draft-random"),
        (["--requests", "2", "--acceptance", "1", "-n", "4"], "--requests takes no --tokens"),
        (
            ["--conversation", "2", "--draft", "a", "--speculate", "3"],
            "--conversation takes no --speculate, no --draft",
        ),
        (["--conversation", "2", "--acceptance", "1"], "--acceptance or --conversation: one of the two"),
        (
            ["--conversation", "2", "--requests", "2", "--acceptance", "1"],
            "--requests or --conversation: one of the two",
        ),
        (["-b", "32", "--draft", "a"], "--draft belongs to --acceptance or --requests: give that too, or leave it out"),
        (["--acceptance", "1", "-b", "2"], "of several sequences it is with --requests"),
        (["--acceptance", "1", "--speculate", "0"], "--speculate 0 belongs to --requests"),
    ],
)
def test_misuse_is_one_line(capsys, options, says):
    assert bench.main([*SMALL, *options]) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("error: ") and err.count("\n") == 1
