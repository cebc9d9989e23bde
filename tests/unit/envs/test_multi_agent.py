"""The base class of several agents: what is shown and rewarded, faults, time limits, and what is refused."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from palestra.envs import Fault, MultiAgentEnvironment, Outcome, TimeLimit, free, simultaneous, turns
from palestra.errors import Conflict, EpisodeOver, InvalidEnvironment, RolloutFailed
from unit.envs.playing import play, says, settle, shown


class Count(MultiAgentEnvironment):
    """Two agents say numbers; what each has said is in the record; the episode ends when `stop` is said."""

    reusable = True
    roles = ("a", "b")
    who = staticmethod(lambda env: turns(env.roles))

    def begin(self, task):
        self.record = []

    def protocol(self, task):
        return self.who(self)

    def view(self, role):
        return " ".join(self.record) or "-"

    def apply(self, actions):
        self.record += [f"{role}{action.text}" for role, action in actions.items()]
        if any(action.text == "stop" for action in actions.values()):
            return Outcome(rewards={"a": 1.0, "b": -1.0}, over=True, info={"why": "stop"})
        return Outcome(rewards=dict.fromkeys(actions, 0.25)) if self.pays else None

    pays = False


def change(base=Count, **members):
    return type("Changed", (base,), members)


def simultaneously(env):
    return simultaneous(env.roles)


def told(seen):
    return [(one.agent, one.content[0].text if one.content else None, one.reward, one.parents) for one in seen]


async def replies(environment, **answers):
    """Play; each role says its texts one after another."""
    left = {role: iter(texts) for role, texts in answers.items()}
    return await play(environment, {}, lambda observation: says(next(left[observation.agent])))


async def test_each_sees_the_others_action_and_both_are_rewarded_for_their_own():
    seen = await replies(Count(), a=["1", "3"], b=["2", "stop"])
    assert told(seen) == [
        ("a", "-", None, ()),
        ("b", "a1", None, ("o0",)),
        ("a", "a1 b2", None, ("o0", "o1")),
        ("b", "a1 b2 a3", None, ("o1", "o2")),
        ("a", None, 1.0, ("o2",)),
        ("b", None, -1.0, ("o3",)),
    ]
    assert [one.info for one in seen[-2:]] == [{"why": "stop"}] * 2


async def test_a_reward_on_the_way_names_the_roles_own_action_alone():
    seen = await replies(change(pays=True)(), a=["1", "3"], b=["2", "stop"])
    assert told(seen)[2:4] == [("a", "a1 b2", 0.25, ("o0",)), ("b", "a1 b2 a3", 0.25, ("o1",))]
    assert told(seen)[4:] == [("a", None, 1.25, ("o2",)), ("b", None, -1.0, ("o3",))]


@pytest.mark.parametrize("order", [*permutations("abc")])
async def test_actions_of_one_barrier_are_revealed_together_whoever_answers_first(order):
    environment = change(roles=("a", "b", "c"), who=staticmethod(simultaneously))()
    await environment.reset({})
    first = await shown(environment)
    assert told(first) == [(role, "-", None, ()) for role in "abc"]
    ids = {one.agent: one.id for one in first}
    for place, role in enumerate(order):
        assert await shown(environment) == [], place
        environment.act(ids[role], says("1"))
    later = await shown(environment)
    assert [(one.agent, one.content[0].text) for one in later] == [(role, "a1 b1 c1") for role in "abc"]
    assert later[0].parents == ("o0", "o1", "o2")
    await environment.close()


async def test_without_barriers_the_record_does_not_depend_on_who_answers_first_unless_it_may():
    for deterministic, expected in (
        (True, {"a1 b1 c1"}),
        (False, {" ".join(f"{r}1" for r in o) for o in permutations("abc")}),
    ):
        made = change(roles=("a", "b", "c"), who=staticmethod(lambda env: free(actions=1)), deterministic=deterministic)
        records = set()
        for order in permutations("abc"):
            environment = made()
            await environment.reset({})
            ids = {one.agent: one.id for one in await shown(environment)}
            for role in order:
                environment.act(ids[role], says("1"))
                await settle()
            assert all(one.terminated and one.reward == 0.0 for one in await shown(environment))
            records.add(" ".join(environment.record))
        assert records == expected


async def test_the_end_of_the_protocol_is_the_end_of_the_episode():
    class Rounds(change(who=staticmethod(lambda env: simultaneous(rounds=2)))):
        def final_outcome(self):
            return Outcome(rewards={"a": float(len(self.record))}, info={"rounds": 2})

    seen = await replies(Rounds(), a=["1"] * 9, b=["2"] * 9)
    assert told(seen)[-2:] == [("a", None, 4.0, ("o2",)), ("b", None, 0.0, ("o3",))]


async def test_max_steps_cut_the_episode_off():
    seen = await replies(change(max_steps=3)(), a=["1"] * 9, b=["2"] * 9)
    assert [(one.agent, one.truncated, one.terminated) for one in seen[-2:]] == [("a", True, False), ("b", True, False)]
    assert len(seen) == 5


async def test_a_role_whose_part_has_ended_is_left_out():
    class Leaves(change(roles=("a", "b", "c"))):
        def apply(self, actions):
            super().apply(actions)
            return (
                Outcome(done=("a",), rewards={"a": 2.0})
                if self.record == ["a1"]
                else Outcome(over=len(self.record) > 4)
            )

    seen = await replies(Leaves(), a=["1"], b=["2"] * 9, c=["3"] * 9)
    assert [one.agent for one in seen if not one.is_last] == ["a", "b", "c", "b", "c"]
    assert told([one for one in seen if one.is_last])[0] == ("a", None, 2.0, ("o0",))


async def test_rewards_that_do_not_add_up_to_zero_fail_the_episode_and_are_named():
    class Wrong(change(zero_sum=True)):
        def apply(self, actions):
            return Outcome(rewards={"a": 1.0, "b": -0.5}, over=True)

    with pytest.raises(InvalidEnvironment, match=r"0.5.*zero_sum.*0.*1.*-0.5"):
        await replies(Wrong(), a=["1"])
    assert told(await replies(change(Wrong, total=0.5)(), a=["1"]))[-1][2] == -0.5
    # All of an episode's rewards count, and not the last ones alone.
    with pytest.raises(InvalidEnvironment, match=r"to 0\.25"):
        await replies(change(zero_sum=True, pays=True)(), a=["1", "stop"], b=["stop"])


async def test_a_reward_after_the_end_is_a_mistake():
    class Late(change()):
        def apply(self, actions):
            super().apply(actions)
            return Outcome(done=("a",)) if len(self.record) == 1 else Outcome(rewards={"a": 1.0}, over=True)

    with pytest.raises(InvalidEnvironment, match=r"'a'.*1.0.*ended"):
        await replies(Late(), a=["1"], b=["2"])


async def test_a_reward_that_is_no_number_is_a_mistake():
    with pytest.raises(InvalidEnvironment, match="the reward of 'a' is nan"):
        await replies(change(apply=lambda self, actions: Outcome(rewards={"a": float("nan")}))(), a=["1"])


async def test_methods_may_be_asynchronous():
    class Slow(change()):
        async def begin(self, task):
            await asyncio.sleep(0)
            self.record = []

        async def view(self, role):
            await asyncio.sleep(0)
            return f"for {role}"

        async def apply(self, actions):
            await asyncio.sleep(0)
            return Count.apply(self, actions)

    seen = await replies(Slow(), a=["1"], b=["stop"])
    assert [one.content[0].text for one in seen[:2]] == ["for a", "for b"]


async def test_an_action_out_of_turn_says_who_is_to_act():
    environment = Count()
    await environment.reset({})
    (first,) = await shown(environment)
    environment.act(first.id, says("1"))
    await settle()
    with pytest.raises(Conflict, match=r"given.*'b'") as refused:
        environment.act(first.id, says("2"))
    assert refused.value.http_status == 409
    with pytest.raises(Conflict, match=r"o7.*'b'"):
        environment.act("o7", says("2"))
    await environment.close()


class Held(Count):
    gives_choices = True

    def legal(self, role):
        return ("1", "2", "stop")


class Scored(Held):
    forfeits = frozenset(Fault)

    def forfeit(self, role, fault):
        return Outcome(rewards={role: -1.0}, over=True, info={"fault": fault})


async def test_an_illegal_reply_fails_the_episode_unless_the_environment_scores_it():
    with pytest.raises(RolloutFailed, match=r"'b'.*'7'.*1.*2") as failed:
        await replies(Held(), a=["1"], b=["7"])
    assert failed.value.termination == "agent_failed"
    seen = await replies(Scored(), a=["1"], b=["7"])
    assert [(one.agent, one.reward) for one in seen[-2:]] == [("b", -1.0), ("a", 0.0)]


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_of_two_faults_in_one_barrier_the_order_of_roles_decides(order):
    environment = change(Scored, who=staticmethod(simultaneously))()
    await environment.reset({})
    ids = {one.agent: one.id for one in await shown(environment)}
    for role in order:
        environment.act(ids[role], says("7"))
        await settle()
    assert [(one.agent, one.reward) for one in await shown(environment)] == [("a", -1.0), ("b", 0.0)]


async def late(environment):
    """The first role never answers; what the episode shows."""
    await environment.reset({})
    seen = []
    try:
        while True:
            seen.append(await environment.observe())
            if not seen[-1].is_last and seen[-1].agent != "a":
                environment.act(seen[-1].id, says("stop"))
    except EpisodeOver:
        return seen


async def test_a_role_that_is_late_gets_its_default_action_or_a_fault():
    limit = {"a": TimeLimit(seconds=0.01, default="2")}
    environment = change(time_limits=limit)()
    seen = await late(environment)
    assert environment.record == ["a2", "bstop"]
    assert environment.is_withdrawn("o0")
    assert environment.action_in_place("o0") == says("2")
    with pytest.raises(Conflict, match=r"wait.*action"):
        environment.act("o0", says("9"))
    assert [one.reward for one in seen[-2:]] == [1.0, -1.0]
    with pytest.raises(RolloutFailed, match=r"'a'.*0.01"):
        await late(change(time_limits={"a": TimeLimit(seconds=0.01)})())
    seen = await late(change(Scored, time_limits={"a": TimeLimit(seconds=0.01)})())
    assert [(one.agent, one.reward, one.info["fault"]) for one in seen[1:]] == [("a", -1.0, "late"), ("b", 0.0, "late")]


async def test_a_role_that_answers_in_time_has_no_timer_left():
    environment = change(time_limits=dict.fromkeys("ab", TimeLimit(seconds=60.0)))()
    seen = await replies(environment, a=["1"], b=["stop"])
    assert seen[-1].terminated
    assert environment._timers == {}


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_time_limit_is_a_positive_number(seconds):
    with pytest.raises(ValueError, match="positive number"):
        TimeLimit(seconds=seconds)


async def test_an_agent_that_fails_fails_the_episode_unless_the_environment_scores_it():
    for made, survives in ((Held, False), (Scored, True)):
        environment = made()
        await environment.reset({})
        (first,) = await shown(environment)
        assert environment.survives_failure(first.id) is survives
        environment.cancel(first.id)
        if survives:
            assert [(one.agent, one.reward) for one in await shown(environment)] == [("a", -1.0), ("b", 0.0)]
        else:
            with pytest.raises(RolloutFailed, match="'a' failed"):
                await environment.observe()


async def test_an_episode_that_can_not_continue_is_no_episode_that_has_ended():
    class Forgets(change()):
        async def _show(self, roles, causes):
            if not self.record:
                await super()._show(roles, causes)

    with pytest.raises(InvalidEnvironment, match=r"'b'.*act"):
        await replies(Forgets(), a=["1"])


async def test_an_agent_that_is_ended_while_it_thinks_is_not_waited_for():
    class Out(change(roles=("a", "b", "c"), who=staticmethod(lambda env: free()), deterministic=False)):
        def apply(self, actions):
            super().apply(actions)
            return (
                Outcome(done=("b",))
                if "aout" in self.record and "b" in self.coordinator.playing
                else Outcome(over="cstop" in self.record)
            )

    environment = Out()
    await environment.reset({})
    ids = {one.agent: one.id for one in await shown(environment)}
    environment.act(ids["a"], says("out"))
    assert [(one.agent, one.is_last) for one in await shown(environment)] == [("b", True), ("a", False)]
    assert environment.is_withdrawn(ids["b"])
    environment.act(ids["c"], says("stop"))
    assert sorted(one.agent for one in await shown(environment)) == ["a", "c"]
