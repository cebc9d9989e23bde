from __future__ import annotations

import numpy as np
import pytest

from palestra.envs import Environment
from palestra.errors import EpisodeLeaseExpired
from palestra.rollout.runner import Runner
from palestra.schemas.states import EpisodeState
from palestra.session import Sessions
from unit.building import TASK, FakeClock, rows_of
from unit.session.conftest import STOP, Bench


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


@pytest.fixture
async def bench(tmp_path):
    bench = Bench(tmp_path, FakeClock())
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    await bench.store.register_group("train", 0, 1, TASK, 1)
    yield bench
    bench.store.close()


def runner(bench, environment=Countdown, **kw) -> Runner:
    return Runner(sessions=Sessions(bench.context, 10), make_environment=environment, **kw)


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
    assert bytes(row.ids[row.sampled & (row.ids < 256)].tolist()) == b"gogogo"
    assert int(row.sampled.sum()) == 9
    assert {c.sampling.max_tokens for c in trajectory.chats} == {9}
    assert await runner(bench).play_episode() is None


async def test_the_masks_are_those_of_calls_over_a_session(bench):
    """Only what was sampled is trained; what the environment said is not."""
    trajectory = await runner(bench).play_episode()
    (row,) = rows_of(trajectory.chats)
    context = bytes(int(i) for i in row.ids[~row.sampled] if i < 256)
    assert b"step 1" in context
    assert b"go" not in context.replace(b"start 1 + 1", b"")
    assert np.isnan(row.logprobs[~row.sampled]).all()


async def test_an_environment_that_fails_is_no_reward_of_zero(bench):
    class Broken(Countdown):
        def step(self, action):
            raise ConnectionError("no network")

    with pytest.raises(ConnectionError):
        await runner(bench, Broken).play_episode()
    episode = await bench.store.episode("train-000000-00")
    assert (episode.state, episode.reward) == (EpisodeState.REGISTERED, None)
    assert (await runner(bench).play_episode()).episode.attempts == 2


async def test_a_lease_that_is_lost_is_not_given_back_a_second_time(bench):
    """It is somebody else's episode by then."""

    class Lost(Countdown):
        def step(self, action):
            raise EpisodeLeaseExpired("over")

    with pytest.raises(EpisodeLeaseExpired):
        await runner(bench, Lost).play_episode()
    assert (await bench.store.episode("train-000000-00")).state is EpisodeState.CLAIMED


async def test_a_world_that_is_cut_off_ends_the_episode_too(bench):
    class Cut(Countdown):
        truncates = True

    assert (await runner(bench, Cut).play_episode()).episode.reward == 6.0
