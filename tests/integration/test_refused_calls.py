"""Model calls that are refused are counted on their episode, and an episode without an answered call has no reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from in_process import serving

from palestra.client import AsyncClient
from palestra.errors import InvalidRequest
from palestra.types.records import REFUSED_CALLS, Task
from palestra.types.states import EpisodeState

ASK: Any = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
TASK = Task(task_id="t", data={"text": "hello"})
REFUSED: Any = {"extra_body": {"chat_template": "x"}}
SETTINGS: Any = {"rollout": {"group_size": 2, "groups_per_step": 1}, "steps": 1}


async def refuse(ai: openai.AsyncOpenAI, **more: Any) -> None:
    with pytest.raises(openai.APIStatusError):
        await ai.chat.completions.create(**ASK | more)


async def test_refused_calls_are_counted_on_the_episode_and_its_reward_stands(tmp_path: Path):
    async with serving(tmp_path, **SETTINGS) as job, AsyncClient(job.url, job.api_key) as client:
        await job.plane.store.groups.register("train", 0, 1, TASK, 2)
        episode = await client.begin_episode()
        assert episode is not None
        async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as ai:
            for stream in (False, True):
                await refuse(ai, **REFUSED, stream=stream)
            await refuse(ai, model="gpt-4o")
            await refuse(ai, messages=[{"role": "user", "content": "x" * 100_000}], stream=True)
            await ai.chat.completions.create(**ASK)
        for _ in range(2):  # the second answer is the first one's: what the server has counted is no part of the report
            await client.end_episode(episode, 1.0)
        found = await job.plane.store.episodes.get(episode.episode_id)
    assert found.rewards == {"agent": 1.0}
    expected = {"unsupported_field chat_template": 2, "not_found": 1, "context_overflow": 1}
    assert found.facts[REFUSED_CALLS] == expected


async def test_an_episode_in_which_every_call_was_refused_has_no_reward(tmp_path: Path):
    async with serving(tmp_path, **SETTINGS) as job, AsyncClient(job.url, job.api_key) as client:
        await job.plane.store.groups.register("train", 0, 1, TASK, 2)
        episode = await client.begin_episode()
        assert episode is not None
        async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as ai:
            await refuse(ai, **REFUSED)
        with pytest.raises(InvalidRequest, match="chat_template"):
            await client.end_episode(episode, 0.0)
        await client.abort_episode(episode, "its calls were refused")
        assert (await job.plane.store.episodes.get(episode.episode_id)).state is EpisodeState.REGISTERED
        silent = await client.begin_episode()  # its agent asks for nothing, which is its own affair
        assert silent is not None
        await client.end_episode(silent, 0.0)
        found = await job.plane.store.episodes.get(silent.episode_id)
    assert (found.rewards, found.facts) == ({"agent": 0.0}, {})
