"""`check_environment` of worlds with a clock of their own: in virtual time, so that minutes take no time."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest

from palestra.envs import Outcome
from palestra.envs.protocols import turns
from palestra.errors import InvalidEnvironment
from palestra_inspect.environment_check import check_environment
from unit.envs.harvest import Harvest

LONG = {"tick_seconds": 240.0, "ticks": 25}


class World(Harvest):
    """Lasts for 100 minutes."""

    def __init__(self, **changes):
        super().__init__(**LONG | changes)


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2, 7])
@pytest.mark.parametrize("barriers", [False, True])
def test_a_world_that_has_no_mistake_passes_in_no_time(agents, barriers):
    begun = time.perf_counter()
    check_environment(lambda: World(agents=agents, barriers=barriers), [{}, {"n": 2}])
    assert time.perf_counter() - begun < 30  # 38 episodes of 100 minutes


@pytest.mark.slow
def test_a_barrier_does_not_depend_on_who_thinks_longer():
    class Says(World):
        deterministic = True

    check_environment(lambda: Says(barriers=True), [{}])


def test_a_world_that_lasts_for_many_ticks_is_not_endless():
    check_environment(lambda: World(ticks=5000), [{}], actions=["t"], max_steps=300)


def test_agents_act_between_ticks():
    seen = []

    class Watched(World):
        def view(self, role):
            seen.append((role, self.ripe, asyncio.get_running_loop().time()))
            return super().view(role)

    check_environment(lambda: Watched(ticks=20), [{}], actions=["w"])
    whole = {at for _, ripe, at in seen if at % LONG["tick_seconds"] == 0 and ripe}  # episodes begin so, without fruit
    assert not whole
    assert {ripe for _, ripe, _ in seen} >= {0, 1}
    assert {role for role, _, _ in seen} == {"agent-0", "agent-1"}


def test_randomness_that_is_not_the_tasks_is_found():
    noise = random.Random(0)

    class Noisy(World):
        def tick(self):
            self.ripe += noise.random() < 0.5

    with pytest.raises(InvalidEnvironment, match="actions differently"):
        check_environment(Noisy, [{}])


def test_what_is_left_of_the_episode_before_is_found():
    class Keeps(World):
        def begin(self, task):
            self.ripe = getattr(self, "ripe", 0)

    with pytest.raises(InvalidEnvironment, match="episode differs"):
        check_environment(Keeps, [{}], actions=["w"])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (lambda self: 1 / 0, "raised ZeroDivisionError"),
        (lambda self: Outcome(rewards={"agent-0": float("nan")}), "a reward is finite"),
    ],
)
def test_mistakes_of_a_tick_are_found(method, said):
    wrong = type("Wrong", (World,), {"tick": method})
    with pytest.raises(InvalidEnvironment, match=said):
        check_environment(wrong, [{}])


def test_zero_sum_is_checked():
    class Zero(World):
        zero_sum = True

    with pytest.raises(InvalidEnvironment, match="declares zero_sum"):
        check_environment(Zero, [{}], actions=["t"])


def test_a_role_that_never_acts_is_found():
    class Forgets(World):
        def protocol(self, task):
            return turns(("agent-0",))

    with pytest.raises(InvalidEnvironment, match=r"'agent-1'.*acts"):
        check_environment(Forgets, [{}], actions=["t"])


def test_a_world_that_forgets_to_end_is_found():
    class Endless(World):
        async def _run(self):
            for _ in itertools.count():
                await asyncio.sleep(self.tick_seconds)

        def apply(self, actions):
            return None

        def legal(self, role):
            return ("w",)

    with pytest.raises(InvalidEnvironment, match=r"within.*50"):
        check_environment(Endless, [{}], max_steps=50)
