"""The dialect with a real, tiny model behind it: what is asked for is what its engine does."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from in_process import episode_of, serving

SETTINGS: dict[str, Any] = {
    "policies": {"policy": {"model": "tiny-random", "max_context": 1024, "sampling": {"max_tokens": 200}}},
    "engine": {"kind": "embedded", "threads": 1},
}
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
SHORT = {"type": "string", "pattern": "^[ab]{2,5}$"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.slow
async def test_a_model_that_knows_nothing_meets_schemas_calls_tools_and_streams_what_it_says(tmp_path):
    async with serving(tmp_path, **SETTINGS) as job, episode_of(job) as (ai, _):
        create = ai.chat.completions.create
        schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SHORT}}
        for seed in range(3):
            said = (await create(**ASK, response_format=schema, seed=seed)).choices[0]
            assert set(json.loads(said.message.content or "")) <= {"a", "b"}
            assert said.finish_reason == "stop"
            called = (await create(**ASK, tools=[TOOL], tool_choice="required", seed=seed, n=2)).choices
            for choice in called:
                if choice.finish_reason == "tool_calls":
                    calls = choice.message.tool_calls or ()
                    assert all(json.loads(call.function.arguments)["a"] in (1, 2) for call in calls)
            assert any(choice.message.tool_calls for choice in called)
        whole = (await create(**ASK, seed=7, logprobs=True, top_logprobs=3, max_tokens=40)).choices[0]
        stream = await create(**ASK, seed=7, logprobs=True, top_logprobs=3, max_tokens=40, stream=True)
        entries = [chunk.choices[0] async for chunk in stream]
        assert "".join(entry.delta.content or "" for entry in entries) == whole.message.content
        logprobs = [token for entry in entries if entry.logprobs for token in entry.logprobs.content or ()]
        assert whole.logprobs is not None
        assert [t.token for t in logprobs] == [t.token for t in whole.logprobs.content or ()]
        assert all(len(token.top_logprobs) == 3 for token in logprobs)
        assert all(token.top_logprobs[0].logprob >= token.logprob - 1e-3 for token in logprobs)
        text = whole.message.content or ""
        cut = (await create(**ASK, seed=7, max_tokens=40, stop=text[5:8])).choices[0].message.content
        assert cut == text[: text.index(text[5:8])]


async def test_token_ids_that_a_model_gave_are_what_it_goes_on_from(tmp_path):
    async with serving(tmp_path, **SETTINGS) as job, episode_of(job) as (ai, episode_id):
        first = await ai.completions.create(
            model="policy", prompt="Once", max_tokens=9, extra_body={"return_token_ids": True, "min_tokens": 9}
        )
        entry: Any = first.choices[0]
        ids = [*entry.prompt_token_ids, *entry.token_ids]
        await ai.completions.create(model="policy", prompt=ids, max_tokens=3, logit_bias={"97": 100})
        chats = (await job.plane.store.calls.of_lease(episode_id, 1))[1]
    assert len(entry.token_ids) == 9
    assert chats[1].completion_ids.tolist() == [97] * 3
    assert chats[1].extends is chats[0]


async def test_a_reply_is_one_of_the_texts_of_structured_outputs(tmp_path):
    """vLLM's field."""
    words = ["yes", "no", "yéllow"]
    async with serving(tmp_path, **SETTINGS) as job, episode_of(job) as (ai, _):
        create = ai.chat.completions.create
        held = {"structured_outputs": {"choice": words}}
        said = (await create(**ASK, n=12, extra_body=held)).choices
        assert {choice.message.content for choice in said} <= set(words)
        assert len({choice.message.content for choice in said}) > 1
        for wrong in ({"choice": []}, {"choice": [""]}, {"regex": "a+"}):
            with pytest.raises(openai.UnprocessableEntityError, match="structured_outputs"):
                await create(**ASK, extra_body={"structured_outputs": wrong})
        with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError), match="choices can't"):
            await create(**ASK, tools=[TOOL], extra_body=held)
