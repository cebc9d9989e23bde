from __future__ import annotations

import json

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from palestra.types.messages import ChatMessage, FunctionCall, ImagePart, TextPart, ToolCall, text_message

CALL = ToolCall(id="c", function=FunctionCall(name="f", arguments="{}"))


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: ChatMessage(role="critic"),
        lambda: ChatMessage(role="user", content=3),
        lambda: ChatMessage(role=["user"]),
        lambda: ChatMessage(role="user", content=[3]),
        lambda: ChatMessage(role="user", content=("hi",)),
        lambda: ChatMessage(role="assistant", tool_calls=({"id": "c"},)),
        lambda: ChatMessage(role="user", name=3),
        lambda: TextPart(text=3),
        lambda: ImagePart(digest=3),
        lambda: FunctionCall(name="f", arguments={}),
        lambda: FunctionCall(name=None, arguments="{}"),
        lambda: ToolCall(id=None, function=CALL.function),
        lambda: ToolCall(id="c", function={}),
    ],
)
def test_what_no_template_can_show_is_refused_where_code_makes_it(make):
    with pytest.raises(ValidationError) as refused:
        make()
    assert refused.value.title in ("ChatMessage", "TextPart", "ImagePart", "FunctionCall", "ToolCall")


@pytest.mark.parametrize(
    "content", ["hi", [{"type": "text", "text": "hi"}], ({"type": "text", "text": "hi"},), [TextPart(text="hi")]]
)
def test_code_gives_content_in_the_forms_that_requests_have(content):
    assert ChatMessage(role="user", content=content) == text_message("user", "hi")
    assert ChatMessage(role="user", content=None, tool_calls=None) == ChatMessage(role="user")


def test_code_gives_calls_of_tools_in_the_forms_that_requests_have():
    function = {"name": "f", "arguments": "{}"}
    assert ToolCall(id="c", function=function) == CALL
    for calls in (({"id": "c", "function": function},), [CALL], (CALL,)):
        assert ChatMessage(role="assistant", tool_calls=calls) == ChatMessage(role="assistant", tool_calls=(CALL,))


def test_types_derived_from_a_part_and_a_call_stay_what_they_are():
    class Marked(TextPart, frozen=True, kw_only=True):
        mark: int

    class Counted(ToolCall, frozen=True, kw_only=True):
        count: int

    part, call = Marked(text="hi", mark=3), Counted(function=CALL.function, count=2)
    message = ChatMessage(role="assistant", content=[part], tool_calls=[call])
    assert message.content == (part,)
    assert message.tool_calls == (call,)


def test_a_message_is_written_without_fields_that_say_nothing():
    assert msgspec.json.encode(ChatMessage(role="assistant", tool_calls=(CALL,))) == (
        b'{"role":"assistant","content":[],"tool_calls":'
        b'[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}'
    )
    assert msgspec.json.encode(text_message("user", "h\u00e9\n")) == (
        '{"role":"user","content":[{"type":"text","text":"h\u00e9\\n"}]}'.encode()
    )


def test_messages_are_fields_of_pydantics_models():
    class Both(BaseModel):
        messages: tuple[ChatMessage, ...]
        call: ToolCall | None = None

    both = Both(messages=({"role": "user", "content": "hi"}, text_message("assistant", "ho")), call=CALL)
    assert both.messages == (text_message("user", "hi"), text_message("assistant", "ho"))
    assert Both.model_validate_json(both.model_dump_json()) == both == Both.model_validate(both.model_dump())
    shown = json.loads(both.model_dump_json(exclude_none=True))
    assert shown["messages"][0] == {"role": "user", "content": [{"type": "text", "text": "hi"}], "tool_calls": []}


def test_dumps_leave_out_what_they_are_told_to():
    message = ChatMessage(role="assistant", content="hi", tool_calls=(CALL,))
    assert message.model_dump(exclude={"content", "role"}, exclude_defaults=True) == {
        "tool_calls": ({"id": "c", "function": {"name": "f", "arguments": "{}"}},)
    }
    assert message.model_dump(mode="json", exclude_none=True)["content"] == [{"type": "text", "text": "hi"}]
    assert json.loads(message.model_dump_json()) == message.model_dump(mode="json")
    assert message.model_copy(update={"name": "n"}) == ChatMessage.model_validate(message.model_dump() | {"name": "n"})
