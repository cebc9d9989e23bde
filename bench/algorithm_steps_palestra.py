"""Times steps of several algorithms on the same made-up episodes, in turns; prints one JSON line.

    python bench/algorithm_steps_palestra.py --threads 2 --steps 7

A step is what the learner does between a manifest and a new version: `PolicyUpdate.train`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from palestra.algorithms.registry import create_algorithm
from palestra.config import JobConfig, parse_config
from palestra.learner import policy_spec
from palestra.learner.open_run import OpenRun
from palestra.learner.schedule import TrainingBudget
from palestra.learner.update import PolicyUpdate
from palestra.models.device import tune_malloc
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import Chat, PolicyVersion, SamplingParams, VersionSpan
from palestra.types.messages import text_message
from palestra.types.records import EpisodeRecord, Task, TimeStep, Trajectory
from palestra.types.states import EpisodeState

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 40, 12
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "grpo, entropy": {"name": "grpo", "entropy_coefficient": 0.01},
    "grpo, kl": {"name": "grpo", "kl": {"coefficient": 0.01}},
    "a2c": {"name": "a2c"},
    "ppo": {"name": "ppo"},
    "ppo, kl": {"name": "ppo", "kl": {"coefficient": 0.01, "place": "reward"}},
}
ADAPTED = ("grpo", "grpo, kl", "ppo")  # these are also trained with an adapter in place of all weights
CONTESTANTS = (*ALGORITHMS, *(f"{name}, adapter" for name in ADAPTED))


def episodes(seed: int) -> list[Trajectory]:
    """One step's episodes, of random tokens and rewards."""
    draw, found = np.random.default_rng(seed), []
    for group in range(PROMPTS):
        prompt = draw.integers(10, 40_000, PROMPT_TOKENS).astype(np.int32)
        for sample in range(SAMPLES):
            found.append(episode(group, sample, prompt, draw))
    return found


def episode(group: int, sample: int, prompt: np.ndarray, draw: np.random.Generator) -> Trajectory:
    """A completed episode of one call."""
    name = f"train-{group:06d}-{sample:02d}"
    chat = Chat(
        episode_id=name,
        fence=1,
        index=0,
        time_step=0,
        agent="agent",
        policy="policy",
        parent=None,
        shared=0,
        shared_messages=0,
        new_messages=(text_message("user", ""),),
        prompt_tail=prompt,
        reply=text_message("assistant", ""),
        completion_ids=draw.integers(10, 40_000, NEW_TOKENS).astype(np.int32),
        logprobs=np.full(NEW_TOKENS, -10.0, np.float32),
        versions=(VersionSpan(PolicyVersion(0, 0), NEW_TOKENS),),
        finish_reason="length",
        sampling=SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, seed=0),
        request_digest="",
        started_at=0.0,
        finished_at=0.0,
    )
    record = EpisodeRecord(
        episode_id=name,
        kind="train",
        group_index=group,
        sample_index=sample,
        task=Task(task_id=name, data={}),
        state=EpisodeState.COMPLETED,
        fence=1,
        attempts=1,
        rewards={"agent": float(draw.random())},
        step_rewards=None,
        step_times=None,
        metadata={},
        worker_id="bench",
        lease_seconds=120.0,
    )
    step = TimeStep(
        index=0, chats=(chat,), reward=None, observed_at=0.0, acted_at=0.0, terminated=True, truncated=False
    )
    return Trajectory(episode=record, steps=(step,))


class Contestant:
    """An algorithm with a trainer of its own."""

    def __init__(self, threads: int, name: str) -> None:
        adapter = {"rank": 16} if name.endswith(", adapter") else None
        algorithm = ALGORITHMS[name.removesuffix(", adapter")]
        policy = {"sampling": {"max_tokens": NEW_TOKENS}, "max_context": 256, "adapter": adapter}
        self.config: JobConfig = parse_config(
            {"policies": {"policy": policy}, "trainer": {"threads": threads}, "algorithm": algorithm}
        )
        self.trainer = TorchTrainer(self.config.trainer, 2)
        made = create_algorithm(self.config.algorithm)
        self.spec = policy_spec(self.config, made, "policy", {})
        nothing: Any = None  # the store of a run, which neither a constant learning rate nor these algorithms read
        run = OpenRun(
            config=self.config,
            store=nothing,
            engine=nothing,
            policies=nothing,
            folder=nothing,
            progress=nothing,
            report=nothing,
        )
        self.update = PolicyUpdate(run, self.trainer, TrainingBudget(self.config, nothing), "policy", made)

    async def step(self, number: int, seed: int, clock: Callable[[], float]) -> float:
        """One step; returns its seconds by a clock."""
        batch = await self.update.make_batch(number, episodes(seed))
        begin = clock()
        row = await self.update.train(number, batch)
        seconds = clock() - begin
        assert row["train/trained_tokens"] == PROMPTS * SAMPLES * NEW_TOKENS, row
        await self.trainer.weights("policy")
        return seconds


async def measure(threads: int, steps: int, names: list[str], clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of all steps but the first, by algorithm."""
    contestants = {name: Contestant(threads, name) for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for one in contestants.values():
        await one.trainer.create("policy", one.spec)
    order = random.Random(0)
    for number in range(1, steps + 1):
        for name in order.sample(names, len(names)):
            found[name].append(await contestants[name].step(number, number, clock))
    for one in contestants.values():
        await one.trainer.close()
    return {name: seconds[1:] for name, seconds in found.items()}


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7, help="the first is not counted")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor, which neighbours disturb less")
    wanted = parser.parse_args()
    clock = time.process_time if wanted.cpu else time.perf_counter
    tune_malloc()
    print(json.dumps(asyncio.run(measure(wanted.threads, wanted.steps, wanted.only, clock))))


if __name__ == "__main__":
    main()
