"""The easy form of an environment as the concurrent one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from palestra.envs import Environment, SerialEnvironment
from unit.envs.playing import play, says


class Count(Environment):
    system = "Count."
    tools = ({"type": "function", "function": {"name": "x"}},)

    def __init__(self, last: int = 99, max_steps: int | None = None) -> None:
        self.last, self.max_steps = last, max_steps

    def reset(self, task):
        self.number = 0
        return "go", {}

    def step(self, action):
        self.number += 1
        return f"{action} {self.number}", 0.5, self.number == self.last, False, {}


@pytest.mark.parametrize(("system", "said"), [(None, "Count."), ("Be quick.", "Be quick.")])
async def test_the_environment_has_a_system_message_and_the_job_another(system, said):
    seen = await play(SerialEnvironment(Count(1), system=system), {}, lambda observation: says("a"))
    assert [(m.role, m.text) for m in seen[0].content] == [("system", said), ("user", "go")]
    assert [m.text for m in seen[1].content] == ["a 1"]
    assert seen[0].tools == Count.tools


@pytest.mark.parametrize(
    ("last", "limit", "steps", "ends"),
    [(2, None, 2, (True, False)), (2, 2, 2, (True, False)), (3, 2, 2, (False, True)), (2, 5, 2, (True, False))],
)
async def test_a_limit_of_steps_truncates_and_is_not_the_end_of_the_world(last, limit, steps, ends):
    seen = await play(SerialEnvironment(Count(last, limit)), {}, lambda observation: says("a"))
    assert len(seen) == steps + 1
    assert (seen[-1].terminated, seen[-1].truncated) == ends
    assert all(not o.is_last for o in seen[:-1])
    assert [o.reward for o in seen[1:]] == [0.5] * steps


class Awaits(Environment):
    """Every method is asynchronous, and notes the thread that it runs in."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    async def note(self):
        await asyncio.sleep(0)
        self.threads.append(threading.current_thread().name)

    async def setup(self):
        await self.note()

    async def close(self):
        await self.note()

    async def reset(self, task):
        await self.note()
        return "go", {"seed": 1}

    async def step(self, action):
        await self.note()
        return action, 0.5, True, False, {}


async def test_an_asynchronous_environment_runs_on_the_event_loop_without_a_thread():
    made = Awaits()
    environment = SerialEnvironment(made)
    await environment.setup()
    seen = await play(environment, {}, lambda observation: says("a"))
    await environment.close()
    assert made.threads == [threading.current_thread().name] * 4
    assert [o.content[-1].text for o in seen] == ["go", "a"]
    assert (seen[0].info, seen[1].reward, seen[1].terminated) == ({"seed": 1}, 0.5, True)


async def test_asynchronous_methods_and_others_go_together():
    class Mixed(Awaits):
        def reset(self, task):
            self.threads.append(threading.current_thread().name)
            return "go", {}

        def step_message(self, action):  # of a thread, and gives a coroutine that the event loop runs
            self.threads.append(threading.current_thread().name)
            return self.step(action.text)

    made = Mixed()
    seen = await play(SerialEnvironment(made), {}, lambda observation: says("a"))
    assert made.threads == ["palestra-environment", "palestra-environment", threading.current_thread().name]
    assert seen[-1].reward == 0.5


async def test_what_an_asynchronous_step_raises_ends_the_episode():
    class Fails(Awaits):
        async def step(self, action):
            raise KeyError("x")

    with pytest.raises(KeyError):
        await play(SerialEnvironment(Fails()), {}, lambda observation: says("a"))
