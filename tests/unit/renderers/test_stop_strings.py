from __future__ import annotations

from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.renderers.text_stream import StopStrings

letters = st.text("abé", max_size=30)


def earliest(text: str, strings: list[str]) -> tuple[int, str] | None:
    """Where the first complete one starts, found by looking at each end."""
    for end in range(len(text) + 1):
        for string in sorted(strings, key=len, reverse=True):
            if text[:end].endswith(string):
                return end - len(string), string
    return None


def fed(text: str, sizes: list[int], strings: list[str]) -> tuple[str, str | None]:
    stops, out, at = StopStrings(strings), "", 0
    for size in [*sizes, len(text)]:
        out += stops.feed(text[at : at + size])
        at += size
        assert text.startswith(out)
    return out + stops.end(), stops.found


@examples(60, 500)
@given(text=letters, sizes=st.lists(st.integers(0, 4), max_size=40), string=st.text("abé", min_size=1, max_size=4))
def test_one_string_is_found_where_find_finds_it_in_any_pieces(text, sizes, string):
    place = text.find(string)
    wanted = (text, None) if place < 0 else (text[:place], string)
    assert fed(text, sizes, [string]) == wanted


@examples(60, 500)
@given(
    text=letters,
    sizes=st.lists(st.integers(0, 4), max_size=40),
    strings=st.lists(st.text("abé", min_size=1, max_size=4), max_size=4),
)
def test_of_several_the_first_that_is_complete_ends_the_text(text, sizes, strings):
    found = earliest(text, strings)
    wanted = (text, None) if found is None else (text[: found[0]], found[1])
    assert fed(text, sizes, strings) == wanted


def test_only_what_may_become_a_stop_string_is_held_back():
    stops = StopStrings(["###", "END"])
    assert stops.feed("a#") == "a"
    assert stops.feed("#b") == "##b"
    assert stops.feed("EN") == ""
    assert stops.end() == "EN"
