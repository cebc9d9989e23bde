"""Anthropic's own client against a real server, with nothing but what an episode says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from in_process import episode_of, parts_of, serving
from servers import KEY, SCRIPTED, Job, Plane

from palestra import Client
from palestra.client.episode import Episode
from palestra.renderers import ByteTokenizer, ChatMLConfig, ChatMLRenderer

pytestmark = pytest.mark.ci

MESSAGES = [{"role": "user", "content": "hello"}]


# Enough episodes that each test has one, though none is ever ended; a step that no evaluation precedes.
SETTINGS: dict[str, Any] = SCRIPTED | {
    "rollout": {"group_size": 8, "groups_per_step": 8},
    "evaluation": {"every_steps": 0},
}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("anthropic"), SETTINGS) as job:
        job.start()
        yield job


@pytest.fixture
def episode(job) -> Iterator[Episode]:
    with Client(job.url, KEY) as client:
        begun = client.begin_episode()
        assert begun is not None
        yield begun


def test_its_base_url_and_its_count_of_tokens(episode):
    with anthropic.Anthropic(base_url=episode.anthropic_url, api_key=episode.api_key) as ai:
        count = ai.messages.count_tokens(model=episode.model, messages=MESSAGES, system="be brief")
        reply = ai.messages.create(model=episode.model, messages=MESSAGES, system="be brief", max_tokens=20)
        assert count.input_tokens == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
        goes_on = [*MESSAGES, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "on"}]
        count = ai.messages.count_tokens(model=episode.model, messages=goes_on, system="be brief")
        reply = ai.messages.create(model=episode.model, messages=goes_on, system="be brief", max_tokens=20)
        assert count.input_tokens == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
        long = [{"role": "user", "content": "x" * 50_000}]
        assert ai.messages.count_tokens(model=episode.model, messages=long).input_tokens > 50_000
        with pytest.raises(anthropic.BadRequestError, match="context"):
            ai.messages.create(model=episode.model, messages=long, max_tokens=20)


def test_counting_records_nothing_and_needs_a_key(job, episode):
    with Plane(job.url) as plane:
        before = plane.status()["calls"]
        with anthropic.Anthropic(base_url=episode.anthropic_url, api_key=episode.api_key) as ai:
            ai.messages.count_tokens(model=episode.model, messages=MESSAGES)
        assert plane.status()["calls"] == before
        with (
            anthropic.Anthropic(base_url=episode.anthropic_url, api_key="no") as ai,
            pytest.raises(anthropic.AuthenticationError),
        ):
            ai.messages.count_tokens(model=episode.model, messages=MESSAGES)


def test_a_wrong_base_url_is_answered_with_the_right_one(job, episode):
    with (
        anthropic.Anthropic(base_url=episode.base_url, api_key=episode.api_key) as ai,
        pytest.raises(anthropic.NotFoundError, match=r"/v1/messages\?.*anthropic_url"),
    ):
        ai.messages.create(model=episode.model, messages=MESSAGES, max_tokens=20)
    with (
        openai.OpenAI(base_url=job.url, api_key=episode.api_key) as ai,
        pytest.raises(openai.NotFoundError, match=r"/v1/chat/completions\?"),
    ):
        ai.chat.completions.create(model=episode.model, messages=MESSAGES)
    for path in ("/v1/claim_episode", "/v1/v1/claim_episode"):
        answer = httpx2.post(job.url + path, headers={"authorization": f"Bearer {KEY}"})
        assert (answer.status_code, "did you mean /claim_episode?" in answer.text) == (404, True)
    answer = httpx2.post(f"{job.url}/nothing", headers={"authorization": f"Bearer {KEY}"})
    assert (answer.status_code, "did you mean" in answer.text) == (404, False)


# Thinking

THINKING: tuple[Any, ...] = ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"})


def test_a_model_that_does_not_reason_refuses_to_think_in_words(episode):
    thinking, adaptive = THINKING
    with anthropic.Anthropic(base_url=episode.anthropic_url, api_key=episode.api_key) as ai:
        ask: Any = {"model": episode.model, "messages": MESSAGES}
        for create in (ai.messages.create, ai.messages.stream):
            with (
                pytest.raises(anthropic.BadRequestError, match="thinking out"),
                create(**ask, max_tokens=2000, thinking=thinking),
            ):
                pass
        with pytest.raises(anthropic.BadRequestError, match=r"model.*reason"):
            ai.messages.count_tokens(**ask, thinking=thinking)
        for no_request in (adaptive, {"type": "disabled"}):
            assert ai.messages.create(**ask, max_tokens=2000, thinking=no_request).usage.output_tokens
            assert ai.messages.count_tokens(**ask, thinking=no_request).input_tokens


async def test_a_model_that_reasons_thinks_with_the_tokens_of_its_answer(tmp_path: Path):
    tokenizer = ByteTokenizer()
    renderer = ChatMLRenderer(tokenizer, ChatMLConfig(reasons=True))
    parts = parts_of(renderer, tokenizer, lambda prompt, seed: "<think>\nhm\n</think>\n\nyes")
    settings = {"policies": {"policy": {"sampling": {"max_tokens": 64}}}}
    async with (
        serving(tmp_path, parts, **settings) as job,
        episode_of(job) as (of_openai, _),
        anthropic.AsyncAnthropic(base_url=job.url, api_key=of_openai.api_key, max_retries=0) as ai,
    ):
        ask: Any = {"model": "policy", "messages": MESSAGES}
        for thinking in (*THINKING, {"type": "disabled"}):
            reply = await ai.messages.create(**ask, max_tokens=2000, thinking=thinking)
            assert [block.type for block in reply.content] == ["thinking", "text"]
            assert (await ai.messages.count_tokens(**ask, thinking=thinking)).input_tokens
        async with ai.messages.stream(**ask, max_tokens=2000) as stream:
            streamed = (await stream.get_final_message()).content[0]
        assert streamed.type == "thinking"
        assert streamed.signature == reply.content[0].signature != ""
        small: Any = {"type": "enabled", "budget_tokens": 8}
        raw = await ai.messages.with_raw_response.create(**ask, max_tokens=64, thinking=small)
        assert raw.headers["x-palestra-sampling"] == "budget_tokens=64"
        wrong: tuple[Any, ...] = (
            {"type": "enabled", "budget_tokens": 2000},
            {"type": "enabled"},
            {"type": "adaptive", "display": "omitted"},
            {"type": "often"},
        )
        for thinking in wrong:
            with pytest.raises(anthropic.APIStatusError, match="thinking") as caught:
                await ai.messages.create(**ask, max_tokens=2000, thinking=thinking)
            assert caught.value.status_code in (400, 422)


# What a framework always sends


@pytest.fixture(scope="module")
def lenient(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("lenient"), SETTINGS | {"server": {"unknown_fields": "ignore"}}) as job:
        job.start()
        yield job


def test_sampling_that_training_cant_have_is_refused_with_the_setting_that_ignores_it(episode):
    with anthropic.Anthropic(base_url=episode.anthropic_url, api_key=episode.api_key) as ai:
        for more in ({"top_p": 0.9}, {"top_k": 5}):
            with pytest.raises(anthropic.BadRequestError, match=r"server.unknown_fields"):
                ai.messages.create(model=episode.model, messages=MESSAGES, max_tokens=20, extra_body=more)


@pytest.mark.slow
def test_a_job_can_ignore_sampling_that_training_cant_have_and_says_so(lenient):
    with Client(lenient.url, KEY) as client, Plane(lenient.url) as plane:
        episode = client.begin_episode()
        assert episode is not None
        with anthropic.Anthropic(base_url=episode.anthropic_url, api_key=episode.api_key) as ai:
            raw = ai.messages.with_raw_response.create(
                model=episode.model, messages=MESSAGES, max_tokens=20, extra_body={"top_p": 0.9, "top_k": 5}
            )
            assert raw.headers["x-palestra-sampling"] == "top_p=1, top_k=0"
        with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as ai:
            ask: Any = {"model": episode.model, "messages": MESSAGES, "max_tokens": 20}
            more: Any = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"7": -1}}
            said = ai.chat.completions.with_raw_response.create(**ask, **more, extra_body={"min_tokens": 3})
            fields = "min_tokens=0, presence_penalty=0, frequency_penalty=0, logit_bias=none"
            assert said.headers["x-palestra-sampling"] == fields
            streamed = ai.chat.completions.with_raw_response.create(**ask, top_p=0.5, stream=True)
            assert streamed.headers["x-palestra-sampling"] == "top_p=1"
            assert list(streamed.parse())
            response = ai.responses.with_raw_response.create(model=episode.model, input="hello", top_p=0.5)
            assert response.headers["x-palestra-sampling"] == "top_p=1"
        assert plane.status()["calls"]["sampling_overruled"] == 4


# What coding agents send beside the prompt


async def test_unknown_fields_are_refused_with_the_setting_that_ignores_and_counts_them(tmp_path: Path):
    sent: Any = {"no_such_field": 1, "output_config": {"effort": "high"}}
    ask: Any = {"model": "policy", "messages": MESSAGES, "extra_body": sent}
    for setting in ("refuse", "ignore"):
        (tmp_path / setting).mkdir()
        async with (
            serving(tmp_path / setting, server={"port": 0, "unknown_fields": setting}) as job,
            episode_of(job) as (of_openai, _),
            anthropic.AsyncAnthropic(base_url=job.url, api_key=of_openai.api_key, max_retries=0) as ai,
        ):
            if setting == "refuse":
                for asked in (ai.messages.create(**ask, max_tokens=20), ai.messages.count_tokens(**ask)):
                    with pytest.raises(anthropic.BadRequestError, match=r"no_such_field.*server.unknown_fields"):
                        await asked
                assert job.plane.ignored == {}
                continue
            await ai.messages.create(**ask, max_tokens=20)
            await ai.messages.count_tokens(**ask)
            with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):  # it would change what is sampled
                await ai.messages.create(**ask | {"extra_body": {"mcp_servers": [{}]}}, max_tokens=20)
            assert job.plane.ignored == {"output_config.effort": 2, "no_such_field": 2}
            async with httpx2.AsyncClient(headers={"authorization": f"Bearer {job.plane.keys.job_key}"}) as client:
                status = (await client.get(f"{job.url}/status")).json()
                (run,) = (await client.get(f"{job.url}/dashboard/api/runs")).json()["runs"]
            assert status["ignored_fields"] == run["live"]["ignored_fields"] == job.plane.ignored
