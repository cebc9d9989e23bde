"""What is learned with and without barriers in continuous time: `python bench/harvest_learning.py --seeds 0 1 2`.

Four agents of one policy play `Harvest` in real time; before each action an agent thinks for a lognormal time. Taking
fewer than three pieces of fruit spoils them, so there is something to learn. The same world is played with barriers
(all act together and wait for the slowest) and without. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

AGENTS, TICKS, TICK_SECONDS, LEAST = 4, 60, 0.1, 3
THINKING_SECONDS, SIGMA = 0.4, 1.0
GROUPS, FIRST, LAST = 4, 1, 3  # groups of a step; steps whose rewards are averaged, at the beginning and at the end


def main() -> None:
    """Train with both, each run in a process of its own, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--one", nargs=2, metavar=("SEED", "BARRIERS"), help="make one run, print JSON")
    wanted = parser.parse_args()
    if wanted.one is not None:
        print(json.dumps(run(int(wanted.one[0]), wanted.one[1] == "yes", wanted.steps)))
        return
    print("| barriers | seed | reward, first step | last 3 steps | actions/s of an episode |\n|---|--:|--:|--:|--:|")
    last: dict[str, list[float]] = {"yes": [], "no": []}
    for seed in wanted.seeds:
        for barriers, ends in last.items():
            words = [sys.executable, __file__, "--one", str(seed), barriers, "--steps", str(wanted.steps)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
            before, after, half, actions = json.loads(done.stdout.splitlines()[-1])
            ends.append(after)
            print(f"| {barriers} | {seed} | {before:.2f} | {after:.2f} ± {half:.2f} | {actions:.1f} |", flush=True)
    means = {barriers: statistics.mean(ends) for barriers, ends in last.items()}
    print(f"\nmean reward after {wanted.steps} steps: {means['yes']:.3f} with barriers, {means['no']:.3f} without")


def run(seed: int, barriers: bool, steps: int) -> tuple[float, float, float, float]:
    """Train; returns mean rewards of the first steps and of the last, half an interval, and actions a second."""
    from harvest import Harvest

    import palestra

    class Thinker(palestra.ModelAgent):
        """Thinks for a while, and then asks the model."""

        async def step(
            self, observation: palestra.Observation, policy: palestra.PolicyHandle
        ) -> tuple[list[palestra.Chat], palestra.ChatMessage]:
            """Sleep for a time that depends on episode, agent and TimeStep, and answer."""
            source = random.Random(policy.seed)
            await asyncio.sleep(THINKING_SECONDS * source.lognormvariate(-(SIGMA**2) / 2, SIGMA))
            chat = await policy.chat(observation.content, choices=observation.choices, max_tokens=2)
            return [chat], chat.reply

    world = partial(Harvest, agents=AGENTS, tick_seconds=TICK_SECONDS, ticks=TICKS, barriers=barriers, least=LEAST)
    with TemporaryDirectory() as folder:
        config = palestra.JobConfig.model_validate(
            {
                "name": "harvest",
                "run_dir": str(Path(folder) / "run"),
                "seed": seed,
                "steps": steps,
                "policies": {
                    "player": {
                        "model": "tiny-random",
                        "max_context": 128,
                        "optimizer": {"learning_rate": 1e-2, "schedule": "linear"},
                    }
                },
                "rollout": {"groups_per_step": GROUPS, "group_size": 16, "step_order": "acted"},
                "algorithm": {"credit": "step", "loss_agg_mode": "token-mean"},
                "evaluation": {"every_steps": 0},
                "checkpoint": {"every_steps": steps},
                "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},
                "trainer": {"dtype": "float32", "threads": 1, "micro_batch_tokens": 4096},
            }
        )
        result = palestra.train(
            palestra.RolloutSpec(environment=world, agents={"": Thinker()}),
            [{"game": number} for number in range(GROUPS * steps)],
            config,
            concurrency=64,
            quiet=True,
        )
        before, after = (episodes_of(result.run_dir, *steps) for steps in ((0, FIRST), (steps - LAST, steps)))
    rewards = [sum(rewards.values()) for rewards, _ in after]
    half = 1.96 * statistics.stdev(rewards) / len(rewards) ** 0.5
    actions = statistics.mean(sum(acted is not None for _, acted in times) for _, times in after)
    first = statistics.mean(sum(rewards.values()) for rewards, _ in before)
    return first, statistics.mean(rewards), half, actions / (TICKS * TICK_SECONDS)


def episodes_of(run_dir: Path, first: int, last: int) -> list[tuple[dict[str, float], list[list[float | None]]]]:
    """Return rewards by agent, and times of observation and action, of the episodes of some steps, from 0."""
    query = "SELECT rewards, step_times FROM episodes WHERE kind = 'train' AND state = 'completed'"
    query += " AND group_index >= ? AND group_index < ?"
    with sqlite3.connect(run_dir / "run.db") as database:
        found = database.execute(query, (first * GROUPS, last * GROUPS)).fetchall()
    return [(json.loads(rewards), json.loads(times)) for rewards, times in found]


if __name__ == "__main__":
    main()
