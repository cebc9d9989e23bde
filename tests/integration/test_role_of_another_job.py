"""A role that another job's policy plays and learns: two jobs train from the same games, whoever of them dies."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import HERE, KEY, TINY, Job, Process, until
from test_seats import TASKS, Talk, score

from palestra import JobConfig, RolloutSpec, SeatEnvironment
from palestra.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    JobOver,
    NotFound,
    PalestraError,
    RolloutFailed,
    Unauthorized,
)
from palestra.runtime.local import local_job
from palestra.store.browsing import read_episodes
from palestra.store.key_files import read_secret, seat_key
from palestra.types.messages import text_message
from palestra.types.records import Task

pytestmark = pytest.mark.ci

SEATS = {"roles": ["black"], "takeover": "replay"}


@asynccontextmanager
async def running(folder: Path, environment: Any, tasks: list[dict[str, Any]], **changes: Any):
    """A job with its tasks, and its work."""
    settings = {
        "name": folder.name,
        "steps": 2,
        "run_dir": folder,
        "server": {"port": 0},
        "engine": {"kind": "fake", "reply_tokens": 6},
        "rollout": {"group_size": 2, "groups_per_step": 1, "lease_seconds": 60.0},
        "evaluation": {"every_steps": 0},
    } | changes
    spec = RolloutSpec(environment=environment)
    async with local_job(JobConfig.model_validate(settings), lambda kind, data: None, spec) as job:
        await job.plane.store.tasks.push("train", [Task(task_id=t["id"], data=t) for t in tasks], "c")
        await job.plane.store.tasks.seal()
        work = asyncio.ensure_future(job.run())
        try:
            yield job, work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def game(folder: Path, environment: Any = Talk, **changes: Any):
    """The job that has the game, and in which white learns."""
    return running(folder, environment, TASKS, **{"seats": SEATS} | changes)


def rival(folder: Path, url: str, key: str, **changes: Any):
    """The job whose policy plays black."""
    return running(folder, SeatEnvironment("black", url, key), [{"id": "any"}], **changes)


def key_of(folder: Path, role: str = "black") -> str:
    """The key of a seat, as `palestra seat-key` prints it."""
    return seat_key(read_secret(folder), folder.name, role)


async def trained(job: Any) -> list[Any]:
    """All episodes of the job's manifests, in order."""
    log, calls = job.plane.store.log, job.plane.store.calls
    return [one for step in (1, 2) for one in await calls.trajectories((await log.manifest(step)).episode_ids)]


async def test_two_jobs_learn_from_the_same_games_each_its_own_side(tmp_path):
    async with (
        game(tmp_path / "white") as (white, learns),
        rival(tmp_path / "black", white.url, key_of(tmp_path / "white")) as (black, learns_too),
    ):
        await asyncio.wait_for(asyncio.gather(learns, learns_too), 30)
        ours = {one.episode.episode_id: one for one in await trained(white)}
        theirs = {json.loads(one.episode.facts["info"]["reset"])["episode"]: one for one in await trained(black)}
        assert len(ours) == 4
        assert ours.keys() == theirs.keys()
        for name, mine in ours.items():
            other = theirs[name]
            assert [(c.agent, c.policy, c.time_step) for c in mine.chats] == [("white", "policy", n) for n in (0, 2)]
            assert [(c.agent, c.policy, c.time_step) for c in other.chats] == [("black", "policy", n) for n in (0, 1)]
            said = [c.reply.text for pair in zip(mine.chats, other.chats, strict=True) for c in pair]
            assert [m.text for c in mine.chats for m in c.new_messages if m.role == "user"] == [
                "secret of white: begin", f"secret of white: {said[1]}",
            ]  # fmt: skip
            assert [m.text for m in other.chats[1].messages] == [
                f"secret of black: {said[0]}", said[1], f"secret of black: {said[2]}",
            ]  # fmt: skip
            earned = score(*said)
            assert mine.episode.rewards == {"white": earned, "black": -earned}
            assert mine.episode.rewards_by_policies == {"white": earned}
            assert other.episode.rewards == {"black": -earned}
            assert other.episode.step_rewards == (0.0, -earned)
        # What is trained is each side's own calls and reward: a sum over both sides would be 0.
        for job, games in ((white, ours), (black, theirs)):
            rows = await job.plane.store.log.metrics()
            for row, step in zip(rows, (list(games.values())[:2], list(games.values())[2:]), strict=True):
                assert row["train/trained_tokens"] == sum(len(c.completion_ids) for g in step for c in g.chats)
                own = [sum((g.episode.rewards_by_policies or {}).values()) for g in step]
                assert row["train/reward_mean"] == pytest.approx(sum(own) / 2) != 0
        versions = {str(c.versions[0].version) for g in list(theirs.values())[2:] for c in g.chats}
        assert versions == {"0.1"}, "the second step was played by black's own new weights"


async def seated(url: str, key: str, role: str = "black") -> SeatEnvironment:
    """A seat that is claimed by hand."""
    seat = SeatEnvironment(role, url, key)
    await seat.setup()
    await seat.reset({})
    return seat


async def refusal(*seat: str) -> type[PalestraError]:
    environment = await seated(*seat)
    try:
        with pytest.raises(PalestraError) as refused:
            await asyncio.wait_for(environment.observe(), 10)
        return refused.type
    finally:
        await environment.close()


async def test_what_does_not_fit_is_refused_by_name(tmp_path):
    both = {"roles": ["black", "white"]}
    async with game(tmp_path / "white", seats=both) as (white, _), game(tmp_path / "alone", seats={}) as (alone, _):
        assert await refusal(white.url, white.api_key, "red") is NotFound
        assert await refusal(white.url, alone.api_key) is Unauthorized
        assert await refusal(white.url, key_of(tmp_path / "white", "white")) is Forbidden
        assert await refusal(alone.url, alone.api_key) is Conflict


@pytest.mark.parametrize(
    "given", [{}, {"url": "http://127.0.0.1:1", "job": "j"}, {"job": "j", "key": "k"}, {"url": "127.0.0.1"}]
)
def test_a_seat_is_of_one_job(given, monkeypatch):
    monkeypatch.setenv("PALESTRA_SEAT_KEY", "k")
    with pytest.raises(ConfigError):
        SeatEnvironment("black", **given)


def test_the_key_of_a_workers_own_job_is_never_sent_to_the_other(monkeypatch):
    monkeypatch.setenv("PALESTRA_API_KEY", "of the worker's own job")
    monkeypatch.delenv("PALESTRA_SEAT_KEY", raising=False)
    with pytest.raises(ConfigError):
        SeatEnvironment("black", "http://127.0.0.1:7411")


@pytest.mark.slow
async def test_the_end_of_the_game_ends_the_rival_without_a_lost_attempt(tmp_path):
    async with game(tmp_path / "white", steps=1) as (white, learns):
        async with rival(tmp_path / "black", white.url, white.api_key) as (black, learns_too):
            await asyncio.wait_for(learns, 30)
            with pytest.raises(JobOver):
                await asyncio.wait_for(learns_too, 30)
            assert (black.progress.state, black.progress.step) == ("failed", 1)
        left = [one for one in read_episodes(tmp_path / "black", "train", None) if one.state != "completed"]
        assert left
        assert all(one.attempts <= 1 for one in left)


async def test_a_game_that_is_taken_back_fails_the_attempt_and_is_nobodys_loss(tmp_path):
    async with game(tmp_path / "white") as (white, _):
        seat = await seated(white.url, white.api_key)
        shown = await asyncio.wait_for(seat.observe(), 10)
        (table,) = white.plane.sessions.seats._tables.values()
        table.fail("seat_lost", "as if another worker had left")
        await until_async(lambda: not white.plane.sessions.seats._tables)
        seat.act(shown.id, text_message("assistant", "x"))
        with pytest.raises(RolloutFailed) as failed:
            await asyncio.wait_for(seat.observe(), 10)
        assert failed.value.termination == "seat_lost"
        await seat.close()


async def test_an_attempt_that_ends_gives_its_seat_back_and_the_next_one_goes_on_with_the_game(tmp_path):
    async with game(tmp_path / "white", seats=SEATS | {"takeover": "worker"}) as (white, _):
        first = await seated(white.url, white.api_key)
        begun = await asyncio.wait_for(first.observe(), 10)
        first.act(begun.id, text_message("assistant", "hello"))
        left = await asyncio.wait_for(first.observe(), 10)
        await first.abandon()
        second = first()
        await second.setup()
        assert second._client is first._client, "one client, so that one of them says what is wrong with the other job"
        await second.reset({})
        found = await asyncio.wait_for(second.observe(), 10)
        assert [message.role for message in found.content] == ["user", "assistant", "user"]
        assert found.content == (*begun.content, text_message("assistant", "hello"), *left.content)
        second.act(found.id, text_message("assistant", "bye"))
        end = await asyncio.wait_for(second.observe(), 10)
        assert end.terminated
        assert end.reward == pytest.approx(float(end.content[0].text.split()[-1]), abs=1e-3)
        await first.close()
        assert second._other._client is not None, "it is still used"
        await second.close()
        assert second._other._client is None


async def test_a_subagent_without_an_answer_leaves_the_seat(tmp_path):
    async with game(tmp_path / "white") as (white, _):
        seat = await seated(white.url, white.api_key)
        shown = await asyncio.wait_for(seat.observe(), 10)
        seat.cancel(shown.id)
        with pytest.raises(PalestraError):
            await asyncio.wait_for(seat.observe(), 10)
        await until_async(lambda: not white.plane.sessions.seats._tables)  # the game does not wait for the lease
        await seat.close()


class Long(Talk):
    """Black is told more than its context can hold."""

    def _show(self, name, text, *parents):
        super()._show(name, "long " * 500 if name == "black" else text, *parents)


@pytest.mark.slow
async def test_a_full_context_fails_the_attempt_and_does_not_spare_a_loss(tmp_path):
    small = {"policies": {"policy": {"max_context": 256}}, "rollout": {"group_size": 2, "max_attempts": 1}}
    async with game(tmp_path / "white", Long) as (white, _):
        async with rival(tmp_path / "black", white.url, white.api_key, **small) as (_, learns_too):
            with pytest.raises(PalestraError):
                await asyncio.wait_for(learns_too, 30)
        assert not read_episodes(tmp_path / "black", "train", "completed")
        assert read_episodes(tmp_path / "black", "train", "discarded")


async def until_async(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


# Processes, with a real, tiny model on both sides.

WHITE = TINY | {
    "steps": 20,  # more than the rival plays, whose kills cost games
    "environment": {"name": "kuhn-poker", "validation_tasks": 0},
    "seats": {"roles": ["second"], "takeover": "replay"},
    "rollout": {"group_size": 3, "groups_per_step": 2, "lease_seconds": 2.0},
    "evaluation": {"every_steps": 0},
    "checkpoint": {"every_steps": 1},
}


def join(job: Job, number: int, *options: str) -> Process:
    """Start the job that plays and trains `second`, in a process of its own."""
    command = [sys.executable, HERE / "rival_process.py", job.url, job.folder / "rival", *options]
    job.workers.append(Process.start(command, job.folder / f"rival-{number}.log", settings={"PALESTRA_SEAT_KEY": KEY}))
    return job.workers[-1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rival", "game"])
def test_a_kill_of_either_job_loses_no_step_and_mixes_no_game(tmp_path, victim):
    with Job(tmp_path / "game", WHITE, tasks=(), validation=()) as job:
        job.start()
        rivals = [join(job, 0)]
        steps = job.folder / "rival" / "metrics.jsonl"
        until(lambda: steps.exists() and steps.read_text().count("\n"), "a step of the rival")
        if victim == "rival":
            rivals[0].kill()
            rivals.append(join(job, 1, "--resume"))
        else:
            job.servers[-1].kill()
            job.start("--resume")
        assert rivals[-1].wait() == 0, rivals[-1].output
        job.servers[-1].send(signal.SIGTERM)
        job.servers[-1].wait()
        ours = {one.episode_id: one for one in read_episodes(job.run_dir, "train")}
        theirs = read_episodes(job.folder / "rival", "train")
        assert len(theirs) == 18
        played = {json.loads(one.metadata["info"]["reset"])["episode"]: one for one in theirs}
        assert len(played) == 18, "no game is learned from twice"
        assert played.keys() <= ours.keys()
        for name, one in played.items():
            assert one.rewards == {"second": ours[name].rewards["second"]}
            assert ours[name].metadata["without_policy"] == ["second"]
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert all(row["train/trained_tokens"] > 0 for row in rows)
