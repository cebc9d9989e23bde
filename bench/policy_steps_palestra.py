"""Times steps of one policy with all episodes, or of several that share them, in a process of their own.

    python bench/policy_steps_palestra.py --policies 2 --threads 2 --steps 6

A step is that of step_palestra.py: 8 prompts of 40 tokens x 8 samples of 12, random rewards, an AdamW update, and the
publication of the new weights. With several policies each plays its part of the prompts, as a model of its own, and is
trained on what it has sampled. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from step_palestra import NEW_TOKENS, PROMPTS, SAMPLES, Bench, job_config, make_prompts, peak_rss_mb

from palestra.config import JobConfig, parse_config
from palestra.learner.batch import make_batch
from palestra.models.device import tune_malloc
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.types.calls import Chat


def config_of(threads: int, policies: int) -> JobConfig:
    """The job of step_palestra.py, with several policies of the same model."""
    plain = job_config(threads).model_dump(mode="json", include={"policies", "engine", "trainer"}, exclude_none=True)
    names = [f"p{number}" for number in range(policies)]
    roles = {f"agent-of-{name}": name for name in names[1:]}
    return parse_config(plain | {"policies": dict.fromkeys(names, plain["policies"]["policy"]), "roles": roles})


class SharedBench(Bench):
    """The parts of a job with several policies, and the time that each piece of a step took."""

    async def step(self, number: int) -> None:
        """Sample, reward, and for each policy gradient and update; then publish all."""
        self.steps.append({})
        names = self.config.trained_policies
        prompts = make_prompts(self.parts, PROMPTS, self.draw)
        shares = {name: range(place, PROMPTS, len(names)) for place, name in enumerate(names)}
        with self.clock("total"):
            with self.clock("generate"):
                chats = await asyncio.gather(
                    *(
                        self.play(index, *prompts[index], policy=name)
                        for name, share in shares.items()
                        for index in share
                        for _ in range(SAMPLES)
                    )
                )
            rows = {name: self.rows(number, name, [chat for chat in chats if chat.policy == name]) for name in names}
            with self.clock("train"):
                trained = [await self.update(number, name, rows[name]) for name in names]
            with self.clock("publish"):
                for name in names:
                    weights = await self.parts.trainer.weights(name)
                    await self.parts.engine.sync_weights(name, self.parts.trainer.version(name), weights)
        assert sum(trained) == PROMPTS * SAMPLES * NEW_TOKENS, trained

    def rows(self, step: int, policy: str, chats: Sequence[Chat]) -> list[Any]:
        """The rows of one policy's episodes, with advantages."""
        agent = "agent" if policy == self.config.players.default else f"agent-of-{policy}"
        played = [self.reward(step, place, chat, agent) for place, chat in enumerate(chats)]
        version = self.parts.trainer.version(policy)
        batch = make_batch(played, self.algorithm, NEW_TOKENS, version, policy, self.config.players)
        return batch.with_advantages(self.algorithm.advantages(batch.groups, {}), {}).samples

    async def update(self, step: int, policy: str, rows: Sequence[Any]) -> int:
        """Gradient and update of one policy; returns its trained tokens."""
        loss, optimizer = self.algorithm.loss(), self.config.policies[policy].optimizer
        report = await self.parts.trainer.forward_backward(policy, rows, loss, f"gradient {step}")
        await self.parts.trainer.optim_step(
            policy, OptimParams.of(optimizer, optimizer.learning_rate), f"update {step}"
        )
        return report.trained_tokens


async def measure(threads: int, policies: int, steps: int, seed: int) -> dict[str, Any]:
    """Run the steps, the first of which is a warm-up; returns the record that is printed."""
    config = config_of(threads, policies)
    bench = SharedBench(config, seed)
    for name in config.trained_policies:
        await bench.parts.trainer.create(name, PolicySpec(model=config.policies[name].model))
    await bench.parts.engine.resume()
    try:
        for number in range(steps):
            await bench.step(number)
    finally:
        await bench.parts.engine.close()
        await bench.parts.trainer.close()
    return {"steps": bench.steps[1:], "peak_rss_mb": peak_rss_mb(), "parameters": parameters_of(bench)}


def parameters_of(bench: Bench) -> int:
    """Weights of one policy."""
    policy = bench.parts.trainer._policies[bench.config.players.default]  # type: ignore[union-attr]
    return sum(weight.numel() for _, weight in policy.parameters)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, default=6, help="the first is a warm-up")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(arguments)
    tune_malloc()
    print(json.dumps(asyncio.run(measure(wanted.threads, wanted.policies, wanted.steps, wanted.seed))))


if __name__ == "__main__":
    main()
