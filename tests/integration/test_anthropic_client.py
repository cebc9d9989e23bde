"""Anthropic's own client against a real server, with nothing but what an episode says."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx2
import openai
import pytest
from servers import KEY, SCRIPTED, Job, Plane

from palestra import Client
from palestra.client.episode import Episode

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("anthropic"), SCRIPTED | {"steps": 100}) as job:
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
