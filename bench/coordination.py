"""What keeping agents in order costs: an internal barrier's processor time a turn, and what barriers cost in real time.

    python bench/coordination.py [--quick]

First: agents that act at the same time, round after round, with no model behind them; the figure is the processor time
of the environment, its coordinator and the observations, divided by the number of actions. Then, in virtual time:
agents whose thinking times are lognormal in a world with a clock of its own, with barriers and without.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

from harvest import Harvest

from palestra.envs import AgentProtocol, MultiAgentEnvironment, simultaneous
from palestra.envs.continuous import LoopClock, run_virtual
from palestra.errors import EpisodeOver
from palestra.types.messages import ChatMessage, Observation, text_message

AGENTS = (2, 8, 32, 128)
GO, TAKE = text_message("assistant", "go"), text_message("assistant", "t")


class Rounds(MultiAgentEnvironment):
    """All agents act at the same time."""

    reusable = True

    def __init__(self, agents: int, rounds: int) -> None:
        super().__init__()
        self.roles = tuple(f"agent-{number}" for number in range(agents))
        self.rounds = rounds

    def begin(self, task: Mapping[str, Any]) -> None:
        """Nothing has to be prepared."""

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return a barrier before each round."""
        return simultaneous(rounds=self.rounds)

    def view(self, role: str) -> str:
        """Return a constant."""
        return "x"

    def apply(self, actions: Mapping[str, ChatMessage]) -> None:
        """Do nothing with the actions."""


async def _round_trips(environment: Rounds) -> None:
    await environment.reset({})
    while True:
        try:
            observation = await environment.observe()
        except EpisodeOver:
            return
        if not observation.is_last:
            environment.act(observation.id, GO)


def barrier_microseconds(agents: int, turns: int) -> float:
    """Return the processor time of one action, in microseconds."""
    rounds = max(turns // agents, 2)
    environment = Rounds(agents, rounds)
    gc.collect()
    before = time.process_time()
    asyncio.run(_round_trips(environment))
    return (time.process_time() - before) / (rounds * agents) * 1e6


async def _thinking(environment: Harvest, seed: int, sigma: float) -> tuple[int, float]:
    """Return the number of actions of an episode, and the sum of its rewards."""
    source = random.Random(seed)
    actions, earned = 0, 0.0
    turns: set[asyncio.Task[None]] = set()

    async def turn(observation: Observation, seconds: float) -> None:
        nonlocal actions
        await asyncio.sleep(seconds)
        if not environment.is_withdrawn(observation.id):
            actions += 1
            environment.act(observation.id, TAKE)

    await environment.reset({})
    try:
        while True:
            observation = await environment.observe()
            earned += observation.reward or 0.0
            if not observation.is_last:
                turns.add(asyncio.ensure_future(turn(observation, source.lognormvariate(-(sigma**2) / 2, sigma))))
    except EpisodeOver:
        for task in turns:
            task.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        return actions, earned


def actions_a_second(agents: int, barriers: bool, seconds: int, seed: int, sigma: float) -> tuple[float, float]:
    """Return actions a second of virtual time, and the rewards of all agents together."""
    environment = Harvest(agents=agents, tick_seconds=0.1, ticks=seconds * 10, barriers=barriers, clock=LoopClock())
    actions, earned = run_virtual(_thinking(environment, seed, sigma))
    return actions / seconds, earned


def main() -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(description="What keeping agents in order costs.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    quick = parser.parse_args().quick
    runs, turns, seconds = (2, 2_000, 60) if quick else (5, 20_000, 600)
    print("| agents | µs of CPU an action (median) | least | most |\n|---|---|---|---|")
    for agents in AGENTS:
        found = [barrier_microseconds(agents, turns) for _ in range(runs)]
        print(f"| {agents} | {statistics.median(found):.0f} | {min(found):.0f} | {max(found):.0f} |")
    print("\n| agents | σ | actions/s, barriers | actions/s, none | ratio | reward, barriers | reward, none |")
    print("|---|---|---|---|---|---|---|")
    for agents, sigma in ((2, 1.0), (8, 1.0), (16, 1.0), (32, 1.0), (8, 1.5)):
        kept = [actions_a_second(agents, True, seconds, seed, sigma) for seed in range(runs)]
        none = [actions_a_second(agents, False, seconds, seed, sigma) for seed in range(runs)]
        (slow, fast), (with_, without) = (
            [statistics.mean(run[place] for run in side) for side in (kept, none)] for place in (0, 1)
        )
        print(f"| {agents} | {sigma:g} | {slow:.2f} | {fast:.2f} | {fast / slow:.2f} | {with_:.3f} | {without:.3f} |")


if __name__ == "__main__":
    main()
