"""Episodes whose observations are pictures: in the job's process, on a worker, and behind an environment server."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from env_servers import EnvServer
from seeing import SeeingRenderer

from palestra.agents import Agent
from palestra.client import AsyncClient, Worker
from palestra.config import parse_config
from palestra.envs import Environment, ToolEnvironment
from palestra.pictures.containers import PictureLimits
from palestra.pictures.parts import Picture
from palestra.pictures.pixels import decode_picture
from palestra.rollout import EnvironmentPlayer, RolloutSpec
from palestra.runtime import local
from palestra.runtime.local import local_job
from palestra.server import episode_api
from palestra.store import run_store
from palestra.tools import tool
from palestra.types.messages import ChatMessage, FunctionCall, ImagePart, TextPart, ToolCall, text_message
from palestra_mcp import McpServer

JOB: dict[str, Any] = {
    "engine": {"kind": "fake", "reply_tokens": 3},
    "server": {"port": 0},
    "steps": 1,
    "deterministic": True,
    "rollout": {"group_size": 3, "groups_per_step": 2},
    "evaluation": {"every_steps": 0},
}
SLOW = pytest.mark.slow
COLOURS = [(200, 30, 30), (30, 200, 30)]


class Colours(Environment):
    """Shows a colour of the task, and then another picture that all episodes have in common."""

    max_steps = 2

    def reset(self, task: Any) -> Any:
        self.steps = 0
        return ["Which colour?", np.full((6, 8, 3), task["colour"], np.uint8)], {}

    def step(self, action: str) -> Any:
        self.steps += 1
        return np.zeros((4, 4), np.uint8), 1.0, self.steps == 2, False, {}


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the jobs of this test takes images."""
    build = local.build_parts

    def built(*arguments: Any) -> Any:
        parts = build(*arguments)
        for runtime in parts.policies.runtimes.values():
            object.__setattr__(runtime, "renderer", SeeingRenderer())
        return parts

    monkeypatch.setattr(local, "build_parts", built)


async def play(folder: Path, spec: RolloutSpec, *, outside: bool) -> tuple[list[Any], list[str]]:
    """Train a step; return the digests and ids of each call, and the pictures in the folder."""
    async with local_job(
        parse_config({"run_dir": str(folder), **JOB}), lambda *_: None, None if outside else spec
    ) as job:
        work = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key, worker_id="outside") as client:
            await client.push_tasks([{"colour": list(colour)} for colour in COLOURS])
            if outside:
                await Worker(client, EnvironmentPlayer(client, spec, await client.facts()), 2).run()
            await work
        store = job.plane.store
        found = await store.calls.trajectories(_names(store))
        calls = [
            (chat.index, tuple(span.digest for span in chat.all_media), chat.prompt_ids.tolist(), chat.fork)
            for trajectory in found
            for chat in trajectory.chats
        ]
        pixels = [np.asarray(decode_picture(store.pictures.get(name)))[0, 0].tolist() for name in store.pictures]
        assert sorted(pixels) == sorted([[0, 0, 0], *map(list, COLOURS)])
        return sorted(calls), list(store.pictures)


def _names(store: Any) -> list[str]:
    with sqlite3.connect(store.pictures.folder.parent / "run.db") as db:
        return [name for (name,) in db.execute("SELECT episode_id FROM episodes ORDER BY 1")]


@pytest.mark.slow
async def test_episodes_with_pictures_are_the_same_wherever_they_are_played(tmp_path, seeing):
    spec = RolloutSpec(environment=Colours)
    calls, pictures = await play(tmp_path / "inside", spec, outside=False)
    assert len(calls) == 2 * 3 * 2
    assert all(len(digests) == 1 + index for index, digests, *_ in calls)
    assert all(fork is None for *_, fork in calls)
    assert len(pictures) == 3  # one of each colour, and the one that all have in common
    assert await play(tmp_path / "outside", spec, outside=True) == (calls, pictures)
    with EnvServer(Colours) as server:
        remote = RolloutSpec(environment=server.remote())
        assert await play(tmp_path / "remote", remote, outside=False) == (calls, pictures)
        assert await play(tmp_path / "both", remote, outside=True) == (calls, pictures)


@pytest.mark.slow
async def test_an_environment_whose_picture_is_none_fails_the_attempt(tmp_path, seeing):
    class Broken(Environment):
        max_steps = 1

        def reset(self, task: Any) -> Any:
            return b"<svg/>", {}

        def step(self, action: str) -> Any:
            raise AssertionError

    config = parse_config({"run_dir": str(tmp_path), **JOB, "rollout": JOB["rollout"] | {"max_attempts": 1}})
    async with local_job(config, lambda *_: None, RolloutSpec(environment=Broken)) as job:
        work = asyncio.create_task(job.run())
        async with AsyncClient(job.url, job.api_key) as client:
            await client.push_tasks([{"colour": [0, 0, 0]}])
            await asyncio.wait([work], timeout=20)
        with sqlite3.connect(tmp_path / "run.db") as db:
            reasons = [str(row) for row in db.execute("SELECT * FROM events")]
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert any("no type that is taken" in reason for reason in reasons), reasons
    assert hashlib.sha256(b"<svg/>").hexdigest() not in list(job.plane.store.pictures)


class Spoils(ToolEnvironment):
    """Offers the tool `spoil` of a server of MCP, which returns a picture and one whose pixels are damaged."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).parents[1] / "unit/mcp/mcp_server.py")]
        tools = [McpServer(command, tools=["spoil"], pictures=True)]
        super().__init__(tools, lambda task, answer: 1.0, prompt=lambda task: "Look.")


def spoil() -> Any:
    """Return a picture of many bytes."""
    return np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)


class Floods(ToolEnvironment):
    """Offers a tool that returns a picture of more bytes than the job takes."""

    def __init__(self) -> None:
        super().__init__([tool(spoil)], lambda task, answer: 1.0, prompt=lambda task: "Look.")


class LooksTwice(Agent):
    """Calls the tool in its first two turns, and then answers."""

    async def step(self, observation: Any, policy: Any) -> Any:
        chat = await policy.chat((*policy.history, *observation.content))
        if len(policy.history) >= 4:
            return [chat], text_message("assistant", "seen")
        asked = ToolCall(id=f"look-{len(policy.history)}", function=FunctionCall(name="spoil", arguments="{}"))
        return [chat], ChatMessage(role="assistant", tool_calls=(asked,))


async def told(folder: Path, environment: type[ToolEnvironment], where: str) -> tuple[list[Any], list[str]]:
    """Play two episodes of two looks; return what the tool is said to have returned each time, and the pictures."""
    job = JOB | {
        "rollout": {"group_size": 2, "groups_per_step": 1, "max_attempts": 1},
        "environment": {"max_concurrency": 1},  # so that the second episode is played in the first one's environment
    }
    with EnvServer(environment) if where == "remote" else nullcontext() as server:
        played = server.remote() if server is not None else environment
        spec = RolloutSpec(environment=played, agents={"agent": LooksTwice()})
        outside = where == "outside"
        config = parse_config({"run_dir": str(folder), **job})
        async with local_job(config, lambda *_: None, None if outside else spec) as running:
            work = asyncio.create_task(running.run())
            async with AsyncClient(running.url, running.api_key, worker_id="outside") as client:
                await client.push_tasks([{"id": "a"}])
                if outside:
                    await Worker(client, EnvironmentPlayer(client, spec, await client.facts()), 1).run()
                await asyncio.wait_for(work, 30)
            store = running.plane.store
            trajectories = await store.calls.trajectories(_names(store))
            pictures = list(store.pictures)
    assert [len(one.chats) for one in trajectories] == [3, 3]
    first, other = ([m for m in one.chats[-1].messages if m.role == "tool"] for one in trajectories)
    assert first == other
    return [message.content for message in first], pictures


WHERE = ["inside", *(pytest.param(one, marks=SLOW) for one in ("outside", "remote"))]


@pytest.mark.parametrize("where", WHERE)
async def test_a_damaged_picture_of_a_tool_is_told_to_the_model_and_the_episode_goes_on(tmp_path, seeing, where):
    results, (picture,) = await told(tmp_path, Spoils, where)
    words = (
        "Error: picture 2 of the 2 that spoil returned could not be read: the file (image/png) is damaged: broken data "
        "stream when reading image file"
    )
    assert results == [(ImagePart(digest=picture), TextPart(text=words))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "outside"])
async def test_a_picture_of_a_tool_that_is_too_large_is_told_wherever_it_is_played(
    tmp_path, seeing, where, monkeypatch
):
    monkeypatch.setattr(run_store, "PictureLimits", partial(PictureLimits, max_bytes=4096))
    monkeypatch.setattr(episode_api, "MAX_PICTURE_BYTES", 4096)
    results, pictures = await told(tmp_path, Floods, where)
    size = len(Picture.of(spoil()).data)
    words = (
        f"Error: the picture that spoil returned could not be read: it has {size:,} bytes, and a picture may have 4,096"
    )
    assert (results, pictures) == ([(TextPart(text=words),)] * 2, [])
