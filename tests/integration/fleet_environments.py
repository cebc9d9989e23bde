"""Environments and agents for `palestra worker`; what they leave in FOLDER is what the tests look at."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from palestra.agents import Agent, ModelAgent
from palestra.envs import ConcurrentEnvironment, Environment
from palestra.rollout import RolloutSpec
from palestra.types.messages import text_message

FOLDER = Path(os.environ.get("FLEET_FOLDER", "."))


class Echo(Environment):
    """The reward is that of what was said, by step; the second of two turns ends it."""

    blocking = False
    system = "Count."

    def __init__(self, turns: int = 2) -> None:
        self.most = turns

    def reset(self, task):
        self.turns = 0
        return task["text"], {}

    def step(self, action):
        self.turns += 1
        reward = sum(map(ord, action)) % 7 / 7
        return "again", reward, self.turns == self.most, False, {"turn": self.turns}


class Named(Echo):
    """Rewards by name, one of which is not scored in the first turn."""

    def step(self, action):
        _, reward, over, cut, info = super().step(action)
        return "again", {"sum": reward, "length": float(len(action)) if over else None}, over, cut, info


class Slow(Echo):
    """Says that it has begun, and takes until it is released."""

    blocking = True

    def step(self, action):
        (FOLDER / f"begun-{os.urandom(4).hex()}").touch()
        while not (FOLDER / "release").exists():
            time.sleep(0.01)
        return super().step(action)


class DiesOnce(Echo):
    """The first time, the process dies in the middle of an episode, and a second time in another one."""

    def step(self, action):
        for marker in (FOLDER / "died-1", FOLDER / "died-2"):
            if self.turns == 1 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Pair(ConcurrentEnvironment):
    """Two agents that are asked at the same time; each is rewarded for what it has said."""

    roles = ("left", "right")

    async def start(self, task):
        for name in self.roles:
            self.emit(name, (text_message("user", f"{task['text']} {name}"),))

    async def on_action(self, observation, action):
        reward = sum(map(ord, action.text)) % 7 / 7
        self.emit(observation.agent, (), parents=(observation.id,), reward=reward, terminated=True)


class Fails(Echo):
    """Every fourth task can't be played the first time."""

    def step(self, action):
        marker = FOLDER / "failed"
        if not marker.exists():
            marker.touch()
            raise ConnectionError("no network")
        return super().step(action)


class Thinks(Agent):
    """Asks twice and acts by the second reply."""

    async def step(self, observation, policy):
        first = await policy.chat((*policy.history, *observation.content))
        messages = (*policy.history, *observation.content, first.reply, text_message("user", "sure?"))
        second = await policy.chat(messages)
        return [first, second], second.reply


played = RolloutSpec(environment=Echo, agents={"": ModelAgent(max_tokens=5)})
NOTHING = 7


class Neither:
    """No environment."""
