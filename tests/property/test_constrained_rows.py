"""Rows of constrained replies that the agent sends back edited: a span never leaves the reply that it belongs to."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import make_chat, rows_of

from palestra.types.calls import Chat, SamplingParams

STOP = 258
PROMPT = [7, 8, 9]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("abé ", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner),
    max_leaves=5,
)
replies = st.dictionaries(st.text("xyz", min_size=1, max_size=3), values, min_size=1, max_size=3)


def call_of(value: Any) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(value)}}}\n</tool_call>'


def edited(draw: Any, value: dict[str, Any], text: str) -> str:
    """What an agent makes of a reply before it sends it back."""
    kind = draw(
        st.sampled_from(["same", "cut", "compact", "indented", "reordered", "spaces", "truncated call", "gone"])
    )
    match kind:
        case "same":
            return text
        case "cut":
            return text[: draw(st.integers(0, len(text)))]
        case "compact":
            return json.dumps(value, separators=(",", ":"))
        case "indented":
            return json.dumps(value, indent=2)
        case "reordered":
            return json.dumps(dict(reversed(value.items())))
        case "spaces":
            return draw(st.sampled_from([f" {text}", f"{text}\n", text.strip("{}"), text.replace(" ", "  ")]))
        case "truncated call":
            return call_of(value)[: draw(st.integers(0, len(call_of(value))))]
    return ""


@st.composite
def conversations(draw: Any) -> list[Chat]:
    """Calls that each go on from an edit of an earlier constrained reply; the stop token may be any id."""
    stop = draw(st.sampled_from([0, 2, STOP]))  # where it is small, a cut sorts before what the reply goes on with
    chats: list[Chat] = []
    texts: list[tuple[dict[str, Any], str]] = []
    for index in range(draw(st.integers(1, 4))):
        value = draw(replies)
        text = draw(st.sampled_from([json.dumps(value), call_of(value)]))
        prompt, parent = list(PROMPT), None
        if chats and draw(st.booleans() | st.just(True)):
            parent = draw(st.sampled_from(chats))
            again = edited(draw, *texts[parent.index])
            prompt = [*parent.prompt_ids.tolist(), *again.encode(), stop, *b"go on", 259]
        completion = [*text.encode(), *([stop] if draw(st.booleans()) else [])]
        how = SamplingParams(
            temperature=1.0, max_tokens=999, seed=index, grammar=draw(st.sampled_from(["", f"g{index}"]))
        )
        chats.append(make_chat(index=index, prompt=prompt, completion=completion, sampling=how))
        texts.append((value, text))
    return chats


@given(conversations())
@examples(60, 300)
def test_a_span_is_the_beginning_of_its_reply_and_covers_what_the_row_trains_of_it(chats: list[Chat]) -> None:
    by_grammar = {chat.sampling.grammar: chat for chat in chats if chat.sampling.grammar}
    for row in rows_of(chats):
        assert len({span.grammar for span in row.grammars}) == len(row.grammars)
        covered = np.zeros(len(row.ids), np.bool_)
        for span in row.grammars:
            chat = by_grammar[span.grammar]
            stop = span.start + span.tokens
            assert row.ids[: span.start].tolist() == chat.prompt_ids.tolist()
            assert row.ids[span.start : stop].tolist() == chat.completion_ids[: span.tokens].tolist()
            assert row.calls[stop - 1] == chat.index  # nothing is walked for nothing
            covered[span.start : stop] = True
        constrained = {chat.index for chat in by_grammar.values()}
        assert all(covered[place] for place, index in enumerate(row.calls.tolist()) if index in constrained)
