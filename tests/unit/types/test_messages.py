from __future__ import annotations

import pytest
from pydantic import ValidationError

from palestra.types.messages import ChatMessage, ImagePart, TextPart, text_message


def parse(**data) -> ChatMessage:
    return ChatMessage.model_validate({"role": "user", **data})


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ()),
        ("", (TextPart(text=""),)),
        ("hi", (TextPart(text="hi"),)),
        ([], ()),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], (TextPart(text="a"), TextPart(text="b"))),
        ([{"type": "image", "digest": "d"}], (ImagePart(digest="d"),)),
    ],
)
def test_content_is_always_a_list_of_parts(content, parts):
    assert parse(content=content).content == parts


def test_a_message_without_content_has_no_parts():
    assert parse().content == ()


def test_the_text_is_all_text_parts_joined():
    message = parse(
        content=[{"type": "text", "text": "a"}, {"type": "image", "digest": "x"}, {"type": "text", "text": "b"}]
    )
    assert message.text == "ab"
    assert parse(content=None).text == ""


@pytest.mark.parametrize(
    "content",
    [3, [3], [{"type": "audio"}], [{"type": "text"}], [{"type": "text", "text": "a", "more": 1}], {"type": "text"}],
)
def test_other_content_is_refused(content):
    with pytest.raises(ValidationError):
        parse(content=content)


def test_an_unknown_role_is_refused():
    with pytest.raises(ValidationError):
        parse(role="critic", content="x")


def test_keys_that_say_nothing_to_the_model_are_dropped():
    noisy = parse(content="hi", refusal=None, annotations=[], audio=None)
    assert noisy == text_message("user", "hi")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80\ud83d"])
def test_lone_surrogates_which_no_tokenizer_takes_become_question_marks(text):
    message = text_message("user", text)
    assert message.text == "".join("?" if "\ud800" <= c <= "\udfff" else c for c in text)
