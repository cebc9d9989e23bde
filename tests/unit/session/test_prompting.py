"""Prompts through a session: what is reused, what is lost and why, and what a strict job refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palestra.errors import EngineFailure, HistoryDrift
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.session import EpisodeSession, Sameness
from palestra.session.prompting import LONG_TEXT
from palestra.types.calls import MEANINGS, ForkReason
from palestra.types.messages import ChatMessage, FunctionCall, GenerationRequest, TextPart, ToolCall, text_message
from unit.building import one_policy
from unit.session.conftest import STOP, Bench, call

WEATHER = ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},)
TIME = ({"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},)


@pytest.fixture
def bench(tmp_path, clock):
    made = Bench(tmp_path, clock, sampling={"max_tokens": 200})
    yield made
    made.store.close()


class WithoutBridge(ChatMLRenderer):
    """A renderer that can only write all anew, as templates do; `write` says how it changes an earlier reply."""

    def __init__(self, write=lambda reply: reply) -> None:
        super().__init__(ByteTokenizer())
        self._write = write

    def render(self, messages, tools=(), room=None):
        written = [self._write(m) if m.role == "assistant" else m for m in messages]
        return super().render(written, tools, room)

    def extend(self, prompt_ids, completion_ids, new_messages, tools=(), room=None):
        return None


def says(*texts: str, stop: bool = True):
    """The replies in order; the last one for ever."""
    left = list(texts)

    def script(prompt, sampling):
        text = left.pop(0) if len(left) > 1 else left[0]
        return [*text.encode(), *([STOP] if stop else [])]

    return script


async def with_renderer(bench, renderer=None, strict: bool = False) -> EpisodeSession:
    runtime = bench.context.policies.runtime("policy")
    if renderer is not None:
        runtime = replace(runtime, renderer=renderer)
    session = await bench.session()
    bench.context = replace(bench.context, policies=one_policy(runtime), strict_history=strict)
    return EpisodeSession(bench.context, session.episode, ())


def asks(*messages: ChatMessage, **kw) -> GenerationRequest:
    return GenerationRequest(**({"policy": "policy", "messages": messages} | kw))


def user(text: str) -> ChatMessage:
    return text_message("user", text)


def about(chat) -> tuple:
    assert chat.fork is not None
    return chat.fork.reason, chat.fork.call, chat.fork.message


def first_difference(one, other) -> int:
    return next(n for n, (a, b) in enumerate(zip(one.ids.tolist(), other.ids.tolist(), strict=False)) if a != b)


# What a call goes on from


async def test_a_call_that_is_recorded_meanwhile_is_not_what_another_goes_on_from(bench, monkeypatch):
    bench.policy = bench.policy.model_copy(update={"max_context": 10 * LONG_TEXT})
    bench.context = bench.new_context()
    session, others = await bench.session(), []
    first = await session.generate_one(asks(user("a")))
    run = bench.context.pool.run

    async def slowly(work, *arguments):
        if not others:
            others.append(await session.generate_one(asks(user("b"))))
        return await run(work, *arguments)

    monkeypatch.setattr(bench.context.pool, "run", slowly)
    later = await session.generate_one(asks(*first.messages, first.reply, user("y" * LONG_TEXT)))
    assert len(others) == 1
    assert later.extends is first
    assert later.messages[0] == user("a")


async def test_the_longest_of_several_calls_that_a_conversation_begins_with_is_gone_on_from(bench):
    bench.script = says("r")
    session = await bench.session()
    await session.generate_one(call("a"))
    long = await session.generate_one(call("a", "r", "b"))
    await session.generate_one(call("a", "r", "other"))
    found = await session.generate_one(call("a", "r", "b", "r", "c"))
    assert (found.extends, found.shared, found.shared_messages, found.fork) == (long, long.tokens, 4, None)
    assert found.new_messages == (user("c"),)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("renderer", [None, WithoutBridge()], ids=["bridge", "template"])
async def test_a_name_that_the_template_does_not_show_keeps_the_exact_tokens(bench, renderer, strict):
    bench.script = says('<tool_call>\n{"name": "weather", "arguments": {"x": 1}}\n</tool_call>')
    session = await with_renderer(bench, renderer, strict)
    first = await session.generate_one(asks(user("a"), tools=WEATHER))
    assert first.reply.tool_calls
    named = first.reply.model_copy(update={"name": "UnnamedAgent"})
    result = text_message("tool", "sunny").model_copy(update={"tool_call_id": "renamed"})
    second = await session.generate_one(asks(user("a"), named, result, tools=WEATHER))
    assert (second.extends, second.shared, second.fork) == (first, first.tokens, None)
    result = result.model_copy(update={"tool_call_id": "renamed again", "name": "weather"})
    third = await session.generate_one(asks(user("a"), first.reply, result, second.reply, user("b"), tools=WEATHER))
    assert (third.extends, third.shared, third.fork) == (second, second.tokens, None)


async def test_reasoning_that_was_added_and_that_the_template_does_not_show_loses_nothing(bench):
    bench.script = says("r")
    session = await with_renderer(
        bench, WithoutBridge(lambda m: m.model_copy(update={"reasoning_content": None})), True
    )
    first = await session.generate_one(call("a"))
    thought = first.reply.model_copy(update={"reasoning_content": "SECRET"})
    second = await session.generate_one(asks(user("a"), thought, user("b")))
    assert (second.extends, second.shared, second.fork) == (first, first.tokens, None)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("added", [{"reasoning_content": "SECRET"}, {"content": (TextPart(text="<think>X</think>r"),)}])
async def test_reasoning_that_an_agent_adds_is_read_by_the_model_and_forks(bench, added, keep):
    bench.script = says("r")
    bench.context = replace(bench.context, sameness=Sameness(reasoning=keep))
    session = await with_renderer(bench)
    first = await session.generate_one(call("a"))
    second = await session.generate_one(asks(user("a"), first.reply.model_copy(update=added), user("b")))
    assert about(second) == (ForkReason.EDITED_MESSAGE, first.index, 1)
    read = ByteTokenizer().decode(second.ids[: len(second.prompt_ids)].tolist())
    assert "SECRET" in read or "<think>X</think>" in read


async def test_any_earlier_call_can_be_gone_on_from_again_and_nothing_is_lost(bench):
    bench.script = says("r")
    session = await bench.session()
    first = await session.generate_one(call("a"))
    await session.generate_one(call("a", "r", "b"))
    other = await session.generate_one(call("a", "r", "c"))
    assert (other.extends, other.fork) == (first, None)
    seen = {tuple(chat.ids[:n]) for chat in await bench.recorded(session) for n in range(1, chat.tokens + 1)}
    assert len(session._prompts.earlier("policy", "agent").trie()) == len(seen)


async def test_among_replies_of_equal_text_it_is_the_one_with_the_lowest_seed_whoever_came_first(bench):
    session = await bench.session()
    bench.script = lambda prompt, sampling: [0x80 + sampling.seed % 64, STOP]  # no UTF-8: all read the same
    chats = [await session.generate_one(call("a")) for _ in range(3)]
    assert len({chat.reply.text for chat in chats}) == 1
    assert len({int(chat.completion_ids[0]) for chat in chats}) > 1
    after = await session.generate_one(call("a", chats[0].reply.text, "b"))
    assert after.extends is min(chats, key=lambda chat: chat.sampling.seed)


async def test_a_call_sent_again_shares_its_whole_prompt(bench):
    session = await bench.session()
    one, other = await session.generate_one(call("a")), await session.generate_one(call("a"))
    assert (other.parent, other.shared, other.fork) == (one, one.prompt_tokens, None)
    assert (other.shared_messages, other.new_messages, len(other.prompt_tail)) == (1, (), 0)


async def test_a_rendered_prompt_shares_the_most_ids_with_any_call(bench):
    bench.script = says("r")
    session = await bench.session()
    await session.generate_one(call("unrelated"))
    second = await session.generate_one(call("the same begin"))
    third = await session.generate_one(call("the same end"))
    assert (third.parent, third.shared) == (second, first_difference(second, third))
    assert (third.shared_messages, third.extends) == (0, None)
    assert about(third) == (ForkReason.NEW_CONVERSATION, None, 0)


async def test_what_a_call_keeps_is_not_the_whole_prompt(bench):
    """A view of the prompt would keep all of it in memory: the square of a conversation's length."""
    bench.script = says("r")
    session = await bench.session()
    await session.generate_one(call("a"))
    chat = await session.generate_one(call("a", "r", "b"))
    assert chat.prompt_tail.base is None or len(chat.prompt_tail.base) == len(chat.prompt_tail)


# Why a call is not gone on from


def test_every_reason_has_a_meaning_and_all_but_a_new_conversation_are_drift():
    assert set(MEANINGS) == set(ForkReason)
    assert [reason for reason in ForkReason if not reason.is_drift] == [ForkReason.NEW_CONVERSATION]


async def test_an_earlier_message_was_edited(bench):
    bench.script = says("one", "two")
    session = await bench.session()
    first = await session.generate_one(call("a"))
    second = await session.generate_one(call("a", "one", "b"))
    edited = await session.generate_one(call("a", "one", "B", "two", "c"))
    assert about(edited) == (ForkReason.EDITED_MESSAGE, second.index, 2)
    assert edited.extends is first
    assert edited.fork.position == first_difference(edited, second)
    reply = await session.generate_one(call("a", "ONE", "b"))
    assert about(reply) == (ForkReason.EDITED_MESSAGE, edited.index, 1)  # the last call that had it


async def test_the_system_message_was_edited(bench):
    bench.script = says("one")
    session = await bench.session()
    first = await session.generate_one(asks(text_message("system", "s"), user("a")))
    edited = await session.generate_one(asks(text_message("system", "S"), user("a"), first.reply, user("b")))
    assert about(edited) == (ForkReason.EDITED_MESSAGE, first.index, 0)
    assert edited.extends is None


async def test_messages_were_left_out_or_summarised_and_a_later_reply_kept(bench):
    bench.script = says("one", "two", "three")
    session = await bench.session()
    await session.generate_one(call("a"))
    await session.generate_one(call("a", "one", "b"))
    third = await session.generate_one(call("a", "one", "b", "two", "c"))
    summary = await session.generate_one(call("all before: a, b", "two", "c", "three", "d"))
    assert about(summary) == (ForkReason.EDITED_MESSAGE, third.index, 0)
    left_out = await session.generate_one(call("a", "one", "c", "three", "d"))
    assert about(left_out) == (ForkReason.EDITED_MESSAGE, third.index, 2)


async def test_of_several_conversations_it_says_the_one_that_was_edited(bench):
    bench.script = says("one", "two", "three")
    session = await bench.session()
    await session.generate_one(call("a"))
    await session.generate_one(call("b"))
    await session.generate_one(call("c"))
    edited = await session.generate_one(call("B", "two", "go on"))
    assert about(edited) == (ForkReason.EDITED_MESSAGE, 1, 0)


async def test_a_history_that_was_replaced_as_a_whole_or_a_subagents_is_a_new_conversation(bench):
    bench.script = says("one", "two")
    session = await bench.session()
    system = text_message("system", "s")
    first = await session.generate_one(asks(system, user("a")))
    replaced = await session.generate_one(asks(system, user("all before: a and one"), user("c")))
    assert about(replaced) == (ForkReason.NEW_CONVERSATION, first.index, 1)
    assert replaced.fork.position == first_difference(replaced, first)
    subagent = await session.generate_one(call("look it up", agent="agent/search"))
    assert about(subagent) == (ForkReason.NEW_CONVERSATION, None, 0)
    assert subagent.fork.position == 0


async def test_the_first_call_and_one_that_repeats_leave_nothing(bench):
    session = await bench.session()
    assert [(await session.generate_one(call("a"))).fork for _ in range(2)] == [None, None]


async def test_the_agent_dropped_the_reasoning_of_a_reply(bench):
    bench.script = says("<think>\nhm\n</think>\n\nx")
    session = await bench.session()
    first = await session.generate_one(call("a"))
    assert (first.reply.reasoning_content, first.reply.text) == ("hm", "x")
    kept = await session.generate_one(asks(user("a"), first.reply, user("b")))
    assert (kept.extends, kept.fork) == (first, None)
    dropped = await session.generate_one(call("a", "x", "b"))
    assert about(dropped) == (ForkReason.REASONING_STRIPPED, kept.index, 1)
    assert dropped.fork.position == first_difference(dropped, first) == first.prompt_tokens


async def test_the_template_drops_the_reasoning_of_earlier_replies(bench):
    bench.script = says("<think>\nhm\n</think>\n\nx")
    renderer = WithoutBridge(lambda m: m.model_copy(update={"reasoning_content": None}))
    session = await with_renderer(bench, renderer)
    first = await session.generate_one(call("a"))
    second = await session.generate_one(asks(user("a"), first.reply, user("b")))
    assert about(second) == (ForkReason.REASONING_STRIPPED, first.index, 1)
    assert (second.parent, second.shared) == (first, first.prompt_tokens)
    assert second.fork.position == first.prompt_tokens


def tool_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def calling(arguments: str, **changes) -> ChatMessage:
    calls = (ToolCall(id="another", function=FunctionCall(name="weather", arguments=arguments)),)
    return ChatMessage(role="assistant", tool_calls=calls, **changes)


ANSWER = ChatMessage.model_validate({"role": "tool", "content": "rain", "tool_call_id": "another"})


async def test_a_tool_call_that_is_only_spaced_in_another_way_is_the_same(bench):
    bench.script = says(tool_call('{"city":"Rome",  "days": 2}'))
    session = await bench.session()
    first = await session.generate_one(asks(user("a"), tools=WEATHER))
    assert len(first.reply.tool_calls) == 1
    second = await session.generate_one(asks(user("a"), calling('{"days": 2, "city": "Rome"}'), ANSWER, tools=WEATHER))
    assert (second.extends, second.shared, second.fork) == (first, first.tokens, None)


async def test_a_tool_call_was_written_anew_with_other_arguments(bench):
    bench.script = says(tool_call('{"city": "Rome"}'))
    session = await bench.session()
    first = await session.generate_one(asks(user("a"), tools=WEATHER))
    other = await session.generate_one(asks(user("a"), calling('{"city": "Roma"}'), ANSWER, tools=WEATHER))
    assert about(other) == (ForkReason.TOOL_ARGUMENTS, first.index, 1)
    assert other.fork.position == first_difference(other, first)


async def test_the_template_writes_the_arguments_of_a_tool_call_anew(bench):
    def respaced(message):
        calls = tuple(
            call.model_copy(update={"function": FunctionCall(name=call.function.name, arguments='{"city": "Rome"}')})
            for call in message.tool_calls
        )
        return message.model_copy(update={"tool_calls": calls})

    bench.script = says("<think>\nhm\n</think>\n\n" + tool_call('{"city":"Rome"}'))
    session = await with_renderer(bench, WithoutBridge(respaced))
    first = await session.generate_one(asks(user("a"), tools=WEATHER))
    second = await session.generate_one(asks(user("a"), first.reply, ANSWER, tools=WEATHER))
    assert about(second) == (ForkReason.TOOL_ARGUMENTS, first.index, 1)  # and not the reasoning, which is the same
    assert second.shared == second.fork.position == first_difference(second, first) > first.prompt_tokens


@pytest.mark.parametrize("said", ["Well. ", "<think>\nhm\n</think>\n\nWell. "])
async def test_the_template_writes_the_text_beside_a_tool_call_anew_and_the_call_as_it_was(bench, said):
    bench.script = says(said + "\n" + tool_call('{"city":"Rome"}'))
    stripped = WithoutBridge(lambda m: m.model_copy(update={"content": (TextPart(text=m.text.strip()),)}))
    session = await with_renderer(bench, stripped)
    first = await session.generate_one(asks(user("a"), tools=WEATHER))
    assert len(first.reply.tool_calls) == 1
    second = await session.generate_one(asks(user("a"), first.reply, ANSWER, tools=WEATHER))
    assert about(second) == (ForkReason.TEMPLATE, first.index, 1)


async def test_the_same_text_has_other_ids(bench):
    bench.script = lambda prompt, sampling: [0xFF, ord("x"), STOP]  # no UTF-8, read as one character of three bytes
    session = await with_renderer(bench, WithoutBridge())
    first = await session.generate_one(call("a"))
    second = await session.generate_one(call("a", first.reply.text, "b"))
    assert about(second) == (ForkReason.TOKENIZATION, first.index, 1)
    assert second.fork.position == first.prompt_tokens


async def test_the_template_writes_a_reply_with_another_text(bench):
    bench.script = says("  spaces  ")
    session = await with_renderer(bench, WithoutBridge(lambda m: text_message("assistant", m.text.strip())))
    first = await session.generate_one(call("a"))
    second = await session.generate_one(call("a", first.reply.text, "b"))
    assert about(second) == (ForkReason.TEMPLATE, first.index, 1)


async def test_a_drift_of_an_earlier_turn_is_told_of_that_turn(bench):
    bench.script = says("  spaces  ", "x")
    session = await with_renderer(bench, WithoutBridge(lambda m: text_message("assistant", m.text.strip())))
    first = await session.generate_one(call("a"))
    second = await session.generate_one(call("a", first.reply.text, "b"))
    third = await session.generate_one(call("a", first.reply.text, "b", "x", "c"))
    assert second.fork.reason is ForkReason.TEMPLATE
    assert (third.extends, third.fork) == (second, None)  # rendered as it was before: its ids are the same


async def test_a_reply_was_cut_and_the_template_cannot_go_on_from_it(bench):
    bench.script = says("<think>hm, that is", stop=False)
    session = await with_renderer(bench, WithoutBridge())
    first = await session.generate_one(call("a"))
    assert first.finish_reason == "length"
    second = await session.generate_one(asks(user("a"), first.reply, user("b")))
    assert about(second) == (ForkReason.TRUNCATED_TURN, first.index, 1)


async def test_other_tools_were_offered(bench):
    bench.script = says("x")
    session = await bench.session()
    first = await session.generate_one(asks(user("a"), tools=WEATHER))
    same = await session.generate_one(asks(user("a"), first.reply, user("b"), tools=WEATHER))
    assert (same.extends, same.fork) == (first, None)
    other = await session.generate_one(asks(user("a"), first.reply, user("b"), tools=TIME))
    assert (other.fork.reason, other.fork.call) == (ForkReason.TOOLS_CHANGED, first.index)
    assert (other.fork.message, other.fork.position) == (0, first_difference(other, first))
    assert other.extends is None


async def test_a_template_that_writes_all_as_it_was_loses_nothing(bench):
    bench.script = says("x")
    session = await with_renderer(bench, WithoutBridge())
    first = await session.generate_one(call("a"))
    second = await session.generate_one(call("a", "x", "b"))
    assert (second.extends, second.fork) == (first, None)
    third = await session.generate_one(call("a", "x", "c"))  # its first new ids are also those of the second call
    assert (third.extends, third.fork) == (first, None)


async def test_forks_are_counted_by_reason(bench):
    bench.script = says("one")
    session = await bench.session()
    await session.generate_one(call("a"))
    await session.generate_one(call("a", "ONE", "b"))
    await session.generate_one(call("z"))
    counted = {name: n for name, n in bench.context.counts.items() if name.startswith("forks_")}
    assert counted == {"forks_edited_message": 1, "forks_new_conversation": 1}


# Strict


async def test_a_strict_job_refuses_what_would_lose_tokens_and_names_the_first_difference(bench):
    bench.script = says("one", "two")
    session = await with_renderer(bench, strict=True)
    first = await session.generate_one(call("a"))
    with pytest.raises(HistoryDrift) as refused:
        await session.generate_one(call("A", "one", "b"))
    position = [*first.prompt_ids.tolist()].index(ord("a"), len("<user\n"))
    assert (refused.value.http_status, refused.value.reason, refused.value.position) == (
        409,
        "edited_message",
        position,
    )
    assert f"message 0, at token {position}" in str(refused.value)
    assert "call 0: edited message" in str(refused.value)
    assert len(await bench.recorded(session)) == 1
    assert bench.engine.calls == 1
    after = await session.generate_one(call("a", "one", "b"))
    assert (after.index, after.extends, after.time_step) == (1, first, 1)


async def test_a_strict_job_lets_subagents_and_further_attempts_pass(bench):
    bench.script = says("one")
    session = await with_renderer(bench, strict=True)
    await session.generate_one(call("a"))
    for texts in (["a"], ["another"], ["a", "one", "b"], ["a", "one", "c"]):
        await session.generate_one(call(*texts))
    assert len(await bench.recorded(session)) == 5


# Time steps


async def test_the_calls_of_an_agent_that_tells_no_steps_are_steps_without_gaps_though_some_fail(bench):
    session = await bench.session()
    works = bench.script

    def fails(prompt, sampling):
        raise EngineFailure("no")

    found = []
    for text in "abcd":
        bench.script = fails
        with pytest.raises(EngineFailure):
            await session.generate_one(call(text))
        bench.script = works
        found.append(await session.generate_one(call(text)))
    assert [chat.time_step for chat in found] == [0, 1, 2, 3]
    again = await bench.reopened(session)
    assert (await again.generate_one(call("e"))).time_step == 4
    assert [chat.index for chat in found] == sorted(chat.index for chat in found)


async def test_a_prompt_that_comes_again_has_the_parent_that_a_trie_would_find_and_needs_none(bench):
    session = await bench.session()
    first = await session.generate_one(call("a"))
    await session.generate_one(call("b"))  # shares its beginning, and has to be looked for by its tokens
    builder = session._prompts
    earlier = builder.earlier("policy", "agent")
    earlier.unmerged.clear()  # so that a trie could find nothing
    earlier._trie = None
    again = await session.generate_one(call("a"))
    assert (again.parent, again.shared) == (first, len(first.prompt_ids))
