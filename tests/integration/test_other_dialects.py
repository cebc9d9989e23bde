"""`/v1/responses` and `/v1/messages`, as the official clients speak them over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import openai
import pytest
from in_process import episode_of
from test_dialect import CALL, REPLIES, asks, recorded, speaking, until

pytestmark = pytest.mark.ci

FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
TOOL: Any = {"name": "add", "input_schema": {"type": "object"}}
ARGUMENTS = json.loads(CALL.split('arguments": ')[1].rpartition("}\n")[0])
NAMES = [name for name in REPLIES if name != "malformed"]


@asynccontextmanager
async def anthropic_of(ai: openai.AsyncOpenAI, key: str | None = None) -> AsyncIterator[Any]:
    import anthropic

    url = str(ai.base_url).removesuffix("/v1/")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key or ai.api_key, max_retries=0) as client:
        yield client


# Responses


def without_names(response: Any) -> dict[str, Any]:
    """What two samples have in common."""
    kept = response.model_dump(include={"output", "status", "incomplete_details", "usage", "tools"})
    for item in kept["output"]:
        item["id"] = item["call_id"] = None
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_a_streamed_response_is_the_one_without_streaming(tmp_path, name):
    async with speaking(tmp_path) as (_, _, ai, _):
        body: Any = {"model": "policy", "input": name, "tools": [FUNCTION]}
        await ai.responses.create(**body)  # so that both of the others find its prompt
        whole = await ai.responses.create(**body)
        events = [event async for event in await ai.responses.create(**body, stream=True)]
        async with ai.responses.stream(**body) as stream:
            final = await stream.get_final_response()
    assert without_names(events[-1].response) == without_names(whole)
    assert without_names(final)["usage"] == without_names(whole)["usage"]
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in events[-1].response.output]


async def test_a_response_has_the_reply_as_items_and_a_status(tmp_path):
    async with speaking(tmp_path) as (_, _, ai, _):
        found = await ai.responses.create(model="policy", input="calls", tools=[FUNCTION], instructions="Be brief.")
        cut = await ai.responses.create(model="policy", input="text", max_output_tokens=3)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert found.output[0].content[0].text == "two"
    assert found.usage.output_tokens_details.reasoning_tokens == len("<think>two")
    assert found.output_text == "Let me see."
    assert json.loads(found.output[2].arguments) == ARGUMENTS
    assert (found.status, found.instructions) == ("completed", "Be brief.")
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "Goo")


async def test_the_tokens_of_an_input_are_counted_and_nothing_is_recorded(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id):
        ask: Any = {"model": "policy", "input": "calls", "tools": [FUNCTION], "instructions": "Be brief."}
        count = await ai.responses.input_tokens.count(**ask)
        assert await recorded(job, episode_id) == ()
        found = await ai.responses.create(**ask)
        assert (count.object, count.input_tokens) == ("response.input_tokens", found.usage.input_tokens)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await ai.responses.input_tokens.count(**ask, previous_response_id="resp-1")


async def test_a_conversation_of_items_goes_on_from_exact_tokens(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id):
        items: list[Any] = [{"role": "user", "content": "calls"}]
        for turn in range(4):
            found = await ai.responses.create(model="policy", input=items, tools=[FUNCTION], instructions="Brief.")
            items += [item.model_dump(exclude_none=True) for item in found.output]
            calls = [item for item in found.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]
            content = [{"type": "input_text", "text": ["calls", "thought", "call", "text"][turn]}]
            items.append({"role": "user", "content": content})
        chats = await recorded(job, episode_id)
    assert all(later.extends is earlier for earlier, later in pairwise(chats))
    assert chats[-1].messages[0].role == "system"
    assert [message.role for message in chats[1].new_messages] == ["tool", "tool", "user"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "field", "status"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", 400),
        ({"background": True}, "background", 400),
        ({"reasoning": {"mode": "deep"}}, "reasoning", 400),
        ({"include": ["file_search_call.results"]}, "include", 400),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0", 422),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", 400),
    ],
)
async def test_what_a_response_cant_have_is_refused_and_named(tmp_path, more, field, status):
    async with speaking(tmp_path) as (_, _, ai, _):
        with pytest.raises(openai.APIStatusError) as caught:
            await ai.responses.create(**({"model": "policy", "input": "text"} | more))
    assert caught.value.status_code == status
    assert str(caught.value.param).startswith(field)


async def test_a_response_can_be_constrained(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id):
        schema: Any = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
        await ai.responses.create(model="policy", input="text", text={"format": schema})
        await ai.responses.create(
            model="policy", input="x", tools=[FUNCTION], tool_choice={"type": "function", "name": "add"}
        )
        first, second = await recorded(job, episode_id)
    assert "integer" in first.sampling.grammar
    assert "call_0" in second.sampling.grammar


async def test_a_response_that_fails_while_it_is_streamed_raises(tmp_path):
    async with speaking(tmp_path, piece_delay_seconds=0.01) as (job, _, _, _), episode_of(job) as (other, other_id):
        stream = await other.responses.create(model="policy", input="y" * 300, stream=True)
        await anext(aiter(stream))
        await job.plane.store.episodes.abort(other_id, 1, "", discard=True)
        with pytest.raises(openai.APIError, match="lease ran"):
            async for _ in stream:
                pass
        job.plane.store.episodes.end = _nothing


async def _nothing(*_: Any) -> None:
    pass


# Messages


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_a_streamed_message_is_the_one_without_streaming(tmp_path, name):
    async with speaking(tmp_path) as (_, _, ai, _), anthropic_of(ai) as client:
        body: Any = asks(name, max_tokens=500, tools=[TOOL])
        await client.messages.create(**body)  # so that both of the others find its prompt
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            final = await stream.get_final_message()

    def comparable(message: Any) -> dict[str, Any]:
        found = message.model_dump(include={"content", "role", "stop_reason", "stop_sequence", "usage", "model"})
        for block in found["content"]:
            block["id"] = None
            block.pop("parsed_output", None)
        return found

    assert comparable(final) == comparable(whole)


async def test_a_message_has_the_reply_as_blocks_and_a_reason(tmp_path):
    async with speaking(tmp_path) as (_, _, ai, _), anthropic_of(ai) as client:
        found = await client.messages.create(**asks("calls", max_tokens=500, tools=[TOOL], system="Be brief."))
        cut = await client.messages.create(**asks("text", max_tokens=3))
        stopped = await client.messages.create(**asks("a stop b", max_tokens=30, stop_sequences=["stop"]))
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (found.content[0].thinking, found.content[1].text) == ("two", "Let me see.")
    assert (found.content[2].name, found.content[2].input) == ("add", ARGUMENTS)
    assert found.stop_reason == "tool_use"
    assert (cut.stop_reason, cut.usage.output_tokens, cut.content[0].text) == ("max_tokens", 3, "Goo")
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "stop", "a ")


async def test_a_conversation_of_blocks_goes_on_from_exact_tokens(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id), anthropic_of(ai) as client:
        messages: list[Any] = [{"role": "user", "content": "calls"}]
        for turn in range(4):
            found = await client.messages.create(
                model="policy", max_tokens=500, messages=messages, tools=[TOOL], system=[{"type": "text", "text": "S"}]
            )
            messages.append({"role": "assistant", "content": found.content})
            calls = [block for block in found.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "4"} for call in calls]
            said = {"type": "text", "text": ["calls", "thought", "call", "text"][turn]}
            messages.append({"role": "user", "content": [*results, said]})
        chats = await recorded(job, episode_id)
        usage = found.usage
    assert all(later.extends is earlier for earlier, later in pairwise(chats))
    assert [message.role for message in chats[1].new_messages] == ["tool", "tool", "user"]
    assert usage.cache_read_input_tokens == chats[-1].shared
    assert usage.input_tokens + usage.cache_read_input_tokens == chats[-1].prompt_tokens


async def test_errors_have_anthropics_shape_and_classes(tmp_path):
    import anthropic

    async with speaking(tmp_path) as (_, _, ai, _):
        async with anthropic_of(ai, "nobody") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**asks("text", max_tokens=3))
            assert caught.value.body["error"]["type"] == "authentication_error"
        async with anthropic_of(ai) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**(asks("text", max_tokens=3) | {"model": "gpt-4o"}))
            image: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
            bad = [{"role": "user", "content": [image]}]
            unsupported = {"extra_body": {"container": "a"}}
            wrong = [({"messages": bad}, anthropic.UnprocessableEntityError), (unsupported, anthropic.BadRequestError)]
            for more, error in wrong:
                with pytest.raises(error) as refused:
                    await client.messages.create(**(asks("text", max_tokens=3) | more))
                assert refused.value.body["type"] == "error"
                assert refused.value.body["error"]["type"] == "invalid_request_error"


async def test_a_message_that_fails_while_it_is_streamed_raises_and_a_client_that_leaves_frees_the_engine(tmp_path):
    import anthropic

    async with speaking(tmp_path, piece_delay_seconds=0.01) as (job, engine, ai, _):
        async with anthropic_of(ai) as client:
            async with client.messages.stream(**asks("y" * 300, max_tokens=500)) as stream:
                await anext(aiter(stream))
                assert engine.running == 1
            await until(lambda: engine.running == 0)
        async with episode_of(job) as (other, other_id), anthropic_of(other) as client:
            async with client.messages.stream(**asks("y" * 300, max_tokens=500)) as stream:
                await anext(aiter(stream))
                await job.plane.store.episodes.abort(other_id, 1, "", discard=True)
                with pytest.raises(anthropic.APIStatusError, match="lease ran"):
                    await stream.until_done()
            job.plane.store.episodes.end = _nothing


async def test_the_three_dialects_speak_of_one_conversation(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id), anthropic_of(ai) as client:
        first = await ai.chat.completions.create(**asks("thought"))
        reply = first.choices[0].message
        items: list[Any] = [
            {"role": "user", "content": "thought"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm, é."}]},
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": "text"},
        ]
        await ai.responses.create(model="policy", input=items)
        blocks: list[Any] = [
            {"type": "thinking", "thinking": "Hm, é.", "signature": ""},
            {"type": "text", "text": reply.content},
        ]
        said: list[Any] = [
            {"role": "user", "content": "thought"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": "text"},
        ]
        await client.messages.create(model="policy", max_tokens=50, messages=said)
        chats = await recorded(job, episode_id)
    assert chats[1].extends is chats[0]
    assert chats[2].prompt_ids.tolist() == chats[1].prompt_ids.tolist()


async def test_subagents_and_titles_of_coding_agents_are_agents_of_the_episode(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id):
        sub = {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}
        for more in ({}, {"extra_headers": sub}, {"extra_headers": {"x-palestra-agent": "planner"} | sub}):
            await ai.chat.completions.create(**asks("text"), **more)
        system = "You are a title generator. You output ONLY a thread title. Nothing else."
        title: Any = [{"role": "system", "content": system}, {"role": "user", "content": "text"}]
        await ai.chat.completions.create(**(asks("text") | {"messages": title}))
        chats = await recorded(job, episode_id)
    assert [chat.agent for chat in chats] == ["agent", "agent/ses_2", "planner/ses_2", "agent/auxiliary"]
