"""Any protocol, order of answers and deaths: an episode ends or names a culprit, and the order does not matter."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.envs import Fault, MultiAgentEnvironment, Outcome, free, phases, simultaneous, turns
from palestra.errors import EpisodeOver, RolloutFailed
from palestra.types.messages import text_message
from palestra.types.states import AgentState

NAMES = ("ann", "bob", "cat", "dan")
subsets = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5)
rounds = st.integers(1, 3)


def parts(finite: bool):
    """Descriptions of protocols, which are made anew for each episode; `finite` ones end by themselves."""
    times = rounds if finite else st.none() | rounds
    return st.one_of(
        st.tuples(st.just(turns), subsets, times),
        st.tuples(st.just(simultaneous), st.just(()) | subsets.map(lambda names: [*dict.fromkeys(names)]), times),
        st.tuples(st.just(free), st.just(()) | subsets.map(lambda names: [*dict.fromkeys(names)]), times),
    )


protocols = st.one_of(
    parts(finite=False),
    st.tuples(st.lists(parts(finite=True), max_size=2), parts(finite=False)).map(
        lambda two: ([*two[0], two[1]], False)
    ),
    st.tuples(st.lists(parts(finite=True), min_size=1, max_size=3), st.just(True)),
)


def made(description):
    if callable(description[0]):
        kind, *arguments = description
        return kind(*arguments)
    several, repeat = description
    return phases([kind(*arguments) for kind, *arguments in several], repeat=repeat)


@dataclass(frozen=True)
class Plan:
    """An episode: who dies after how many actions in the world, and which of an agent's turns fail."""

    protocol: object
    most: int  # actions after which the world ends
    deaths: dict[int, str] = field(default_factory=dict)  # number of actions -> the role whose part ends then
    failures: frozenset[tuple[str, int]] = frozenset()  # (role, number of its turn)
    forfeits: bool = True


class World(MultiAgentEnvironment):
    """Every action is in a record, which everybody sees; the reward of each is a part of the record's length."""

    roles = NAMES
    deterministic = True

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.forfeits = frozenset({Fault.FAILED}) if plan.forfeits else frozenset()

    def begin(self, task):
        self.record = []

    def protocol(self, task):
        return made(self.plan.protocol)

    def view(self, role):
        return " ".join(self.record) or "-"

    def apply(self, actions):
        done = []
        for role, action in actions.items():
            self.record.append(f"{role}:{action.text}")
            victim = self.plan.deaths.get(len(self.record))
            if victim in self.coordinator.playing and victim not in done:
                done.append(victim)
        over = len(self.record) >= self.plan.most
        rewards = {role: 1.0 for role in self.coordinator.playing if role not in done or not over}
        return Outcome(rewards=rewards, done=() if over else done, over=over)

    def forfeit(self, role, fault):
        return Outcome(rewards={role: -1.0}, done=(role,))


async def played(plan: Plan, order: random.Random):
    """What each role was shown, with its rewards, if open observations are answered in an order of this source."""
    environment = World(plan)
    await environment.reset({})
    seen: dict[str, list] = {}
    waiting, turn = [], dict.fromkeys(NAMES, 0)
    try:
        for _ in range(2000):
            while environment._working:
                await asyncio.sleep(0)
            while environment._unseen or not waiting or environment._failure is not None:
                one = await asyncio.wait_for(environment.observe(), 5)
                seen.setdefault(one.agent, []).append((one.content, one.reward, one.terminated))
                waiting = [other for other in waiting if not environment.is_withdrawn(other.id)]
                if not one.is_last:
                    waiting.append(one)
            one = waiting.pop(order.randrange(len(waiting)))
            assert environment.coordinator.state(one.agent) is AgentState.ACTING
            turn[one.agent] += 1
            if (one.agent, turn[one.agent]) in plan.failures:
                environment.cancel(one.id)
            else:
                environment.act(one.id, text_message("assistant", str(turn[one.agent])))
        pytest.fail("the episode did not end")
    except EpisodeOver:
        assert not environment.coordinator.to_act or environment._over
        return seen, None
    except RolloutFailed as error:
        return None, str(error)
    finally:
        await environment.close()


@given(
    st.builds(
        Plan,
        protocol=protocols,
        most=st.integers(1, 25),
        deaths=st.dictionaries(st.integers(1, 20), st.sampled_from(NAMES), max_size=3),
        failures=st.frozensets(st.tuples(st.sampled_from(NAMES), st.integers(1, 4)), max_size=2),
        forfeits=st.booleans(),
    ),
    st.lists(st.integers(), min_size=2, max_size=3),
)
@examples(60, 1000)
def test_an_episode_ends_or_names_a_culprit_and_does_not_depend_on_who_answers_first(plan, seeds):
    found = [asyncio.run(played(plan, random.Random(seed))) for seed in seeds]
    for seen, error in found:
        assert error is None or any(f"{role!r} failed" in error for role, _ in plan.failures)
        assert error is None or not plan.forfeits
        if seen is not None:
            assert {*seen} == {*NAMES}
            assert all(not before[2] for shown in seen.values() for before in shown[:-1]), "nothing after the end"
            assert all(shown[-1][2] for shown in seen.values()), "everybody hears of the end"
    # A failed episode is played again whole, so which of two failures is named first does not matter.
    assert len({error is None for _, error in found}) == 1
    assert all(seen == found[0][0] for seen, _ in found)
