from __future__ import annotations

import asyncio

import pytest

from palestra.envs import ConcurrentEnvironment
from palestra.errors import Conflict, EpisodeOver
from palestra.types.messages import text_message


class Echo(ConcurrentEnvironment):
    """Shows `task["first"]` observations; each action is echoed after a while, and "stop" ends its line."""

    async def start(self, task):
        for number in range(task["first"]):
            self.emit(f"a{number}", (text_message("user", f"hello {number}"),))

    async def on_action(self, observation, action):
        word, _, seconds = action.text.partition(" ")
        await asyncio.sleep(float(seconds or 0))
        if word == "raise":
            raise ConnectionError("gone")
        self.emit(
            observation.agent, (text_message("user", word),), parents=(observation.id,), terminated=word == "stop"
        )


def says(text: str):
    return text_message("assistant", text)


async def begun(first: int = 1) -> Echo:
    environment = Echo()
    await environment.reset({"first": first})
    return environment


async def test_observations_come_in_whatever_order_the_actions_bring_them():
    environment = await begun(3)
    first = [await environment.observe() for _ in range(3)]
    for observation, seconds in zip(first, (0.03, 0.01, 0.02), strict=True):
        environment.act(observation.id, says(f"stop {seconds}"))
    order = [(await environment.observe()).agent for _ in range(3)]
    assert order == ["a1", "a2", "a0"]
    with pytest.raises(EpisodeOver):
        await environment.observe()


async def test_an_action_is_accepted_once_the_same_again_is_nothing_and_another_an_error():
    environment = await begun()
    observation = await environment.observe()
    environment.act(observation.id, says("x"))
    environment.act(observation.id, says("x"))
    with pytest.raises(Conflict, match=r"first.*stands"):
        environment.act(observation.id, says("y"))
    with pytest.raises(Conflict, match="not wait"):
        environment.act("o99", says("x"))
    answer = await environment.observe()
    assert (answer.content[0].text, answer.parents) == ("x", (observation.id,))
    environment.act(answer.id, says("stop"))
    last = await environment.observe()
    assert last.is_last
    with pytest.raises(Conflict):
        environment.act(last.id, says("more"))


async def test_the_episode_is_not_over_while_an_action_is_open_or_worked_on():
    environment = await begun()
    observation = await environment.observe()
    waiting = asyncio.ensure_future(environment.observe())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    environment.act(observation.id, says("stop 0.01"))
    assert (await waiting).terminated


async def test_cancelling_an_observation_closes_it_and_what_its_action_began():
    environment = await begun(2)
    one, two = [await environment.observe() for _ in range(2)]
    environment.act(one.id, says("x 60"))
    waiting = asyncio.ensure_future(environment.observe())
    await asyncio.sleep(0)
    environment.cancel(one.id)
    environment.cancel(two.id)
    with pytest.raises(EpisodeOver):
        await asyncio.wait_for(waiting, 1)


async def test_what_an_action_raises_is_raised_where_it_is_observed():
    environment = await begun()
    environment.act((await environment.observe()).id, says("raise"))
    with pytest.raises(ConnectionError, match="gone"):
        await environment.observe()


async def test_one_that_is_not_reusable_has_one_episode_and_one_that_is_forgets_the_last():
    environment = await begun()
    with pytest.raises(Conflict, match="not reusable"):
        await environment.reset({"first": 1})

    class Reusable(Echo):
        reusable = True

    again = Reusable()
    await again.reset({"first": 2})
    observation = await again.observe()
    again.act(observation.id, says("late 60"))
    await again.reset({"first": 1})
    assert (await again.observe()).content[0].text == "hello 0"
    assert not again._unseen
    assert not again._working
