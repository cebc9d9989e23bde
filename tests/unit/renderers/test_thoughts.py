from __future__ import annotations

import pytest

from palestra.renderers.chatml_reply import read_thought, write_thought


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("2", None, "2"),
        ("<think>\n1 and 1\n</think>\n\n2", "1 and 1", "2"),
        ("\n<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("<think>\n\n</think>\n\n2", None, "2"),
        ("<think>cut of", "cut of", ""),
        ("<think>", None, ""),
        ("so <think>a</think>", None, "so <think>a</think>"),
        (" 2", None, " 2"),
    ],
)
def test_only_what_stands_first_is_reasoning(text, thought, rest):
    assert read_thought(text) == (thought, rest)


@pytest.mark.parametrize("thought", ["a", "a\n\nb", " é "])
def test_what_was_written_is_read_again(thought):
    assert read_thought(write_thought(thought) + "2") == (thought, "2")
