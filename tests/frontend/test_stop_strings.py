"""Stop strings cut at the right place however the text is split, and nothing else is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.generation.stop_strings import StopScanner


def cut_letter_by_letter(text: str, stops: list[str], first: int = 0) -> tuple[str, bool]:
    """The plain reading: type the text letter by letter until it ends with a stop string; the `first`
    letters end nothing."""
    for end in range(first + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def scan(pieces: list[str], stops: list[str], harmless: int = 0) -> tuple[str, bool]:
    """`harmless`: so many pieces end nothing."""
    scanner = StopScanner(tuple(stops))
    shown = ""
    for number, piece in enumerate(pieces):
        text, is_stopped = scanner.push(piece, may_stop=number >= harmless)
        shown += text
        if is_stopped:
            return shown, True
    return shown + scanner.flush(), False


LETTERS = st.text("abé🌍", max_size=30)


@given(
    st.lists(LETTERS, max_size=8), st.lists(st.text("abé🌍", min_size=1, max_size=5), max_size=4)
)
def test_the_cut_does_not_depend_on_the_pieces(pieces, stops):
    stops = stops or ["ab"]
    assert scan(pieces, stops) == cut_letter_by_letter("".join(pieces), stops)


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_what_the_first_pieces_complete_is_no_stop_string(pieces, stops, harmless):
    first = len("".join(pieces[:harmless]))
    assert scan(pieces, stops, harmless) == cut_letter_by_letter("".join(pieces), stops, first)


@given(LETTERS, st.lists(st.text("abé🌍", min_size=1, max_size=5), min_size=1, max_size=4))
def test_what_is_shown_never_has_to_be_taken_back(text, stops):
    scanner = StopScanner(tuple(stops))
    shown = ""
    for letter in text:
        piece, is_stopped = scanner.push(letter)
        shown += piece
        if is_stopped:
            break
    assert cut_letter_by_letter(text, stops)[0].startswith(shown)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("hello wor", ["world"], "hello "),
        ("hello", ["xyz"], "hello"),
        ("aaa", ["aaaa"], ""),
        ("ab", ["bc", "abd"], ""),
    ],
)
def test_only_a_possible_beginning_is_held_back(text, stops, shown):
    assert StopScanner(tuple(stops)).push(text) == (shown, False)


def test_a_stop_string_that_is_text_is_shown_at_once():
    scanner = StopScanner(("ab", "bcd"))
    assert scanner.push("xab", may_stop=False) == ("xa", False)
    assert scanner.push("cab", may_stop=False) == ("bca", False)  # the b may begin another
    assert scanner.push("cd") == ("", True)
    assert StopScanner(("ab",)).push("xab", may_stop=False) == ("xab", False)
