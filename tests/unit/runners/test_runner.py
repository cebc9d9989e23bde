from __future__ import annotations

import asyncio
import sqlite3

import numpy as np
import pytest

from palestra.agents import ModelAgent
from palestra.envs import ConcurrentEnvironment, Environment
from palestra.errors import EngineFailure, EnvironmentFailed, EpisodeForfeited, EpisodeLeaseExpired, RolloutFailed
from palestra.rollout import RolloutSpec, Termination
from palestra.runners import Runner
from palestra.session import Sessions
from palestra.types.messages import text_message
from palestra.types.states import EpisodeState
from unit.building import TASK, rows_of
from unit.session.conftest import STOP


class Countdown(Environment):
    """Three steps; rewards 1, 2, 3; the observations say the step."""

    truncates = False

    def reset(self, task):
        self.step_number = 0
        return f"start {task['question']}", {}

    def step(self, action):
        self.step_number += 1
        over = self.step_number == 3
        return (
            f"step {self.step_number}",
            float(self.step_number),
            over and not self.truncates,
            over and self.truncates,
            {},
        )


def runner(bench, environment=Countdown, timeout_seconds=None, **kw) -> Runner:
    play = RolloutSpec(environment=environment, **kw)
    return Runner(Sessions(bench.context, 10), play, timeout_seconds=timeout_seconds)


async def test_an_episode_is_played_to_its_end_with_rewards_by_time_step(bench):
    trajectory = await runner(bench, system="Be quick.", max_tokens=9).play_episode()
    assert trajectory.episode.state is EpisodeState.COMPLETED
    assert (trajectory.episode.reward, trajectory.episode.step_rewards) == (6.0, (1.0, 2.0, 3.0))
    assert [(s.index, s.reward, s.terminated) for s in trajectory.steps] == [
        (0, 1.0, False),
        (1, 2.0, False),
        (2, 3.0, True),
    ]
    assert [m.text for m in trajectory.chats[-1].messages] == [
        "Be quick.",
        "start 1 + 1",
        "go",
        "step 1",
        "go",
        "step 2",
    ]
    (row,) = rows_of(trajectory.chats)
    assert bytes(row.ids[row.loss_mask & (row.ids < 256)].tolist()) == b"gogogo"
    assert int(row.loss_mask.sum()) == 9
    assert {c.sampling.max_tokens for c in trajectory.chats} == {9}
    assert await runner(bench).play_episode() is None


async def test_the_masks_are_those_of_calls_over_a_session(bench):
    """Only what was sampled is trained; what the environment said is not."""
    trajectory = await runner(bench).play_episode()
    (row,) = rows_of(trajectory.chats)
    context = bytes(int(i) for i in row.ids[~row.loss_mask] if i < 256)
    assert b"step 1" in context
    assert b"go" not in context.replace(b"start 1 + 1", b"")
    assert np.isnan(row.logprobs[~row.loss_mask]).all()


async def test_an_environment_that_fails_is_no_reward_of_zero(bench):
    class Broken(Countdown):
        def step(self, action):
            raise EnvironmentFailed("no network")

    with pytest.raises(RolloutFailed, match="EnvironmentFailed") as failed:
        await runner(bench, Broken).play_episode()
    assert failed.value.termination == "environment_failed"
    episode = await bench.store.episodes.get("train-000000-00")
    assert (episode.state, episode.reward) == (EpisodeState.REGISTERED, None)
    assert (await runner(bench).play_episode()).episode.attempts == 2


async def test_a_lease_that_is_lost_is_not_given_back_a_second_time(bench):
    """It is somebody else's episode by then."""

    class Lost(Countdown):
        def step(self, action):
            raise EpisodeLeaseExpired("over")

    with pytest.raises(EpisodeLeaseExpired):
        await runner(bench, Lost).play_episode()
    assert (await bench.store.episodes.get("train-000000-00")).state is EpisodeState.CLAIMED


async def test_a_world_that_is_cut_off_ends_the_episode_too(bench):
    class Cut(Countdown):
        truncates = True

    assert (await runner(bench, Cut).play_episode()).episode.reward == 6.0


async def given_back(bench, reason: str) -> bool:
    episode = await bench.store.episodes.get("train-000000-00")
    with sqlite3.connect(bench.folder / "run.db") as db:
        said = db.execute("SELECT reason FROM episodes").fetchone()[0]
    return episode.state is EpisodeState.REGISTERED and episode.reward is None and said.startswith(reason)


async def test_an_engine_that_fails_is_told_from_an_environment_that_does(bench):
    def script(prompt, sampling):
        raise EngineFailure("no memory")

    bench.script = script
    with pytest.raises(RolloutFailed, match="no memory") as failed:
        await runner(bench).play_episode()
    assert failed.value.termination == Termination.ENGINE_FAILED
    assert await given_back(bench, "engine_failed: ")


async def test_an_environment_that_can_not_be_made_or_set_up_failed(bench):
    def broken():
        raise OSError("no display")

    class NoServer(Countdown):
        def setup(self):
            raise ConnectionError("no server")

    for environment, said in ((broken, "no display"), (NoServer, "no server")):
        with pytest.raises(RolloutFailed, match=said) as failed:
            await runner(bench, environment).play_episode()
        assert failed.value.termination == Termination.ENVIRONMENT_FAILED


async def test_an_episode_that_takes_too_long_is_ended_and_given_back(bench):
    class Slow(ConcurrentEnvironment):
        ended = None

        async def start(self, task):
            self.emit("agent", (text_message("user", "?"),))

        async def on_action(self, observation, action):
            try:
                await asyncio.sleep(60)
            finally:
                Slow.ended = True

    played = await asyncio.wait_for(runner(bench, Slow, timeout_seconds=0.05).play_episode(), 60)
    assert (played.episode.reward, played.episode.facts["termination"]) == (0.0, "forfeit")
    assert Slow.ended


async def test_an_agent_that_takes_too_long_gives_the_episode_back(bench):
    await bench.engine.pause()
    with pytest.raises(RolloutFailed, match=r"0\.05 s") as failed:
        await asyncio.wait_for(runner(bench, timeout_seconds=0.05).play_episode(), 60)
    assert failed.value.termination == Termination.TIMED_OUT
    assert await given_back(bench, "timed_out: ")


async def test_an_environment_that_fails_before_any_action_is_at_fault(bench):
    class Late(Countdown):
        def reset(self, task):
            raise EpisodeForfeited("the browser did not answer")

    with pytest.raises(RolloutFailed, match="browser") as failed:
        await runner(bench, Late, timeout_seconds=60).play_episode()
    assert failed.value.termination == Termination.ENVIRONMENT_FAILED


@pytest.mark.parametrize(("least", "earned", "reward"), [(0.0, 2.0, 0.0), (0.0, -2.0, -2.0), (-1.0, 2.0, -1.0)])
async def test_what_an_action_breaks_is_the_agents_loss(bench, least, earned, reward):
    """It keeps no reward that playing on might have taken away, and is spared none that it had to fear."""

    class Breaks(Countdown):
        forfeit_reward = least
        steps = 0

        def step(self, action):
            self.steps += 1
            if self.steps == 2:
                raise KeyError("the world broke")
            return "go on", earned, False, False, {}

    episode = (await runner(bench, Breaks).play_episode()).episode
    assert (episode.reward, episode.attempts, sum(episode.step_rewards)) == (reward, 1, reward)
    assert episode.facts["termination"] == "forfeit"
    assert "KeyError: 'the world broke'" in episode.facts["info"]["1"]


async def test_a_forfeit_leaves_no_named_reward_that_counts(bench):
    class Breaks(Countdown):
        steps = 0

        def step(self, action):
            self.steps += 1
            if self.steps == 2:
                raise KeyError("the world broke")
            return "go on", {"right": 1.0, "slow": -0.5}, False, False, {}

    episode = (await runner(bench, Breaks).play_episode()).episode
    assert (episode.reward, episode.named_rewards) == (-0.5, {"right": 0.0, "slow": -0.5})


async def test_a_runner_that_is_cancelled_gives_its_episode_back(bench):
    await bench.engine.pause()
    playing = asyncio.ensure_future(runner(bench).play_episode())
    while not (await bench.store.episodes.counts()).claimed:
        await asyncio.sleep(0.001)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert await given_back(bench, "cancelled: ")


async def test_a_slow_environment_does_not_lose_its_lease(bench):
    """No call renews it meanwhile."""

    class Slow(Countdown):
        blocking = False

        def step(self, action):
            bench.clock.advance(1000)
            return super().step(action)

    playing = asyncio.ensure_future(runner(bench, Slow).play_episode())
    while not playing.done():
        await bench.store.episodes.expire_leases()
        await asyncio.sleep(0)
    assert (await playing).episode.state is EpisodeState.COMPLETED


async def test_times_and_what_was_seen_last_are_recorded(bench):
    trajectory = await runner(bench).play_episode()
    times = trajectory.episode.step_times
    assert len(times) == len(trajectory.steps) == 3
    assert all(time.observed_at <= time.acted_at for time in times)
    assert [(s.observed_at, s.acted_at) for s in trajectory.steps] == list(times)
    assert trajectory.episode.metadata == {"termination": "done", "last_seen": "step 3"}
    assert bench.context.counts["observations"] == 4


async def test_environments_that_may_be_used_again_are_kept_and_closed_at_the_end(bench):
    await bench.store.groups.register("train", 1, 1, TASK, 2)
    log = []

    class Reusable(Countdown):
        reusable = True

        def setup(self):
            log.append("setup")

        def reset(self, task):
            log.append("reset")
            return super().reset(task)

        def close(self):
            log.append("close")

    async with runner(bench, Reusable) as kept:
        for _ in range(3):
            await kept.play_episode()
    assert log == ["setup", "reset", "reset", "reset", "close"]


async def test_one_that_failed_is_not_used_again(bench):
    made = []

    class Sometimes(Countdown):
        reusable = True

        def __init__(self):
            made.append(self)

        def step(self, action):
            if len(made) == 1:
                raise ValueError("odd state")
            return super().step(action)

    async with runner(bench, Sometimes) as kept:
        assert (await kept.play_episode()).episode.facts["termination"] == "forfeit"
        await bench.store.groups.register("train", 1, 1, TASK, 1)
        await kept.play_episode()
    assert len(made) == 2


async def test_closing_that_fails_costs_no_reward(bench, caplog):
    class Sticky(Countdown):
        def close(self):
            raise OSError("still open")

    assert (await runner(bench, Sticky).play_episode()).episode.reward == 6.0
    assert "closing a Sticky failed: OSError: still open" in caplog.text


async def test_an_agent_that_nobody_plays_is_an_error_that_says_so(bench):
    with pytest.raises(RolloutFailed, match=r"'agent'.*'judge'"):
        await runner(bench, agents={"judge": ModelAgent()}).play_episode()


async def test_a_reply_is_held_to_choices(bench):
    bench.script = lambda prompt, sampling: [*b"left", STOP]
    trajectory = await runner(bench, agents={"": ModelAgent(choices=("left", 'r"ight'))}).play_episode()
    assert {c.sampling.grammar for c in trajectory.chats} == {'start: "left" | "r\\"ight"\n'}
