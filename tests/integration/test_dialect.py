"""The dialect of `/v1/chat/completions` and `/v1/completions`, as the openai client speaks it over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from in_process import episode_of, parts_of, serving

from palestra.engine.fake import FakeEngine
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.runtime.local_job import LocalJob
from palestra.types.calls import Chat

pytestmark = pytest.mark.ci

STOP = 258
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "t": "</tool_call> é"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
REPLIES = {
    "text": "Good day – 漢字 👩‍💻",
    "thought": "<think>\nHm, é.\n\n</think>\n\nSo it is.",
    "call": CALL,
    "calls": f"<think>two</think>Let me see.\n{CALL}\n{CALL}",
    "malformed": f'Well\n<tool_call>\n{{"name": "add", oops\n</tool_call> and {CALL} then <tool_ca',
    "empty": "",
    "cut": "<think>never closed",
}


def reply(prompt: str, seed: int) -> str:
    """What is asked for by name, or the question itself."""
    asked = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return REPLIES.get(asked, f"seed {seed}" if asked == "seed" else asked)


@asynccontextmanager
async def speaking(
    folder: Path, server: dict[str, Any] | None = None, pictures: dict[str, Any] | None = None, **engine: Any
) -> AsyncIterator[tuple[LocalJob, FakeEngine, Any, str]]:
    """A job, its engine, a client for an ad-hoc episode of it, and the episode's id."""
    tokenizer = ByteTokenizer()
    parts = parts_of(ChatMLRenderer(tokenizer), tokenizer, reply, **{"piece_tokens": 1} | engine)
    assert isinstance(parts.engine, FakeEngine)
    async with (
        serving(
            folder,
            parts,
            policies={"policy": {"max_context": 8192}},
            server={"port": 0} | (server or {}),
            pictures=pictures or {},
        ) as job,
        episode_of(job) as (ai, episode_id),
    ):
        yield job, parts.engine, ai, episode_id


def asks(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **more}


async def recorded(job: LocalJob, episode_id: str) -> tuple[Chat, ...]:
    return (await job.plane.store.calls.of_lease(episode_id, 1))[1]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def joined(chunks: list[Any], choice: int = 0) -> dict[str, Any]:
    """The message that a client puts together."""
    message: dict[str, Any] = {"content": None, "refusal": None}
    for chunk in chunks:
        for entry in chunk.choices:
            if entry.index != choice:
                continue
            delta = entry.delta.model_dump(exclude_unset=True)
            for call in delta.pop("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call.pop("index") == len(calls):
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            for key, value in delta.items():
                message[key] = (message.get(key) or "") + value
    return message


@pytest.mark.parametrize("name", REPLIES)
async def test_a_stream_put_together_is_the_reply_without_streaming(tmp_path, name):
    async with speaking(tmp_path) as (_, _, ai, _):
        body = asks(name, tools=TOOLS, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
        whole = await ai.chat.completions.create(**body)
        stream = await ai.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    wanted = whole.choices[0].message.model_dump(exclude_unset=True)
    found = joined(chunks)
    for message in (wanted, found):  # two samples have calls with ids of their own
        ids = [call.pop("id") for call in message.get("tool_calls", ())]
        assert len(set(ids)) == len(ids)
    assert found == wanted
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = [chunk.usage for chunk in chunks]
    assert usage[-1] is not None
    assert usage[:-1] == [None] * (len(chunks) - 1)
    assert usage[-1].completion_tokens == whole.usage.completion_tokens
    entries = [entry for chunk in chunks[:-1] for entry in chunk.choices]
    logprobs = [token for entry in entries if entry.logprobs for token in entry.logprobs.content]
    assert logprobs == whole.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 2 for token in logprobs)
    token_ids = [token for entry in entries for token in getattr(entry, "token_ids", ())]
    assert token_ids == whole.choices[0].token_ids == [*REPLIES[name].encode(), STOP]
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("piece_tokens", [0, 1, 40])
async def test_a_chunk_has_one_kind_of_content_and_a_call_is_its_name_and_then_its_arguments(tmp_path, piece_tokens):
    async with speaking(tmp_path, piece_tokens=piece_tokens) as (_, _, ai, _):
        body = asks("calls", tools=TOOLS, logprobs=True)
        chunks = [chunk async for chunk in await ai.chat.completions.create(**body, stream=True)]
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas[-1] == {}
    assert [delta.pop("role", None) for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert all(len(delta) <= 1 for delta in deltas)
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    ids = [call["id"] for (call,) in calls if "id" in call]
    parts = [
        ([{"index": k, "id": one, "type": "function", "function": {"name": "add", "arguments": ""}}],
         [{"index": k, "function": {"arguments": '{"a": 1,  "t": "</tool_call> é"}'}}])
        for k, one in enumerate(ids)
    ]  # fmt: skip
    assert calls == [part for both in parts for part in both]
    assert len(ids) == 2
    tokens = [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content or ()
    ]
    assert bytes(token for entry in tokens for token in entry.bytes or ()).startswith(REPLIES["calls"].encode())


async def test_the_openai_clients_own_accumulation_agrees(tmp_path):
    async with (
        speaking(tmp_path) as (_, _, ai, _),
        ai.chat.completions.stream(**asks("calls", tools=TOOLS)) as stream,
    ):
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert [json.loads(call.function.arguments)["t"] for call in message.tool_calls or ()] == ["</tool_call> é"] * 2
    assert (message.content, final.choices[0].finish_reason) == ("Let me see.", "tool_calls")


@pytest.mark.slow
async def test_the_first_chunk_leaves_before_the_reply_is_complete_and_the_last_after_its_commit(tmp_path):
    async with speaking(tmp_path, piece_delay_seconds=0.02) as (job, engine, ai, episode_id):
        stream = await ai.chat.completions.create(**asks("text"), stream=True)
        chunks = [await anext(aiter(stream))]
        assert engine.running == 1
        assert await recorded(job, episode_id) == ()
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.choices[0].finish_reason:
                (chat,) = await recorded(job, episode_id)
                assert chat.reply.text == REPLIES["text"]
    assert joined(chunks)["content"] == REPLIES["text"]


async def test_a_client_that_leaves_a_stream_frees_the_engine_and_records_nothing(tmp_path):
    async with speaking(tmp_path, piece_delay_seconds=0.02) as (job, engine, ai, episode_id):
        stream = await ai.chat.completions.create(**asks("x" * 400), stream=True)
        await anext(aiter(stream))
        assert engine.running == 1
        await stream.close()
        await until(lambda: engine.running == 0)
        await until(lambda: job.plane.sessions.in_flight == 0)
        assert await recorded(job, episode_id) == ()
        assert job.plane.sessions.context.counts["calls_incomplete"] == 1


# Choices and retries


async def test_n_choices_are_distinct_samples_each_recorded_in_order(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id):
        answer = await ai.chat.completions.create(**asks("seed", n=4))
        chats = await recorded(job, episode_id)
        stream = await ai.chat.completions.create(**asks("seed", n=4, seed=10), stream=True)
        chunks = [chunk async for chunk in stream]
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == [chat.reply.text for chat in chats] == [f"seed {chat.sampling.seed}" for chat in chats]
    assert len(set(texts)) == 4
    assert {chat.time_step for chat in chats} == {0}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == chats[0].prompt_tokens
    assert answer.usage.completion_tokens == sum(len(chat.completion_ids) for chat in chats)
    assert [joined(chunks, k)["content"] for k in range(4)] == [f"seed {10 + k}" for k in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_retry_gets_the_choices_that_were_recorded_and_only_the_others_are_sampled(tmp_path, streamed):
    async with speaking(tmp_path, piece_delay_seconds=0.01) as (job, engine, ai, episode_id):
        slow = False
        script = engine._script

        def sometimes_long(prompt: Any, sampling: Any) -> list[int]:
            nonlocal slow
            slow = not slow
            return [*script(prompt, sampling)[:-1], *([97] * 500 if not slow else []), STOP]

        engine._script = sometimes_long
        body = asks("seed", n=2) | ({"stream": True} if streamed else {})
        headers = {"authorization": f"Bearer {ai.api_key}"}
        url = f"{job.url}/v1/chat/completions"
        async with httpx2.AsyncClient() as http:
            call = asyncio.create_task(http.post(url, json=body, headers=headers))
            await until(lambda: job.plane.sessions.context.counts["calls"] == 1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: engine.running == 0)
            (kept,) = await recorded(job, episode_id)
            engine._script = script
            answer = await http.post(url, json=body, headers=headers | {"x-stainless-retry-count": "1"})
        chats = await recorded(job, episode_id)
        assert len(chats) == 2
        assert engine.calls == 3
        if streamed:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            entries = [entry for event in events for entry in event["choices"]]
            texts = ["".join(e["delta"].get("content", "") for e in entries if e["index"] == k) for k in (0, 1)]
        else:
            texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert texts == [chat.reply.text for chat in chats]
        assert chats[0].reply == kept.reply
        assert job.plane.sessions.context.counts["retries_answered"] == 1


async def test_a_stream_that_is_sent_again_is_the_recorded_reply(tmp_path):
    async with speaking(tmp_path) as (job, engine, ai, episode_id):
        session = await job.plane.sessions.open(episode_id, 1)
        body = asks("calls", tools=TOOLS)
        first = [chunk async for chunk in await ai.chat.completions.create(**body, stream=True)]
        (chat,) = await recorded(job, episode_id)
        session._registry._undelivered[chat.request_digest] = chat  # as if its last chunk had not left
        headers = {"x-stainless-retry-count": "1"}
        again = await ai.chat.completions.create(**body, stream=True, extra_headers=headers)
        assert joined([chunk async for chunk in again]) == joined(first)
        assert engine.calls == 1


# Where a reply ends


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_cuts_the_text_and_keeps_the_exact_tokens(tmp_path, streamed):
    async with speaking(tmp_path) as (job, engine, ai, episode_id):
        body = asks("one é two END three", stop=["zzz", "ENDE", "é two END"])
        if streamed:
            chunks = [chunk async for chunk in await ai.chat.completions.create(**body, stream=True)]
            text, reason = joined(chunks)["content"], chunks[-1].choices[0].finish_reason
        else:
            choice = (await ai.chat.completions.create(**body)).choices[0]
            text, reason = choice.message.content, choice.finish_reason
        (chat,) = await recorded(job, episode_id)
        assert (text, reason, chat.stop, chat.reply.text) == ("one ", "stop", "é two END", "one ")
        assert bytes(chat.completion_ids.tolist()) == "one é two END".encode()
        assert engine.running == 0
        messages = [*body["messages"], {"role": "assistant", "content": "one "}, {"role": "user", "content": "b"}]
        await ai.chat.completions.create(model="policy", messages=messages)
        assert (await recorded(job, episode_id))[1].extends.index == chat.index


async def test_without_parallel_calls_a_reply_ends_with_its_first(tmp_path):
    async with speaking(tmp_path, piece_tokens=7) as (job, _, ai, episode_id):
        body = asks("calls", tools=TOOLS, parallel_tool_calls=False)
        whole = await ai.chat.completions.create(**body)
        chunks = [chunk async for chunk in await ai.chat.completions.create(**body, stream=True)]
        chats = await recorded(job, episode_id)
    assert len(whole.choices[0].message.tool_calls or ()) == len(joined(chunks)["tool_calls"]) == 1
    assert whole.choices[0].message.content == joined(chunks)["content"] == "Let me see."
    for chat in chats:
        assert bytes(chat.completion_ids.tolist()).decode().endswith("</tool_call>")
        assert chat.stop == "</tool_call>"


async def test_a_stop_token_of_the_callers_own_is_recorded_and_not_part_of_the_text(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id):
        answer = await ai.chat.completions.create(**asks("abcdef", extra_body={"stop_token_ids": [ord("d")]}))
        (chat,) = await recorded(job, episode_id)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "stop")
    assert bytes(chat.completion_ids.tolist()) == b"abcd"


async def test_what_is_asked_for_comes_to_the_engine_and_into_the_record(tmp_path):
    async with speaking(tmp_path) as (job, _, ai, episode_id):
        await ai.chat.completions.create(
            **asks("x", top_p=0.5, presence_penalty=0.5, logit_bias={"97": -100}),
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
            extra_body={"top_k": 3, "min_tokens": 2},
        )
        await ai.chat.completions.create(**asks("x", tools=TOOLS, tool_choice="required"))
        first, second = await recorded(job, episode_id)
    used = first.sampling
    assert (used.top_p, used.top_k, used.min_tokens, used.presence_penalty) == (0.5, 3, 2, 0.5)
    assert used.logit_bias == ((97, -100.0),)
    assert used.grammar.startswith('start: %json {"type": "integer"')
    assert "<tool_call>" in second.sampling.grammar
    assert "add" in second.sampling.grammar


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "odd"}}}},
            "response_format",
        ),
    ],
)
async def test_a_constraint_that_cant_be_met_is_422_and_named(tmp_path, more, field):
    async with speaking(tmp_path) as (_, _, ai, _):
        for streamed in (False, True):
            with pytest.raises(openai.UnprocessableEntityError) as caught:
                await ai.chat.completions.create(**asks("x", **more), stream=streamed)
            assert caught.value.param == field


async def test_a_failure_before_the_first_text_has_its_status_and_one_after_it_ends_the_stream(tmp_path):
    async with speaking(tmp_path, piece_delay_seconds=0.01) as (job, engine, ai, episode_id):
        with pytest.raises(openai.BadRequestError, match="context"):
            await ai.chat.completions.create(**asks("x" * 9000), stream=True)
        stream = await ai.chat.completions.create(**asks("y" * 300), stream=True)
        await anext(aiter(stream))
        await job.plane.store.episodes.abort(episode_id, 1, "", discard=False)
        with pytest.raises(openai.APIError, match="lease ran"):
            async for _ in stream:
                pass
        await until(lambda: engine.running == 0)
        job.plane.store.episodes.end = _nothing  # the lease is over: nothing to end


async def _nothing(*_: Any) -> None:
    pass


# Prompts as they are


async def test_text_and_ids_are_completed_and_go_on_from_earlier_calls(tmp_path):
    prompt = "<|im_start|>user\ntext<|im_end|>"
    async with speaking(tmp_path) as (job, engine, ai, episode_id):
        engine._script = lambda ids, sampling: [*b" and so on", STOP]
        first = await ai.completions.create(model="policy", prompt="Once", logprobs=2, max_tokens=40)
        ids = [*b"Once", *b" and so on", STOP, *b" again"]
        second = await ai.completions.create(
            model="policy", prompt=ids, stop=" so", extra_body={"return_token_ids": True}
        )
        stream = await ai.completions.create(model="policy", prompt=[prompt, [1, 2]], n=2, stream=True, logprobs=0)
        chunks = [chunk async for chunk in stream]
        chat_after = await ai.chat.completions.create(**asks("hello"))
        chats = await recorded(job, episode_id)
    assert (first.choices[0].text, first.choices[0].finish_reason) == (" and so on", "stop")
    assert first.choices[0].logprobs.tokens[:3] == [" ", "a", "n"]
    assert len(first.choices[0].logprobs.top_logprobs[0]) == 2
    assert (second.choices[0].text, second.choices[0].token_ids) == (" and", [*b" and so"])
    assert second.choices[0].prompt_token_ids == ids == chats[1].prompt_ids.tolist()
    assert (chats[1].extends.index, chats[1].shared, chats[1].messages) == (0, 15, ())
    texts = ["".join(e.text for c in chunks for e in c.choices if e.index == k) for k in range(4)]
    assert texts == [" and so on"] * 4
    assert bytes(chats[2].prompt_ids.tolist()) == prompt.encode()  # this tokenizer's text makes no control tokens
    assert [chat.prompt_ids.tolist() for chat in chats[4:6]] == [[1, 2]] * 2
    assert chat_after.choices[0].message.content == " and so on"
    assert [chat.index for chat in chats] == list(range(7))


@pytest.mark.parametrize("prompt", [[], [[]], [300], [-1], "", [1.5], [True], None, ["a"] * 129])
async def test_a_prompt_that_is_none_is_refused_and_named(tmp_path, prompt):
    async with speaking(tmp_path) as (_, _, ai, _):
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await ai.completions.create(model="policy", prompt=prompt)
        assert caught.value.param == "prompt"
        with pytest.raises(openai.UnprocessableEntityError, match="whole answers") as caught:
            await ai.completions.create(model="policy", prompt="a", echo=True, stream=True)
        assert caught.value.param == "echo"


async def test_a_prompt_may_be_echoed_with_the_logprobs_of_its_tokens(tmp_path):
    """OpenAI's `echo`, by which others learn what a model finds of a text: the first token follows nothing."""
    async with speaking(tmp_path) as (_, _, ai, _):
        plain = await ai.completions.create(model="policy", prompt="a b", max_tokens=3, echo=True)
        ids = [*b"a b"]
        more = {"prompt": [ids, [104]], "logprobs": 2, "n": 2}
        whole = await ai.completions.create(model="policy", max_tokens=3, echo=True, **more)
    assert (plain.choices[0].text[:3], plain.choices[0].logprobs) == ("a b", None)
    assert [choice.text[:3] for choice in whole.choices[:2]] == ["a b"] * 2
    for choice, prompt in zip(whole.choices, ["a b", "a b", "h", "h"], strict=True):
        found, before = choice.logprobs, len(prompt)
        sampled = len(found.tokens) - before
        assert "".join(found.tokens).startswith(choice.text)  # the stop token is no text
        assert found.token_logprobs == [None, *[-1.0] * (before - 1 + sampled)]
        assert [bool(most) for most in found.top_logprobs] == [False] * before + [True] * sampled
        assert found.text_offset == list(range(before + sampled))
