"""Times GRPO steps of Palestra's own parts, in a process of their own; prints one JSON line.

    python bench/step_palestra.py --threads 2 --steps 6 [--rank 16]

One step is what bench/peers/trl_step.py does: 8 prompts of 40 tokens x 8 samples of 12, seeded random rewards, one
AdamW update of float32 weights with bfloat16 compute; here the new weights are handed to the engine as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_floor import best_rate, count_weights, generate_flop, product_rates, train_flop

from palestra.algorithms.registry import create_algorithm
from palestra.config import JobConfig, parse_config
from palestra.engine.base import EngineRequest
from palestra.learner.batch import make_batch
from palestra.models.causal_lm import load_causal_lm
from palestra.models.device import tune_malloc
from palestra.runtime.parts import Parts, build_parts
from palestra.threads import in_thread
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.types.calls import Chat, Ids, SamplingParams, TokenSequence, VersionSpan
from palestra.types.messages import ChatMessage, text_message
from palestra.types.records import EpisodeRecord, Task, TimeStep, Trajectory
from palestra.types.states import EpisodeState

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 40, 12
SYSTEM = "You are a calculator. Reply with the number only."
FILLER = " now"  # one token; repeated until a prompt has its length
Messages = tuple[ChatMessage, ...]


def job_config(threads: int, rank: int = 0) -> JobConfig:
    """The job whose parts are measured: defaults but for lengths, threads unless they are 0, and an adapter above 0."""
    arithmetic = {"threads": threads or None}
    adapter = {"rank": rank} if rank else None
    policy = {"sampling": {"max_tokens": NEW_TOKENS}, "max_context": 256, "adapter": adapter}
    return parse_config({"policies": {"policy": policy}, "engine": arithmetic, "trainer": arithmetic})


class Bench:
    """The parts, and the time that each piece of a step took."""

    def __init__(self, config: JobConfig, seed: int) -> None:
        self.config, self.parts = config, build_parts(config)
        self.algorithm = create_algorithm(config.algorithm)
        self.draw = random.Random(seed)
        self.steps: list[dict[str, float]] = []  # seconds by piece
        self.tokens: dict[str, int] = {}  # of the last step

    @contextmanager
    def clock(self, piece: str) -> Iterator[None]:
        """Add to the seconds of a piece of the present step."""
        start = time.perf_counter()
        yield
        self.steps[-1][piece] = time.perf_counter() - start

    async def step(self, number: int) -> None:
        """Sample, reward, gradient, update, publish."""
        self.steps.append({})
        parts, name = self.parts, self.config.players.default
        prompts = make_prompts(parts, PROMPTS, self.draw)
        before = parts.engine.load()
        with self.clock("total"):
            with self.clock("generate"):
                calls = [self.play(index, *prompt) for index, prompt in enumerate(prompts) for _ in range(SAMPLES)]
                chats = await asyncio.gather(*calls)
            with self.clock("batch"):
                played = [self.reward(number, place, chat) for place, chat in enumerate(chats)]
                version = parts.trainer.version(name)
                batch = make_batch(played, self.algorithm, NEW_TOKENS, version, name, self.config.players)
                rows = batch.with_advantages(self.algorithm.advantages(batch.groups, {}), {}).samples
            with self.clock("forward_backward"):
                loss = self.algorithm.loss()
                report = await parts.trainer.forward_backward(name, rows, loss, f"gradient {number}")
            with self.clock("optimizer"):
                optimizer = self.config.policies[name].optimizer
                params = OptimParams.of(optimizer, optimizer.learning_rate)
                await parts.trainer.optim_step(name, params, f"update {number}")
            with self.clock("publish"):
                weights = await parts.trainer.weights(name)
                await parts.engine.sync_weights(name, parts.trainer.version(name), weights)
        assert (report.rows, report.trained_tokens) == (PROMPTS * SAMPLES, PROMPTS * SAMPLES * NEW_TOKENS), report
        after = parts.engine.load()
        self.tokens = {
            "prefilled": after.prefilled_tokens - before.prefilled_tokens,
            "sampled": after.sampled_tokens - before.sampled_tokens,
            "computed": report.forward_tokens,
            "flat": report.flat_tokens,
            "trained": report.trained_tokens,
        }

    async def play(self, group: int, messages: Messages, prompt_ids: Ids, policy: str = "") -> Chat:
        """One call of exactly `NEW_TOKENS` tokens, as the session records it; by default of the first policy."""
        name = policy or self.config.players.default
        sampling = SamplingParams(
            temperature=1.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, seed=self.draw.getrandbits(63)
        )
        request = EngineRequest(policy=name, prompt=TokenSequence(prompt_ids), sampling=sampling)
        pieces = [p async for p in self.parts.engine.generate(request)]
        ids = np.array([token for piece in pieces for token in piece.ids], np.int32)
        assert len(ids) == NEW_TOKENS, f"{len(ids)} tokens were sampled"
        return Chat(
            episode_id=f"group-{group}",
            fence=1,
            index=0,
            time_step=0,
            agent="agent",
            policy=name,
            parent=None,
            shared=0,
            shared_messages=0,
            new_messages=messages,
            prompt_tail=prompt_ids,
            reply=text_message("assistant", ""),
            completion_ids=ids,
            logprobs=np.array([value for piece in pieces for value in piece.logprobs], np.float32),
            versions=(VersionSpan(pieces[0].version, len(ids)),),
            finish_reason="length",
            sampling=sampling,
            request_digest="",
            started_at=0.0,
            finished_at=0.0,
        )

    def reward(self, step: int, place: int, chat: Chat, agent: str = "agent") -> Trajectory:
        """A completed episode with a random reward."""
        episode = EpisodeRecord(
            episode_id=f"step-{step}-{place}",
            kind="train",
            group_index=step * PROMPTS + place // SAMPLES,
            sample_index=place % SAMPLES,
            task=Task(task_id=chat.episode_id, data={}),
            state=EpisodeState.COMPLETED,
            fence=1,
            attempts=1,
            rewards={agent: self.draw.random()},
            step_rewards=None,
            step_times=None,
            metadata={},
            worker_id="bench",
            lease_seconds=120.0,
        )
        return Trajectory(
            episode=episode,
            steps=(
                TimeStep(
                    index=0, chats=(chat,), reward=None, observed_at=0.0, acted_at=0.0, terminated=True, truncated=False
                ),
            ),
        )


def make_prompts(parts: Parts, count: int, draw: random.Random) -> list[tuple[Messages, Ids]]:
    """Different conversations of exactly `PROMPT_TOKENS` tokens, with their ids."""
    found: list[tuple[Messages, Ids]] = []
    for pair in draw.sample([(a, b) for a in range(1, 100) for b in range(1, 100)], count):
        for repeats in range(PROMPT_TOKENS):
            text = f"Add{FILLER * repeats}: {pair[0]} + {pair[1]} ="
            messages = (text_message("system", SYSTEM), text_message("user", text))
            ids = parts.policies.runtime(parts.policies.roles.default).renderer.render(messages).ids
            if len(ids) == PROMPT_TOKENS:
                found.append((messages, ids))
                break
    assert len(found) == count, f"only {len(found)} of {count} prompts could be made {PROMPT_TOKENS} tokens long"
    return found


async def measure(threads: int, steps: int, seed: int, rank: int) -> dict[str, Any]:
    """Run the steps, the first of which is a warm-up; returns the record that is printed."""
    rates = await in_thread(lambda: product_rates(threads or torch.get_num_threads()))
    config = job_config(threads, rank)
    bench = await in_thread(lambda: Bench(config, seed))  # as a job builds them: the pool of the thread ends with it
    policy = config.policies[config.players.default]
    await bench.parts.trainer.create(config.players.default, PolicySpec(model=policy.model, adapter=policy.adapter))
    await bench.parts.engine.resume()
    try:
        for number in range(steps):
            await bench.step(number)
    finally:
        await bench.parts.engine.close()
        await bench.parts.trainer.close()
    peak = peak_rss_mb()
    return {"steps": bench.steps[1:], "peak_rss_mb": peak, "tokens": bench.tokens, "floor": floor(bench, rates)}


def floor(bench: Bench, rates: dict[str, float]) -> dict[str, Any]:
    """Seconds of arithmetic in the last step."""
    model = load_causal_lm(bench.config.policies[bench.config.players.default].model, torch.bfloat16)
    weights, tokens, rate = count_weights(model.named_parameters(), model.vocab_size), bench.tokens, best_rate(rates)
    computed_in_generation = tokens["prefilled"] + tokens["sampled"] - PROMPTS * SAMPLES  # the last one is not fed back
    return {
        "gflops_by_shape": {name: value / 1e9 for name, value in rates.items()},
        "body_weights": weights.body,
        "head_weights": weights.head,
        "generate_seconds": generate_flop(weights, computed_in_generation, tokens["sampled"]) / rate,
        "train_seconds": train_flop(weights, tokens["computed"], tokens["trained"]) / rate,
        "flat_train_seconds": train_flop(weights, tokens["flat"], tokens["trained"]) / rate,
    }


def peak_rss_mb() -> float:
    """Largest resident size of this process so far, in MiB (VmHWM; `ru_maxrss` would survive the parent's)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, required=True, help="0: as many as other processes leave, the default")
    parser.add_argument("--steps", type=int, default=6, help="the first is a warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0, help="of an adapter; 0: all weights are trained")
    wanted = parser.parse_args(arguments)
    tune_malloc()
    print(json.dumps(asyncio.run(measure(wanted.threads, wanted.steps, wanted.seed, wanted.rank))))


if __name__ == "__main__":
    main()
