"""How far the logprobs of the engine and the trainer are apart, and what that costs; prints one JSON line.

    python bench/logprob_gap.py --engine bfloat16 --trainer bfloat16 --threads 2 [--vllm .venv-peers/vllm/bin/python]

The engine samples 8 replies to each of 12 prompts at temperature 1. The trainer computes the logprobs of the same
tokens from the same weights, in its micro-batches and row by row, and so do transformers' own float32 and bfloat16
models. No weight changes in between, so every difference is rounding. With `--vllm` the engine is a vLLM server, which
that interpreter starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from figures import Part
from processes import HERE, run_json, shown

from palestra.config import JobConfig, parse_config
from palestra.engine.base import EngineRequest
from palestra.models.catalog import model_folder
from palestra.models.device import tune_malloc
from palestra.runtime.parts import Parts, build_parts, pooled_parts
from palestra.threads import in_thread
from palestra.trainer.base import PolicySpec
from palestra.types.calls import Floats, Ids, SamplingParams, TokenSequence
from palestra.types.messages import text_message
from palestra.types.records import TrainSample

PROMPTS, REPLIES, LONGEST = 12, 8, 48
SYSTEM = "You are a helpful calculator."
TABLE = "Gap of logprobs at staleness 0 (SmolLM2-135M, temperature 1)"
PRECISIONS = (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32"))  # of engine and trainer


def job_config(engine: str, trainer: str, threads: int, vllm: str | None = None) -> JobConfig:
    """A job whose engine and trainer compute in these precisions."""
    return parse_config(
        {
            "policies": {"policy": {"sampling": {"max_tokens": LONGEST}, "max_context": 256}},
            "engine": {"threads": threads, "dtype": engine} | ({"kind": "vllm", "python": vllm} if vllm else {}),
            "trainer": {"threads": threads, "dtype": trainer},
        }
    )


async def sampled(parts: Parts, config: JobConfig, seed: int) -> list[TrainSample]:
    """Replies of the engine as rows of the loss, in groups with the same prompt."""
    draw = random.Random(seed)
    prompts = [
        parts.policies.runtime(parts.policies.roles.default)
        .renderer.render(
            [
                text_message("system", SYSTEM),
                text_message("user", f"What is {draw.randrange(1, 99)} + {draw.randrange(1, 99)}? Explain."),
            ]
        )
        .ids
        for _ in range(PROMPTS)
    ]
    rows = [(np.array(ids, np.int32), draw.getrandbits(63)) for ids in prompts for _ in range(REPLIES)]
    return list(await asyncio.gather(*(_reply(parts, config, ids, seed) for ids, seed in rows)))


async def _reply(parts: Parts, config: JobConfig, prompt: Ids, seed: int) -> TrainSample:
    sampling = SamplingParams(temperature=1.0, max_tokens=LONGEST, seed=seed)
    request = EngineRequest(policy=config.players.default, prompt=TokenSequence(prompt), sampling=sampling)
    pieces = [piece async for piece in parts.engine.generate(request)]
    reply = np.array([token for piece in pieces for token in piece.ids], np.int32)
    ids = np.concatenate((prompt, reply))
    trained = np.arange(len(ids)) >= len(prompt)
    logprobs = np.full(len(ids), np.nan, np.float32)
    logprobs[trained] = [value for piece in pieces for value in piece.logprobs]
    return TrainSample(
        episode_id=str(seed),
        policy=config.players.default,
        ids=ids,
        loss_mask=trained,
        logprobs=logprobs,
        versions=np.where(trained[:, None], 0, -1).astype(np.int32).repeat(2, axis=1),
        calls=np.where(trained, 0, -1).astype(np.int32),
        advantages=trained.astype(np.float32),
        loss_weights=trained.astype(np.float32),
        temperatures=np.ones(len(ids), np.float32),
    )


def in_transformers(samples: Sequence[TrainSample], dtype: str, model_name: str) -> Floats:
    """[T] logprobs of the trained tokens, from transformers' own forward pass over each row alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder(model_name), dtype=getattr(torch, dtype)).eval()
    found = []
    with torch.inference_mode():
        for sample in samples:
            ids = torch.from_numpy(sample.ids.astype(np.int64))
            scores = model(ids[None]).logits[0].float().log_softmax(-1)
            places = np.flatnonzero(sample.loss_mask)
            found.append(scores[places - 1, ids[places]].numpy())
    return np.concatenate(found)


def gap(one: Floats, other: Floats, config: JobConfig) -> dict[str, float]:
    """Absolute differences in nats, and the share of tokens whose ratio lies outside the clip range."""
    difference = other.astype(np.float64) - one
    low, high = 1.0 - config.algorithm.clip_low, 1.0 + config.algorithm.clip_high
    ratio = np.exp(difference)
    return {
        "mean": float(np.abs(difference).mean()),
        "p99": float(np.quantile(np.abs(difference), 0.99)),
        "max": float(np.abs(difference).max()),
        "outside": float(np.mean((ratio < low) | (ratio > high))),
    }


def _trained(rows: Sequence[Floats], samples: Sequence[TrainSample]) -> Floats:
    return np.concatenate([row[sample.loss_mask] for row, sample in zip(rows, samples, strict=True)])


async def measure(config: JobConfig, seed: int) -> dict[str, Any]:
    """Sample, compute the same tokens' logprobs in three other ways, and compare."""
    pooled = config.engine.pooled
    parts = await (pooled_parts(config, {}) if pooled else in_thread(lambda: build_parts(config)))
    assert parts.trainer is not None
    await parts.engine.resume()
    try:
        samples = await sampled(parts, config, seed)
        await parts.trainer.create(
            config.players.default, PolicySpec(model=config.policies[config.players.default].model)
        )
        rows = (await parts.trainer.forward(config.players.default, samples, {"old_logprobs"}))["old_logprobs"]
        single = [
            (await parts.trainer.forward(config.players.default, [sample], {"old_logprobs"}))["old_logprobs"][0]
            for sample in samples
        ]
    finally:
        await parts.engine.close()
        await parts.trainer.close()
    engine = np.concatenate([sample.logprobs[sample.loss_mask] for sample in samples])
    trainer = _trained(rows, samples)
    plain = {
        dtype: in_transformers(samples, dtype, config.policies[config.players.default].model)
        for dtype in ("float32", "bfloat16")
    }
    return {
        "tokens": len(engine),
        "gaps": {
            "engine to trainer": gap(engine, trainer, config),
            "trainer to itself, row by row": gap(trainer, _trained(single, samples), config),
            "engine to transformers float32": gap(engine, plain["float32"], config),
            "trainer to transformers float32": gap(trainer, plain["float32"], config),
            "engine to transformers bfloat16": gap(engine, plain["bfloat16"], config),
            "transformers bfloat16 to float32": gap(plain["bfloat16"], plain["float32"], config),
        },
    }


def run(part: Part, threads: int, quick: bool) -> None:
    """Each pair of precisions in a process of its own."""
    for engine, trainer in PRECISIONS[:1] if quick else PRECISIONS:
        command = (sys.executable, HERE / "logprob_gap.py", "--engine", engine, "--trainer", trainer)
        found = run_json((*command, "--threads", threads))
        for name, gaps in found["gaps"].items():
            part.add(
                f"{TABLE}, engine {engine}, trainer {trainer}",
                name,
                shown((*command, "--threads", threads)),
                mean__nats=[gaps["mean"]],
                p99__nats=[gaps["p99"]],
                max__nats=[gaps["max"]],
                outside__the__clip__range__percent=[100 * gaps["outside"]],
                tokens=[found["tokens"]],
            )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("engine", "trainer"):
        parser.add_argument(f"--{name}", choices=("bfloat16", "float32"), default="bfloat16", help="its precision")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", help="interpreter that has vLLM, which is the engine then")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = job_config(arguments.engine, arguments.trainer, arguments.threads, arguments.vllm)
    tune_malloc()
    print(json.dumps(asyncio.run(measure(config, arguments.seed))))


if __name__ == "__main__":
    main()
