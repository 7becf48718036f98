"""Stop strings: which of several applies, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid.text.stops import StopFilter


@pytest.mark.parametrize(
    "stops, text, before, stopped",
    [
        (["zz", "b"], "abcdzz", "a", "b"),  # the one that begins first, wherever it is in the list
        (["b", "zz"], "abcdzz", "a", "b"),
        (["cd", "bcdz"], "abcdzz", "a", "bcdz"),
        (["bc", "bcd"], "abcdzz", "a", "bc"),  # of two that begin together the one that ends first
        (["bcd", "bc"], "abcdzz", "a", "bc"),
        (["c", "bcdx"], "abcdzz", "ab", "c"),  # the one that began first did not complete
        (["d", "z"], "zd", "", "z"),
    ],
)
def test_of_two_stop_strings_the_one_that_begins_first_wins(
    stops: list[str], text: str, before: str, stopped: str
) -> None:
    found = StopFilter(stops)
    assert found.push(text) == before and found.stopped == stopped
    assert found.push("more") == "" and found.flush() == "" and found.stopped == stopped


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=6), max_size=6),
)
@example(["bcd", "c"], ["abc", "d"])
@example(["bcd", "c"], ["abc"])
@example(["abab", "b"], ["aba", "c"])
def test_any_cutting_gives_the_text_before_the_stop_string_that_begins_first(
    stops: list[str], pieces: list[str]
) -> None:
    text = "".join(pieces)
    at = min((text.find(s) for s in stops if s in text), default=len(text))
    winner = min((s for s in stops if text.startswith(s, at)), key=len, default=None)
    for cut in (pieces, [text], list(text)):
        found = StopFilter(stops)
        given_out = "".join([found.push(piece) for piece in cut])
        assert (given_out + found.flush(), found.stopped) == (text[:at], winner)


@given(st.text("ab", min_size=1, max_size=4), st.text("abc", max_size=12))
def test_held_back_text_may_still_become_a_stop_string(stop: str, text: str) -> None:
    found = StopFilter([stop])
    out = ""
    for n, piece in enumerate(text, start=1):
        out += found.push(piece)
        if found.stopped is None:
            assert stop.startswith(text[len(out) : n]) and stop not in text[:n]


def test_text_is_held_back_only_as_a_stop_string_prefix() -> None:
    found = StopFilter(["<end>", "e!"])
    assert [found.push(piece) for piece in ("a<", "en", "dx<e", "n", "e")] == ["a", "", "<endx", "", "<en"]
    assert found.flush() == "e" and found.stopped is None and found.flush() == ""


def test_stop_strings_are_text() -> None:
    with pytest.raises(ValueError, match="a stop string must be text, not 5"):
        StopFilter(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopFilter(["a", ""])
