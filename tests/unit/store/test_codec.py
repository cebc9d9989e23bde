from __future__ import annotations

import numpy as np
import pytest

from palestra.database import to_json
from palestra.store.codec import chat_of, chat_row, pack_array, unpack
from palestra.types.messages import ChatMessage, text_message
from unit.building import make_chat


class Row:
    """What SQLAlchemy gives back for a row that was inserted."""

    def __init__(self, values) -> None:
        self.__dict__.update(values)


def test_arrays_come_back_bit_by_bit():
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3.4e38, -1 / 3], np.float32)
    assert unpack(pack_array(odd, "f4"), "f4").tobytes() == odd.tobytes()
    ids = np.array([0, -1, 2**31 - 1, -(2**31)], np.int32)
    assert unpack(pack_array(ids, "i4"), "i4").tolist() == ids.tolist()
    assert unpack(pack_array(ids[:0], "i4"), "i4").tolist() == []


def test_the_bytes_do_not_depend_on_the_machines_byte_order():
    assert unpack(pack_array(np.array([1, 2], ">i4"), "i4"), "i4").tolist() == [1, 2]


def test_arrays_that_are_views_are_stored_as_they_look():
    ids = np.arange(10, dtype=np.int32)
    assert unpack(pack_array(ids[::3], "i4"), "i4").tolist() == [0, 3, 6, 9]


def test_repetitive_ids_take_little_room():
    assert len(pack_array(np.zeros(10_000, np.int32), "i4")) < 400


def test_a_call_is_stored_without_what_its_parent_has():
    parent = make_chat(prompt=(1, 2, 3), completion=(4, 5))
    child = make_chat(index=1, parent=parent, prompt=(6,), completion=(7,), messages=(text_message("user", "more"),))
    row = chat_row(child)
    assert unpack(row["prompt_tail"], "i4").tolist() == [6]
    assert row["messages"] == '[{"role":"user","content":[{"type":"text","text":"more"}]}]'
    assert (row["shared"], row["shared_messages"], row["parent"]) == (5, 2, 0)


def test_a_call_can_not_be_put_together_without_its_parent():
    parent = make_chat()
    row = Row(chat_row(make_chat(index=1, parent=parent)))
    assert chat_of(row, {0: parent}).parent is parent
    with pytest.raises(KeyError):
        chat_of(row, {})


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1])
def test_seeds_of_64_bits_survive(seed):
    from dataclasses import replace

    chat = make_chat()
    chat = replace(chat, sampling=replace(chat.sampling, seed=seed))
    assert chat_of(Row(chat_row(chat)), {}).sampling.seed == seed


def test_messages_of_any_shape_survive():
    messages = (
        ChatMessage.model_validate({"role": "user", "content": None, "name": 'a"b'}),
        ChatMessage.model_validate({"role": "tool", "content": [{"type": "image", "digest": "d"}]}),
        ChatMessage.model_validate({"role": "system", "content": "\0 \\ é 漢 \u2028"}),
    )
    assert chat_of(Row(chat_row(make_chat(messages=messages))), {}).messages == messages


def test_json_is_compact_and_keeps_its_letters():
    assert to_json({"a": [1, 2.5, None], "é": "漢"}) == '{"a":[1,2.5,null],"é":"漢"}'
