"""Retried, equal, slow, cancelled and refused calls of the model, as the openai client makes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from servers import Job, Plane, until

from palestra.session.registry import call_seed, prompt_digest
from palestra.store.codec import unpack

pytestmark = pytest.mark.ci

DELAY_SECONDS = 1.0
SETTINGS = {"steps": 100, "engine": {"kind": "fake", "delay_seconds": DELAY_SECONDS}}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    settings = SETTINGS | {"server": {"max_waiting_calls": 2}}
    with Job(tmp_path_factory.mktemp("calls"), settings) as job:
        job.start()
        yield job


@pytest.fixture(scope="module")
def plane(job) -> Iterator[Plane]:
    with Plane(job.url) as plane:
        yield plane


@pytest.fixture
def episode(plane) -> dict[str, Any]:
    return plane.claim()


def client_of(episode: dict[str, Any], **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"], **more)


def recorded(job: Job, episode: dict[str, Any]) -> list[dict[str, Any]]:
    rows = job.query("SELECT * FROM chats WHERE episode_id = ? ORDER BY idx", episode["episode_id"])
    return [dict(row) for row in rows]


async def in_flight(plane: Plane, number: int) -> None:
    """Return when so many calls are in flight."""
    await asyncio.to_thread(until, lambda: plane.status()["calls"]["in_flight"] == number, f"{number} calls in flight")


@pytest.mark.slow
async def test_equal_first_attempts_are_two_calls_with_two_samples(job, episode):
    async with client_of(episode) as ai:
        calls = [ai.chat.completions.create(model="policy", messages=HELLO) for _ in range(2)]
        first, second = await asyncio.gather(*calls)
    assert {first.id, second.id} == {f"chatcmpl-{episode['episode_id']}-1-{index}" for index in (0, 1)}
    assert first.choices[0].message.content != second.choices[0].message.content
    assert len(recorded(job, episode)) == 2


@pytest.mark.slow
async def test_a_reply_that_has_arrived_is_not_given_to_a_later_equal_call(job, plane, episode):
    first = await asyncio.to_thread(plane.chat, episode)
    again = await asyncio.to_thread(plane.chat, episode, headers={"x-stainless-retry-count": "1"})
    assert first.json()["id"] != again.json()["id"]
    assert len(recorded(job, episode)) == 2


@pytest.mark.slow
async def test_too_many_calls_are_429_with_retry_after_and_the_openai_client_gets_through(plane, episode):
    refused_before = plane.status()["calls"].get("calls_refused", 0)
    async with client_of(episode, max_retries=0) as impatient, client_of(episode, max_retries=10) as patient:
        waiting = [asyncio.create_task(impatient.chat.completions.create(model="policy", messages=HELLO))]
        waiting += [asyncio.create_task(impatient.chat.completions.create(model="policy", messages=HELLO))]
        await in_flight(plane, 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await impatient.chat.completions.create(model="policy", messages=HELLO)
        reply = await patient.chat.completions.with_raw_response.create(model="policy", messages=HELLO)
        await asyncio.gather(*waiting)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.response.headers["x-should-retry"] == "true"
    assert "limit" in caught.value.message
    assert reply.parse().choices[0].message.content is not None
    assert int(reply.http_request.headers["x-stainless-retry-count"]) >= 1
    assert plane.status()["calls"]["calls_refused"] >= refused_before + 2


async def test_a_client_that_goes_away_cancels_its_call_which_is_not_recorded(job, plane, episode):
    incomplete = plane.status()["calls"].get("calls_incomplete", 0)
    async with httpx2.AsyncClient() as http:
        body = {"model": "policy", "messages": HELLO}
        headers = {"authorization": f"Bearer {episode['api_key']}"}
        call = asyncio.create_task(http.post(f"{episode['base_url']}/chat/completions", json=body, headers=headers))
        await in_flight(plane, 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await in_flight(plane, 0)
    assert plane.status()["calls"]["calls_incomplete"] == incomplete + 1
    assert recorded(job, episode) == []


async def test_a_call_that_was_given_up_and_sent_again_is_the_same_sample(job, plane, episode):
    async with client_of(episode, timeout=DELAY_SECONDS / 3, max_retries=0) as impatient:
        with pytest.raises(openai.APITimeoutError):
            await impatient.chat.completions.create(model="policy", messages=HELLO)
    await in_flight(plane, 0)
    async with client_of(episode) as ai:
        await ai.chat.completions.create(model="policy", messages=HELLO)
    (chat,) = recorded(job, episode)
    prompt_ids = unpack(chat["prompt_tail"], "i4").astype(np.int32)
    assert int(chat["seed"]) == call_seed(0, episode["episode_id"], prompt_digest(prompt_ids), 0)


async def test_a_lease_cant_run_out_while_the_server_generates(job, plane):
    short = plane.claim(allow_discard_timeout=DELAY_SECONDS / 4)
    answer = await asyncio.to_thread(plane.chat, short)
    assert answer.status_code == 200
    assert plane.end(short).status_code == 200
    assert len(recorded(job, short)) == 1


@pytest.mark.parametrize("how", ["end", "abort"])
async def test_the_end_of_an_episode_cancels_its_calls_in_flight(job, plane, episode, how):
    async with client_of(episode) as ai:
        call = asyncio.create_task(ai.chat.completions.create(model="policy", messages=HELLO))
        await in_flight(plane, 1)
        if how == "end":
            assert plane.end(episode).status_code == 200
        else:
            body = {"episode_id": episode["episode_id"]}
            assert plane.post("/abort_episode", body, episode["api_key"]).status_code == 200
        with pytest.raises(openai.ConflictError):
            await call
    assert recorded(job, episode) == []


@pytest.mark.slow
async def test_what_the_job_fixes_is_said_in_a_header_and_an_adhoc_call_chooses_for_itself(job, plane, episode):
    async with client_of(episode) as ai:
        raw = await ai.chat.completions.with_raw_response.create(
            model="policy", messages=HELLO, temperature=0.5, seed=7, max_tokens=3, logprobs=True
        )
    assert "x-palestra-sampling" not in raw.headers
    reply, (chat,) = raw.parse(), recorded(job, episode)
    assert (chat["temperature"], chat["seed"], chat["max_tokens"]) == (0.5, "7", 3)
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 3
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.logprob for token in logprobs.content] == unpack(chat["logprobs"], "f4").tolist()


def test_a_recorded_reply_that_was_never_sent_is_given_to_the_retry_after_a_restart(tmp_path):
    settings = {"steps": 100, "engine": {"kind": "fake"}}
    with Job(tmp_path, settings) as job, Plane(job.url) as plane:
        server = job.start(fault="after_chat_commit:2")
        episode = plane.claim()
        url, key = episode["base_url"], episode["api_key"]
        with openai.OpenAI(base_url=url, api_key=key, max_retries=30) as ai:
            first = ai.chat.completions.create(model="policy", messages=HELLO)
            messages = [*HELLO, {"role": "assistant", "content": first.choices[0].message.content}, *HELLO]
            restart = asyncio.run(_answered_after_restart(job, server, episode, messages))
            stored = recorded(job, episode)
            assert [chat["idx"] for chat in stored] == [0, 1]
            assert restart.id == f"chatcmpl-{episode['episode_id']}-1-1"
            assert restart.choices[0].message.content == json.loads(stored[1]["reply"])["content"][0]["text"]
            assert plane.status()["calls"]["retries_answered"] == 1
            # and the conversation goes on from it, by its exact ids
            messages += [{"role": "assistant", "content": restart.choices[0].message.content}, *HELLO]
            ai.chat.completions.create(model="policy", messages=messages)
        assert [chat["parent"] for chat in recorded(job, episode)] == [None, 0, 1]
        assert plane.end(episode).status_code == 200


async def _answered_after_restart(job: Job, server: Any, episode: dict[str, Any], messages: list[Any]) -> Any:
    async with client_of(episode, max_retries=30) as ai:
        call = asyncio.create_task(ai.chat.completions.create(model="policy", messages=messages))
        assert await asyncio.to_thread(server.wait) == -9
        await asyncio.to_thread(job.start, "--resume")
        return await call
