"""What a file says, as text: on one line, and without a terminal's commands."""

from hypothesis import given
from hypothesis import strategies as st

from dataloaders.cache.printable import printable, shown
from helpers.cached import TEXT


@given(TEXT)
def test_it_is_text_that_any_terminal_shows(text):
    made = printable(text)
    assert made.isprintable()
    made.encode()
    assert (made == text) == text.isprintable()


def test_what_is_visible_stays():
    assert printable("größe 3 日本 [red]") == "größe 3 日本 [red]"
    assert printable("a\x1b[2Jb\n\ud800\u202e") == r"a\x1b[2Jb\n\ud800\u202e"


def test_it_is_cut():
    assert printable("abc", 3) == "abc"
    assert printable("abcd", 3) == "abc..."


@given(st.one_of(TEXT, st.integers(), st.lists(TEXT)))
def test_values_are_shown_in_a_few_characters(value):
    assert len(shown(value)) <= 60
    assert shown(value).isprintable()
