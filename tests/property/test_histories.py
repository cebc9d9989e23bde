"""Who goes on from whom: conversations that agents edit in every way, against an oracle that compares all with all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import make_chat

from palestra.session.history import EXACT, CallHistory, Match, Sameness, message_key
from palestra.types.calls import Chat, ForkReason, SamplingParams
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall, text_message

texts = st.sampled_from(["", "x", "y", " x\n", "<think>a</think>x", "<think>b</think>\nx"])
thoughts = st.sampled_from([None, "", "a", "b"])
arguments = st.sampled_from(['{"j": [2], "i": 1}', '{"i": 2}', "{}", '{"i": ', "[1]", '"\\u00e9"'])
tool_calls = st.builds(
    lambda name, text, id_: ToolCall(id=id_, function=FunctionCall(name=name, arguments=text)),
    st.sampled_from(["f", "g"]),
    arguments,
    st.sampled_from(["1", "2"]),
)
asked = st.builds(text_message, st.sampled_from(["user", "system"]), texts) | st.builds(
    lambda text: ChatMessage(role="tool", content=text_message("tool", text).content, tool_call_id="1"), texts
)
replies = st.builds(
    lambda text, thought, calls: text_message("assistant", text).model_copy(
        update={"reasoning_content": thought, "tool_calls": tuple(calls)}
    ),
    texts,
    thoughts,
    st.lists(tool_calls, max_size=2),
)
Messages = tuple[ChatMessage, ...]


def said(message: ChatMessage) -> tuple:
    """What a message tells the model, found out in another way than the history does."""

    def called(call: ToolCall) -> tuple[str, str]:
        try:
            return call.function.name, json.dumps(json.loads(call.function.arguments), sort_keys=True)
        except ValueError:
            return call.function.name, call.function.arguments

    calls = [called(call) for call in message.tool_calls]
    return message.role, message.text, message.reasoning_content or "", message.tool_call_id, message.name, calls


def alike(some: Sequence[ChatMessage], others: Sequence[ChatMessage]) -> int:
    """How many leading messages say the same."""
    count = 0
    while count < min(len(some), len(others)) and said(some[count]) == said(others[count]):
        count += 1
    return count


def respaced(message: ChatMessage) -> ChatMessage:
    """Ids and spacing of its tool calls as another JSON library would write them."""
    calls = []
    for call in message.tool_calls:
        try:
            text = json.dumps(json.loads(call.function.arguments), indent=1, sort_keys=True)
        except ValueError:
            text = call.function.arguments
        calls.append(ToolCall(id=f"new-{call.id}", function=FunctionCall(name=call.function.name, arguments=text)))
    return message.model_copy(update={"tool_calls": tuple(calls), "reasoning_content": message.reasoning_content or ""})


def with_first_call(message: ChatMessage, text: str) -> ChatMessage:
    first, *others = message.tool_calls
    changed = first.model_copy(update={"function": first.function.model_copy(update={"arguments": text})})
    return message.model_copy(update={"tool_calls": (changed, *others)})


@st.composite
def rewritten(draw, messages: Messages) -> Messages:
    """What agents do with a history before they send it."""
    place = draw(st.integers(0, len(messages) - 1)) if messages else 0
    before, after = messages[:place], messages[place + 1 :]
    found = messages[place : place + 1]
    kind = draw(
        st.sampled_from(["edit", "drop", "insert", "summarise", "rewind", "thought", "respace", "arguments", "none"])
    )
    if kind == "edit":
        return (*before, draw(asked | replies), *after)
    if kind == "drop":
        return (*before, *after)
    if kind == "insert":
        return (*before, draw(asked | replies), *found, *after)
    if kind == "summarise":
        return (text_message("user", "all before: …"), *after)
    if kind == "rewind":
        return before
    if kind == "thought":
        return tuple(m.model_copy(update={"reasoning_content": None}) for m in messages)
    if kind == "respace":
        return tuple(map(respaced, messages))
    if kind == "arguments" and found and found[0].tool_calls:
        return (*before, with_first_call(found[0], draw(arguments)), *after)
    return messages


@dataclass(frozen=True)
class Conversation:
    chats: list[Chat]
    asked: Messages  # what comes next
    policy: str


def whole(chat: Chat) -> Messages:
    return (*chat.messages, chat.reply)


@st.composite
def conversations(draw) -> Conversation:
    chats: list[Chat] = []
    for index in range(draw(st.integers(1, 8)) + 1):
        source = draw(st.sampled_from([None, *chats, *chats[-2:]])) if chats else None
        messages: Messages = ()
        if source is not None:
            messages = draw(st.just(whole(source)) | st.just(source.messages) | rewritten(whole(source)))
        messages = (*messages, *draw(st.lists(asked, min_size=0 if messages else 1, max_size=2)))
        policy = draw(st.sampled_from(["p", "p", "p", "q"]))
        parent = draw(st.none() | st.sampled_from(chats)) if chats else None
        common = 0 if parent is None else alike(messages, whole(parent))
        shared_messages = draw(st.integers(0, common))
        chat = make_chat(
            index=index,
            messages=messages[shared_messages:],
            policy=policy,
            reply="",
            parent=parent,
            sampling=SamplingParams(temperature=1.0, max_tokens=9, seed=draw(st.integers(0, 99)) * 10 + index),
        )
        reply = draw(replies) if source is None else draw(st.just(source.reply) | replies)
        chats.append(replace(chat, shared_messages=shared_messages, reply=reply))
    return Conversation(chats[:-1], chats[-1].messages, chats[-1].policy)


def history_of(chats: Sequence[Chat], policy: str = "policy", sameness: Sameness = EXACT) -> CallHistory:
    history = CallHistory(sameness)
    for chat in chats:
        if chat.policy == policy:
            history.add(chat)
    return history


@given(st.lists(asked | replies, min_size=2, max_size=2), st.booleans())
def test_two_messages_are_the_same_where_they_tell_the_model_the_same(pair, equal):
    one, other = pair
    other = respaced(one) if equal else other
    assert (message_key(one) == message_key(other)) == (said(one) == said(other))


@given(conversations())
@examples(20, 200)
def test_the_longest_call_whose_messages_and_reply_a_conversation_begins_with_is_found(drawn):
    match = history_of(drawn.chats, drawn.policy).match(drawn.asked)
    mine = [chat for chat in drawn.chats if chat.policy == drawn.policy]
    goes_on = [c for c in mine if len(whole(c)) < len(drawn.asked) and alike(drawn.asked, whole(c)) == len(whole(c))]
    longest = max((len(whole(c)) for c in goes_on), default=0)
    wanted = min((c for c in goes_on if len(whole(c)) == longest), key=lambda c: c.sampling.seed, default=None)
    assert (match.call, match.messages) == (wanted, longest)
    assert match.known == max((alike(drawn.asked, whole(c)) for c in mine), default=0)


@given(conversations())
@examples(20, 200)
def test_where_a_conversation_left_what_was_said_there_is_a_call_that_it_left_and_a_reason(drawn):
    match = history_of(drawn.chats, drawn.policy).match(drawn.asked)
    mine = [chat for chat in drawn.chats if chat.policy == drawn.policy]
    there = [c for c in mine if alike(drawn.asked, whole(c)) == match.known]
    others = [c for c in there if len(whole(c)) > match.known]  # that went on from there in another way
    rest = drawn.asked[match.known :]
    known_replies = [said(chat.reply) for chat in mine]  # what another policy said is text, as an agent's own words are
    keeps_reply = any(m.role == "assistant" and said(m) in known_replies for m in rest)
    if not rest or not others or (match.messages == match.known > 0 and not keeps_reply):
        assert (match.left, match.reason) == (None, None)
        return
    assert match.reason is not None
    nexts = [whole(c)[match.known] for c in others]
    if match.left is not None:
        assert match.left in others
    if keeps_reply:
        assert match.reason.is_drift
    if match.reason is ForkReason.WHITESPACE_STRIPPED:
        assert rest[0].role == "assistant"
        assert any("".join(rest[0].text.split()) == "".join(n.text.split()) for n in nexts)
    elif match.reason is ForkReason.REASONING_STRIPPED:
        assert rest[0].role == "assistant"
        assert any(said(rest[0])[-1] == said(n)[-1] and rest[0].text[-1:] == n.text[-1:] for n in nexts)
    elif match.reason is ForkReason.TOOL_ARGUMENTS:
        names = [call.function.name for call in rest[0].tool_calls]
        assert any(names == [call.function.name for call in n.tool_calls] and names for n in nexts)
    elif match.reason is ForkReason.NEW_CONVERSATION:
        assert not keeps_reply
        assert rest[0].role != "assistant" or all(n.role != "assistant" for n in nexts)
        assert (match.left is None) == (match.known == 0)
    else:
        assert match.reason is ForkReason.EDITED_MESSAGE
        assert keeps_reply or rest[0].role == "assistant"


@given(conversations(), st.sampled_from(["same", "respaced"]))
def test_a_conversation_that_only_writes_its_tool_calls_in_another_way_goes_on(drawn, how):
    for chat in drawn.chats:
        before = whole(chat) if how == "same" else tuple(map(respaced, whole(chat)))
        match = history_of(drawn.chats, chat.policy).match((*before, text_message("user", "next, please")))
        assert match.call is not None
        assert (match.messages, match.known) == (len(before), len(before))
        assert list(map(said, whole(match.call))) == list(map(said, whole(chat)))
        assert match.reason is None


@given(conversations())
def test_a_conversation_sent_again_repeats_one_and_leaves_none(drawn):
    for chat in drawn.chats:
        match = history_of(drawn.chats, chat.policy).match(chat.messages)
        assert (match.known, match.reason, match.left) == (len(chat.messages), None, None)


@given(conversations())
def test_what_is_known_of_the_parents_changes_no_match(drawn):
    bare = [replace(c, parent=None, shared=0, shared_messages=0, new_messages=c.messages) for c in drawn.chats]
    found: list[Match] = [history_of(chats, drawn.policy).match(drawn.asked) for chats in (drawn.chats, bare)]
    indices = [(m.call and m.call.index, m.messages, m.known, m.left and m.left.index, m.reason) for m in found]
    assert indices[0] == indices[1]


@given(conversations(), st.lists(asked | replies, min_size=1, max_size=2))
def test_the_very_same_messages_match_as_their_copies_do(drawn, following):
    """An agent of this process sends the objects that it was given, and they are not compared again."""
    for chat in drawn.chats:
        history = history_of(drawn.chats, chat.policy)
        same = (*whole(chat), *following)
        copies = tuple(message.model_copy() for message in same)
        assert all(one is not other for one, other in zip(same, copies, strict=True))
        assert history.match(same) == history.match(copies)


@given(conversations(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_change_which_call_a_conversation_goes_on_from(drawn, random):
    bare = [replace(c, parent=None, shared=0, shared_messages=0, new_messages=c.messages) for c in drawn.chats]
    match = history_of(bare, drawn.policy).match(drawn.asked)
    random.shuffle(bare)
    other = history_of(bare, drawn.policy).match(drawn.asked)
    assert (match.call, match.messages, match.known) == (other.call, other.messages, other.known)
    assert (match.left is None, match.reason is None) == (other.left is None, other.reason is None)


spaces = st.text(" \n\t\r\u00a0\u3000", max_size=3)


@st.composite
def respaced_replies(draw, messages: Messages) -> Messages:
    """What an agent sends back that strips replies, or puts white space around them."""
    out = []
    for message in messages:
        if message.role == "assistant":
            how = draw(st.sampled_from([str.strip, str.lstrip, str.rstrip, str]))
            thought = message.reasoning_content and draw(spaces) + how(message.reasoning_content) + draw(spaces)
            text = draw(spaces) + how(message.text) + draw(spaces)
            message = text_message("assistant", text).model_copy(
                update={"reasoning_content": thought, "tool_calls": message.tool_calls}
            )
        out.append(message)
    return tuple(out)


@given(st.lists(replies, min_size=1, max_size=4), st.data())
def test_an_agent_that_only_changes_white_space_around_replies_gets_that_reason_and_no_other(said_by_model, data):
    chats: list[Chat] = []
    for index, reply in enumerate(said_by_model):
        messages = (*(whole(chats[-1]) if chats else ()), text_message("user", f"question {index}"))
        chats.append(replace(make_chat(index=index, messages=messages, reply=""), reply=reply))
    sent = data.draw(respaced_replies(whole(chats[-1])))
    following = (*sent, text_message("user", "next, please"))
    match = history_of(chats).match(following)
    changed = [n for n, (a, b) in enumerate(zip(sent, whole(chats[-1]), strict=True)) if said(a) != said(b)]
    if changed:
        assert (match.reason, match.known) == (ForkReason.WHITESPACE_STRIPPED, changed[0])
    else:
        assert match.reason is None
    for sameness in (Sameness(whitespace=True), Sameness(whitespace=True, reasoning=True)):
        kept = history_of(chats, sameness=sameness).match(following)
        assert (kept.call, kept.messages, kept.reason) == (chats[-1], len(sent), None)
