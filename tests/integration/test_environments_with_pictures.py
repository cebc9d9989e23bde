"""Episodes whose observations are pictures: in the job's process, on a worker, and behind an environment server."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from env_servers import EnvServer
from seeing import SeeingRenderer

from palestra.client import AsyncClient, Worker
from palestra.config import parse_config
from palestra.envs import Environment
from palestra.pictures.decoding import decode
from palestra.rollout import EnvironmentPlayer, RolloutSpec
from palestra.runtime import local
from palestra.runtime.local import local_job

JOB: dict[str, Any] = {
    "engine": {"kind": "fake", "reply_tokens": 3},
    "server": {"port": 0},
    "steps": 1,
    "deterministic": True,
    "rollout": {"group_size": 3, "groups_per_step": 2},
    "evaluation": {"every_steps": 0},
}
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
        pixels = [np.asarray(decode(store.pictures.get(name)))[0, 0].tolist() for name in store.pictures]
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
