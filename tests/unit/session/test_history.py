"""What goes on from what, one example each; tests/property/test_histories.py has them all against an oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palestra.renderers.probes import NAMES
from palestra.session.history import CallHistory, Sameness, message_key
from palestra.types.calls import ForkReason, SamplingParams
from palestra.types.messages import ChatMessage, FunctionCall, ImagePart, TextPart, ToolCall, text_message
from unit.building import make_chat


def turns(*texts: str) -> tuple[ChatMessage, ...]:
    """User and assistant take turns; the first is the user."""
    return tuple(text_message(("user", "assistant")[n % 2], text) for n, text in enumerate(texts))


def a_call(index: int, *texts: str, seed: int = 7, policy: str = "policy", **changes):
    """The last text is the reply."""
    sampling = SamplingParams(temperature=1.0, max_tokens=9, seed=seed)
    return make_chat(
        index=index, messages=turns(*texts[:-1]), reply=texts[-1], policy=policy, sampling=sampling, **changes
    )


def history_of(*chats, **settings) -> CallHistory:
    history = CallHistory(**settings)
    for chat in chats:
        history.add(chat)
    return history


def matched(history: CallHistory, *texts: str) -> tuple:
    match = history.match(turns(*texts))
    left = None if match.left is None else match.left.index
    return None if match.call is None else match.call.index, match.messages, match.known, left, match.reason


# What is gone on from


def test_an_episode_without_calls_has_nothing_to_go_on_from():
    assert matched(CallHistory(), "a") == (None, 0, 0, None, None)


def test_the_longest_call_is_gone_on_from():
    history = history_of(a_call(0, "a", "r"), a_call(1, "a", "r", "b", "s"))
    assert matched(history, "a", "r", "b", "s", "c") == (1, 4, 4, None, None)
    assert matched(history, "a", "r", "c") == (0, 2, 2, None, None)


def test_a_call_is_not_gone_on_from_where_nothing_follows_its_reply():
    """The messages end with the reply itself, so another reply to what was asked before would be a lie."""
    assert matched(history_of(a_call(0, "a", "r")), "a", "r") == (None, 0, 2, None, None)


def test_of_equal_replies_the_one_with_the_lowest_seed_is_gone_on_from():
    for seeds in ((3, 1, 2), (1, 2, 3), (2, 3, 1)):
        calls = [a_call(n, "a", "r", seed=seed) for n, seed in enumerate(seeds)]
        assert matched(history_of(*calls), "a", "r", "b")[0] == seeds.index(1)


def test_what_a_call_shares_with_its_parent_is_found_through_it():
    first = a_call(0, "a", "r")
    second = make_chat(index=1, parent=first, messages=turns("b"), reply="s")
    part = make_chat(index=2, parent=second, messages=turns("c"), reply="t", shared_messages=2)
    history = history_of(first, second, part)
    assert matched(history, "a", "r", "b", "s", "d")[:2] == (1, 4)
    assert matched(history, "a", "r", "c", "t", "d")[:2] == (2, 4)


def test_a_parent_of_another_policy_gives_messages_and_no_place():
    first = a_call(0, "a", "r", policy="other")
    second = make_chat(index=1, parent=first, messages=turns("b"), reply="s")
    assert matched(history_of(second), "a", "r", "b", "s", "c")[:3] == (1, 4, 4)


# Why not


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (("A", "r", "b"), (None, 0, 0, 0, ForkReason.EDITED_MESSAGE)),  # the first message
        (("a", "R", "b"), (None, 0, 1, 1, ForkReason.EDITED_MESSAGE)),  # a reply
        (("a", "r", "B", "s", "c"), (0, 2, 2, 1, ForkReason.EDITED_MESSAGE)),  # a later message
        (("b", "s", "c"), (None, 0, 0, 1, ForkReason.EDITED_MESSAGE)),  # the first turn is left out
        (("so far: …", "s", "c"), (None, 0, 0, 1, ForkReason.EDITED_MESSAGE)),  # and summarised
        (("a", "r", "b", "s", "b", "s", "c"), (1, 4, 4, None, None)),  # goes on, with a reply that it had before
        (("so far: …",), (None, 0, 0, None, ForkReason.NEW_CONVERSATION)),  # replaced as a whole
        (("x", "y", "z"), (None, 0, 0, None, ForkReason.NEW_CONVERSATION)),  # a subagent with an example
        (("a",), (None, 0, 1, None, None)),  # once more
        (("a", "r", "b"), (0, 2, 3, None, None)),
        (("a", "r", "B"), (0, 2, 2, None, None)),
    ],
)
def test_what_became_of_a_conversation_of_two_turns(texts, wanted):
    assert matched(history_of(a_call(0, "a", "r"), a_call(1, "a", "r", "b", "s")), *texts) == wanted


def test_of_several_conversations_it_is_the_one_whose_reply_was_kept():
    history = history_of(*(a_call(n, text, f"re {text}") for n, text in enumerate("abc")))
    for n, text in enumerate("abc"):
        assert matched(history, "edited", f"re {text}", "d") == (None, 0, 0, n, ForkReason.EDITED_MESSAGE)


def replying(message: ChatMessage, **settings):
    """A history of one call with this reply."""
    chat = make_chat(messages=turns("a"), reply="")
    return history_of(type(chat)(**{f: getattr(chat, f) for f in chat.__slots__} | {"reply": message}), **settings)


def thinking(text: str, thought: str | None) -> ChatMessage:
    return text_message("assistant", text).model_copy(update={"reasoning_content": thought})


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (thinking("x", "hm"), thinking("x", None)),
        (text_message("assistant", "<think>hm</think>\n\nx"), text_message("assistant", "x")),
        (text_message("assistant", "<think>hm</think>x"), text_message("assistant", " x ")),
    ],
)
def test_a_reply_without_its_reasoning(before, now):
    messages = (*turns("a"), now, *turns("b"))
    match = replying(before).match(messages)
    assert (match.call, match.known, match.reason) == (None, 1, ForkReason.REASONING_STRIPPED)


OTHER_REASONING = [
    (thinking("x", "hm"), thinking("x", "something else")),
    (thinking("x", None), thinking("x", "SECRET")),
    (thinking("x", None), text_message("assistant", "<think>HIDDEN</think>x")),
    (thinking("x", "hm"), text_message("assistant", "<think>hm</think>x")),
    (text_message("assistant", "<think>hm</think>x"), thinking("x", "hm")),
    (text_message("assistant", "<think>hm</think>x"), text_message("assistant", "<think>oh</think>x")),
    (text_message("assistant", "<think>a</think>x<think>b</think>y"), text_message("assistant", "x<think>b</think>y")),
]


@pytest.mark.parametrize("sameness", [Sameness(), Sameness(reasoning=True), Sameness(reasoning=True, whitespace=True)])
@pytest.mark.parametrize(("before", "now"), OTHER_REASONING)
def test_reasoning_that_was_changed_added_or_moved_is_an_edit(before, now, sameness):
    match = replying(before, sameness=sameness).match((*turns("a"), now, *turns("b")))
    assert (match.call, match.known, match.reason) == (None, 1, ForkReason.EDITED_MESSAGE)


def test_a_reply_without_its_reasoning_stands_for_each_that_has_its_text():
    """Each call goes on with the reasoning that its own history has."""
    chats = []
    for index, (thought, seed) in enumerate((("one", 5), ("two", 3))):
        chat = make_chat(
            index=index,
            messages=turns("a"),
            reply="",
            sampling=SamplingParams(temperature=1.0, max_tokens=9, seed=seed),
        )
        chats.append(replace(chat, reply=thinking("x", thought)))
    later = make_chat(index=2, parent=chats[0], messages=turns("b"), reply="y", shared_messages=2)
    for order in (chats, chats[::-1]):
        history = history_of(*order, later, sameness=Sameness(reasoning=True))
        assert matched(history, "a", "x", "b", "y", "c") == (2, 4, 4, None, None)
        assert matched(history, "a", "x", "c")[:3] == (1, 2, 2)  # the lowest seed, whichever came first
        for chat in chats:
            match = history.match((*turns("a"), chat.reply, *turns("c")))
            assert (match.call, match.reason) == (chat, None)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (thinking(" x\n", None), thinking("x", None)),
        (thinking("x", None), thinking("x\n\n", None)),
        (thinking(" x", "\nhm \n"), thinking("x", "hm")),
        (thinking("x", "hm"), thinking("x", " hm\n")),
        (thinking(" \n", None), thinking("", None)),
        (text_message("assistant", "<think>\nhm\n</think>\n\nx"), text_message("assistant", "<think>hm</think>x")),
    ],
)
def test_a_reply_with_other_white_space_around_it(before, now):
    messages = (*turns("a"), now, *turns("b"))
    match = replying(before).match(messages)
    assert (match.call, match.known, match.reason) == (None, 1, ForkReason.WHITESPACE_STRIPPED)
    kept = replying(before, sameness=Sameness(whitespace=True)).match(messages)
    assert (kept.messages, kept.reason) == (2, None)
    other = replying(before, sameness=Sameness(reasoning=True)).match(messages)
    assert other.reason in (None, ForkReason.WHITESPACE_STRIPPED)


def test_white_space_within_a_reply_or_of_another_message_counts():
    within = (*turns("a"), text_message("assistant", "x  y"), *turns("b"))
    history = replying(text_message("assistant", "x y"), sameness=Sameness(whitespace=True))
    assert history.match(within).reason is ForkReason.EDITED_MESSAGE
    assert matched(history, "a ", "x y", "b")[-1] is ForkReason.EDITED_MESSAGE


def test_where_only_white_space_may_differ_dropped_reasoning_is_still_told():
    history = replying(thinking("x ", "hm"), sameness=Sameness(whitespace=True))
    match = history.match((*turns("a"), thinking("x", None), *turns("b")))
    assert match.reason is ForkReason.REASONING_STRIPPED


def test_where_only_reasoning_may_differ_it_is_the_white_space_that_forks():
    history = replying(thinking("x ", "hm"), sameness=Sameness(reasoning=True))
    match = history.match((*turns("a"), thinking("x", None), *turns("b")))
    assert match.reason is ForkReason.WHITESPACE_STRIPPED


def test_where_reasoning_does_not_count_a_reply_without_it_is_the_same():
    chat = make_chat(messages=turns("a"), reply="x")
    thought = type(chat)(**{f: getattr(chat, f) for f in chat.__slots__} | {"reply": thinking("x", "hm")})
    history = history_of(thought, sameness=Sameness(reasoning=True))
    assert matched(history, "a", "x", "b") == (0, 2, 2, None, None)


def calling(*calls: tuple[str, str], text: str = "", ids: str = "1") -> ChatMessage:
    return text_message("assistant", text).model_copy(
        update={
            "tool_calls": tuple(
                ToolCall(id=f"{ids}{n}", function=FunctionCall(name=name, arguments=arguments))
                for n, (name, arguments) in enumerate(calls)
            )
        }
    )


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (calling(("f", '{"i":1, "j":  [1]}'), ("g", "{}"), ids="9"), None),
        (calling(("f", '{"j": [1], "i": 1}'), ("g", " { }")), None),
        (calling(("f", '{"i": 2, "j": [1]}'), ("g", "{}")), ForkReason.TOOL_ARGUMENTS),
        (calling(("f", '{"i": 1, "j": [1]}'), ("g", "")), ForkReason.TOOL_ARGUMENTS),
        (calling(("f", '{"i": 1, "j": [1]}')), ForkReason.EDITED_MESSAGE),
        (calling(("g", "{}"), ("f", '{"i": 1, "j": [1]}')), ForkReason.EDITED_MESSAGE),
        (calling(("f", '{"i": 1, "j": [1]}'), ("g", "{}"), text="so"), ForkReason.EDITED_MESSAGE),
        (calling(("f", '{"i": 1, "j": [1]}'), ("g", "{}")).model_copy(update={"name": "n"}), ForkReason.EDITED_MESSAGE),
        (
            calling(("f", '{"i": 1, "j": [1]}'), ("g", "{}")).model_copy(update={"reasoning_content": "r"}),
            ForkReason.EDITED_MESSAGE,
        ),
    ],
)
def test_a_reply_with_tool_calls(now, reason):
    history = replying(calling(("f", '{"i": 1, "j": [1]}'), ("g", "{}")))
    match = history.match((*turns("a"), now, *turns("b")))
    assert match.reason is reason
    assert (match.call is None) == (reason is not None)


@pytest.mark.parametrize(("unseen", "reason"), [(NAMES, None), (frozenset(), ForkReason.EDITED_MESSAGE)])
def test_what_the_template_does_not_show_makes_no_other_message(unseen, reason):
    call = calling(("f", "{}"))
    history = replying(call, unseen=unseen)
    named = call.model_copy(update={"name": "UnnamedAgent"})
    match = history.match((*turns("a"), named, *turns("b")))
    assert (match.reason, match.messages) == (reason, 0 if reason else 2)


# Messages


def test_content_in_parts_is_the_same_text():
    parts = ChatMessage(role="user", content=(TextPart(text="a"), TextPart(text="b")))
    assert message_key(parts) == message_key(text_message("user", "ab"))
    assert message_key(ChatMessage(role="user")) == message_key(text_message("user", ""))


def test_media_and_their_places_count():
    def message(*parts):
        return message_key(ChatMessage(role="user", content=parts))

    text, image = TextPart(text="a"), ImagePart(digest="d1")
    keys = {message(text), message(text, image), message(image, text), message(text, ImagePart(digest="d2"))}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "changes", [{"role": "system"}, {"name": "n"}, {"tool_call_id": "1"}, {"reasoning_content": "r"}]
)
def test_role_name_reasoning_and_the_call_that_is_answered_count(changes):
    message = text_message("user", "a")
    assert message_key(message) != message_key(message.model_copy(update=changes))


def test_a_numbers_kind_counts_and_what_is_no_json_counts_as_text():
    assert message_key(calling(("f", "1"))) != message_key(calling(("f", "true")))
    assert message_key(calling(("f", "{"))) != message_key(calling(("f", "{ ")))
    assert message_key(calling(("f", "{"))) == message_key(calling(("f", "{")))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (("look", "d1"), None),
        (("look", "d2"), ForkReason.PICTURE_CHANGED),
        (("look",), ForkReason.PICTURE_CHANGED),
        (("d1", "look"), ForkReason.PICTURE_CHANGED),
        (("look", "d1", "d1"), ForkReason.PICTURE_CHANGED),
        (("Look", "d1"), ForkReason.EDITED_MESSAGE),
        (("Look", "d2"), ForkReason.EDITED_MESSAGE),
    ],
)
def test_a_message_that_came_back_with_other_pictures_alone_has_a_reason_of_its_own(content, reason):
    def user(*parts: str) -> ChatMessage:
        made = (ImagePart(digest=part) if part.startswith("d") else TextPart(text=part) for part in parts)
        return ChatMessage(role="user", content=tuple(made))

    reply = text_message("assistant", "r")
    history = history_of(make_chat(index=0, messages=(user("look", "d1"),), reply="r"))
    match = history.match((user(*content), reply, user("on")))
    assert (match.reason, match.known) == (reason, 2 if reason is None else 0)
    alone = history.match((user(*content),))
    assert alone.reason is (None if reason is None else ForkReason.NEW_CONVERSATION)
