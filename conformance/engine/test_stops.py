"""Stop strings: which of several wins, however the text is cut into pieces."""

from __future__ import annotations

import pytest

from hybrid.text.stops import StopFilter


@pytest.mark.parametrize(
    "stops, text, before, stopped",
    [
        (["zz", "b"], "abcdzz", "a", "b"),  # the one that begins first, wherever it stands in the list
        (["b", "zz"], "abcdzz", "a", "b"),
        (["cd", "bcdz"], "abcdzz", "a", "bcdz"),
        (["bc", "bcd"], "abcdzz", "a", "bcd"),  # of two that begin together the longer
        (["bcd", "bc"], "abcdzz", "a", "bcd"),
        (["d", "z"], "zd", "", "z"),
    ],
)
def test_of_two_stop_strings_the_one_that_begins_first_wins(stops: list[str], text: str, before: str, stopped: str) -> None:
    found = StopFilter(stops)
    assert found.push(text) == before and found.stopped == stopped
    assert found.push("more") == "" and found.flush() == "" and found.stopped == stopped


def test_text_is_held_no_longer_than_it_can_be_the_beginning_of_a_stop_string() -> None:
    found = StopFilter(["<end>", "e!"])
    assert [found.push(piece) for piece in ("a<", "en", "dx<e", "n", "e")] == ["a", "", "<endx", "", "<en"]
    assert found.flush() == "e" and found.stopped is None and found.flush() == ""


def test_stop_strings_are_text() -> None:
    with pytest.raises(ValueError, match="a stop string must be text, not 5"):
        StopFilter(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopFilter(["a", ""])
