"""What goes wrong in some episodes of a job: each ends in one recorded way, the others are as if nothing had happened.

Every third task of the job is one in which the fault happens; a step of three groups is gathered while runners play.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from palestra.agents import Agent, ModelAgent
from palestra.config import RolloutConfig
from palestra.envs import ConcurrentEnvironment, Environment, ToolEnvironment
from palestra.errors import EngineFailure, EnvironmentFailed
from palestra.learner.groups import gather_groups
from palestra.rollout import RolloutOrchestrator, RolloutSpec
from palestra.runners import Runner, RunnerPool
from palestra.session import Sessions
from palestra.tools import tool
from palestra.types.messages import text_message
from palestra.types.records import Task
from palestra.types.states import EpisodeState
from unit.building import FakeClock
from unit.session.conftest import STOP, Bench

CONFIG = RolloutConfig(group_size=3, groups_per_step=3, max_attempts=2)
STEPS = 2


class Good(Environment):
    """Two steps; a reward of 1 for each."""

    blocking = False

    def reset(self, task):
        self.faulty, self.steps = bool(task["faulty"]), 0
        return f"task {task['number']}", {}

    def step(self, action):
        self.steps += 1
        return f"seen {self.steps}", 1.0, self.steps == STEPS, False, {}


class Raises(Good):
    def step(self, action):
        if self.faulty and self.steps:
            raise ConnectionError("no network")
        return super().step(action)


class AtFault(Raises):
    def step(self, action):
        try:
            return super().step(action)
        except ConnectionError as error:
            raise EnvironmentFailed("the machine is gone") from error


class FailsToReset(Good):
    def reset(self, task):
        if task["faulty"]:
            raise FileNotFoundError("no such level")
        return super().reset(task)


class Garbage(Good):
    def step(self, action):
        return ("seen", float("nan"), False, False, {}) if self.faulty else super().step(action)


class Hangs(ConcurrentEnvironment):
    """It never answers."""

    async def start(self, task):
        self.faulty, self.steps = bool(task["faulty"]), 0
        self.emit("agent", (text_message("user", f"task {task['number']}"),))

    async def on_action(self, observation, action):
        self.steps += 1
        if self.faulty:
            await asyncio.Event().wait()
        self.emit("agent", (), parents=(observation.id,), reward=1.0, terminated=self.steps == STEPS)


class HangsInThread(Good):
    blocking = True
    over = threading.Event()

    def step(self, action):
        if self.faulty:
            self.over.wait()
        return super().step(action)


class AnswersLate(Hangs):
    """Slower than the others, and in time."""

    async def on_action(self, observation, action):
        await asyncio.sleep(0.05 if self.faulty else 0)
        self.faulty = False
        await super().on_action(observation, action)


class ForgetsToAnswer(Hangs):
    """Shows nothing any more: the episode is over, without the reward of its second step."""

    async def on_action(self, observation, action):
        if not self.faulty:
            await super().on_action(observation, action)


class Confused(Agent):
    async def step(self, observation, policy):
        chats, action = await ModelAgent().step(observation, policy)
        if "task 0" in chats[0].messages[0].text or "task 3" in chats[0].messages[0].text:
            raise KeyError("plan")
        return chats, action


def hanging_tool():
    @tool
    async def wait() -> str:
        """Wait for something that never comes."""
        await asyncio.Event().wait()
        return "done"

    return ToolEnvironment([wait], lambda task, answer: 2.0, prompt=lambda task: "task", timeout_seconds=0.02)


class Kit:
    """A job's parts, without a learner: whoever reads `gathered` is the learner."""

    def __init__(self, folder, environment: Callable, agents=None, timeout_seconds=30) -> None:
        self.bench = Bench(folder, FakeClock(), sampling={"max_tokens": 200})
        self.bench.store.episodes._rollout = CONFIG.model_copy(update={"lease_seconds": 60.0})
        self.bench.script = lambda prompt, sampling: [*b"go", STOP]
        self.store = self.bench.store
        sessions = Sessions(self.bench.context, 100)
        runner = Runner(sessions, RolloutSpec(environment=environment, agents=agents), timeout_seconds=timeout_seconds)
        self.pool = RunnerPool(sessions, runner, max_concurrency=5)
        tasks = [Task(task_id=str(i), data={"number": i, "faulty": i % 3 == 0}) for i in range(40)]

        async def tasks_of(step, indices):
            return {index: (tasks[index],) for index in indices}

        self.tasks_of = tasks_of

    async def gathered(self, step: int = 1):
        playing = asyncio.ensure_future(self.pool.run())
        gathering = asyncio.ensure_future(gather_groups(self.store, CONFIG, self.tasks_of, step, step, {"policy": 0}))
        await asyncio.wait((playing, gathering), return_when=asyncio.FIRST_COMPLETED, timeout=20)
        assert gathering.done(), (playing, await self.store.episodes.counts())
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        return await gathering

    async def episodes(self):
        found = await self.store.groups.of_step("train", 1)
        return {e.episode_id: e for _, members in found for e in members}


DROPPED = {  # every attempt at a faulty task fails: its group is dropped and replaced
    "is at fault itself": (AtFault, None, "environment_failed"),
    "fails to reset": (FailsToReset, None, "environment_failed"),
    "garbage": (Garbage, None, "environment_failed"),
    "agent raises": (Good, {"": Confused()}, "agent_failed"),
}
FORFEITED = {"raises": Raises, "hangs": Hangs, "hangs in a thread": HangsInThread}  # within an action


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    yield
    HangsInThread.over.set()


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPPED)
async def test_a_group_whose_episodes_can_not_be_played_is_replaced(tmp_path, name):
    environment, agents, reason = DROPPED[name]
    kit = Kit(tmp_path, environment, agents)
    before = asyncio.all_tasks()
    found = await kit.gathered()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()
    episodes = await kit.episodes()
    faulty = {n: e for n, e in episodes.items() if e.task.data["faulty"]}
    good = {n: e for n, e in episodes.items() if not e.task.data["faulty"]}
    assert found.dropped == len({e.group_index for e in faulty.values()}) >= 1
    assert len(found.episode_ids) == 9
    assert set(found.episode_ids) <= good.keys()
    assert {e.state for e in faulty.values()} == {EpisodeState.DISCARDED}
    assert {(e.state, e.reward, e.attempts) for n, e in good.items() if n in found.episode_ids} == {
        (EpisodeState.COMPLETED, 2.0, 1)
    }
    assert all(e.reward is None for e in faulty.values())
    counted = Counter(kit.pool.progress.terminations)
    assert counted["done"] == sum(e.state is EpisodeState.COMPLETED for e in episodes.values())
    assert counted[reason] == sum(e.attempts for e in faulty.values()) == 2 * len(faulty)
    assert set(counted) == {"done", reason}
    assert kit.pool.progress.playing == 0
    kit.store.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORFEITED)
async def test_an_episode_that_an_action_breaks_is_lost_and_not_played_again(tmp_path, name):
    HangsInThread.over.clear()
    kit = Kit(tmp_path, FORFEITED[name], timeout_seconds=1.0)
    found = await kit.gathered()
    episodes = await kit.episodes()
    assert (found.dropped, len(found.episode_ids)) == (0, 9)
    assert {(e.task.data["faulty"], e.reward, e.attempts) for n, e in episodes.items() if n in found.episode_ids} == {
        (True, 0.0, 1),
        (False, 2.0, 1),
    }
    faulty = [e for e in episodes.values() if e.task.data["faulty"] and e.reward is not None]
    assert {e.facts["termination"] for e in faulty} == {"forfeit"}
    assert all(sum(e.step_rewards) == 0.0 for e in faulty)
    assert set(kit.pool.progress.terminations) == {"done", "forfeit"}
    kit.store.close()


@pytest.mark.parametrize(("environment", "rewards"), [(AnswersLate, {2.0}), (ForgetsToAnswer, {0.0, 2.0})])
async def test_what_is_merely_slow_or_silent_is_no_failure(tmp_path, environment, rewards):
    kit = Kit(tmp_path, environment, timeout_seconds=5)
    found = await kit.gathered()
    assert (found.dropped, found.discarded, len(found.episode_ids)) == (0, 0, 9)
    assert {e.reward for e in (await kit.episodes()).values()} == rewards
    assert kit.pool.progress.terminations == {"done": 9}
    kit.store.close()


async def test_a_tool_that_hangs_is_something_that_the_model_reads(tmp_path):
    kit = Kit(tmp_path, hanging_tool, timeout_seconds=5)
    calls = b'<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'

    def script(prompt, sampling):
        read = bytes(int(i) for i in prompt if i < 256)
        return [*(b"go" if b"took longer" in read else calls), STOP]

    kit.bench.script = script
    found = await kit.gathered()
    assert (found.dropped, len(found.episode_ids)) == (0, 9)
    trajectory = (await kit.store.calls.trajectories(found.episode_ids[:1]))[0]
    assert "wait took longer than 0.02 s" in trajectory.chats[-1].messages[-1].text
    assert trajectory.episode.reward == 2.0
    kit.store.close()


async def test_an_engine_that_fails_for_a_while_costs_attempts_and_no_reward(tmp_path):
    kit = Kit(tmp_path, Good)
    failures = iter(range(3))  # fewer than are played at once: no episode fails twice

    def script(prompt, sampling):
        if next(failures, None) is not None:
            raise EngineFailure("no memory")
        return [*b"go", STOP]

    kit.bench.script = script
    found = await kit.gathered()
    assert len(found.episode_ids) == 9
    episodes = (await kit.episodes()).values()
    assert sum(e.attempts - 1 for e in episodes) == 3
    assert {e.reward for e in episodes} == {2.0}
    assert kit.pool.progress.terminations == {"done": 9, "engine_failed": 3}
    kit.store.close()


async def test_a_job_that_is_stopped_mid_flight_leaves_every_episode_to_be_played(tmp_path):
    kit = Kit(tmp_path, AnswersLate, timeout_seconds=5)
    before = asyncio.all_tasks()
    gathering = asyncio.ensure_future(gather_groups(kit.store, CONFIG, kit.tasks_of, 1, 1, {"policy": 0}))
    playing = asyncio.ensure_future(kit.pool.run())
    while not kit.pool.progress.terminations:
        await asyncio.sleep(0.001)
    for task in (playing, gathering):
        task.cancel()
    await asyncio.gather(playing, gathering, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()
    counts = await kit.store.episodes.counts()
    assert (counts.claimed, counts.discarded) == (0, 0)
    assert counts.registered + counts.completed == 9
    assert {e.attempts for e in (await kit.episodes()).values() if e.state is EpisodeState.REGISTERED} <= {0}
    found = await Kit.gathered(kit)
    assert len(found.episode_ids) == 9
    kit.store.close()


async def test_a_consumer_that_stops_reading_holds_up_the_producers_and_loses_nothing(tmp_path):
    kit = Kit(tmp_path, Good)
    for group in range(10):
        await kit.store.groups.register("train", group, 1, Task(task_id="t", data={"number": 1, "faulty": False}), 3)
    claims = await kit.store.episodes.claim_many("w", "all", 30)
    orchestrator = RolloutOrchestrator(kit.pool._runner.play_claim, max_concurrency=4, max_waiting_results=4)
    producing = asyncio.ensure_future(orchestrator.run_producers_from_stream(claims))
    reading = orchestrator.yield_batches(2)
    first = await anext(reading)
    await asyncio.sleep(0.2)  # nobody reads
    assert (await kit.store.episodes.counts()).completed <= 2 + 4 + 4
    rest = [outcome async for batch in reading for outcome in batch]
    await producing
    names = [outcome.work.episode_id for outcome in (*first, *rest)]
    assert sorted(names) == sorted(claim.episode_id for claim in claims)
    assert all(outcome.error is None for outcome in (*first, *rest))
    kit.store.close()


@pytest.mark.slow
async def test_nothing_of_an_episode_stays_in_memory(tmp_path):
    kit = Kit(tmp_path, Good)
    await kit.gathered()
    assert kit.pool._runner._sessions._episodes == {}
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is Good]  # isinstance would ask each object
    kit.store.close()
