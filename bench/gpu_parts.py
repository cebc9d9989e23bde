"""One check or measurement of `gpu`, in a process of its own whose memory goes with it; prints one JSON line.

python bench/gpu_parts.py correctness --device cuda --model SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from made_rows import LEAST_ID, MOST_ID, POLICY, made_rows
from processes import HERE, run_json
from step_floor import count_weights, train_flop
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import JobConfig, TrainerConfig, parse_config
from palestra.engine.base import EngineRequest
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import FLAT_ATTENTION, CausalLM, load_tokenizer
from palestra.models.device import tune_process
from palestra.runtime.parts import Parts, build_parts
from palestra.trainer.base import OptimParams, PolicySpec, StepReport
from palestra.trainer.torch_policy import TorchPolicy
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import Ids, SamplingParams, TokenSequence
from palestra.types.records import TrainSample

LOSS = LossSpec.of(PPOClipLoss())
GIB = 2**30
# Hidden size and layers of the models for the largest that fits, about 0.1, 0.5, 1, 2, 3, 5, 7 and 9 billion weights.
SIZES = ((768, 12), (1536, 18), (2048, 20), (2560, 26), (3072, 30), (3584, 32), (4096, 34), (4608, 36))
REHEARSED = ((64, 2), (128, 2))


class Scale:
    """How much is measured: enough for a card, or as little as shows that the code runs."""

    def __init__(self, rehearsal: bool) -> None:
        self.prompts, self.samples = (2, 2) if rehearsal else (16, 8)
        self.prompt_tokens, self.new_tokens = (12, 6) if rehearsal else (512, 256)
        self.steps = 2 if rehearsal else 6  # the first is not counted
        self.sizes = REHEARSED if rehearsal else SIZES


def rows_of(scale: Scale, prompts: int, seed: int) -> list[TrainSample]:
    """Rows of made-up ids, in groups that share a prompt."""
    return made_rows(
        seed,
        prompts=prompts,
        samples=scale.samples,
        prompt_tokens=scale.prompt_tokens,
        new_tokens=scale.new_tokens,
    )


def job_of(model: str, device: str, dtype: str = "bfloat16") -> JobConfig:
    """A job whose engine and trainer are on a device."""
    arithmetic = {"device": device, "dtype": dtype}
    policy = {"model": model, "max_context": 1024}
    return parse_config({"policies": {POLICY: policy}, "engine": arithmetic, "trainer": arithmetic})


def wait_for(device: str) -> None:
    """Let the device finish, so that a clock tells what it took."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: str) -> float | None:
    """The most memory of the device that tensors have had; None on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None


# Correctness


async def correctness(model: str, device: str, scale: Scale) -> dict[str, Any]:
    """Compare logprobs, gradients and greedy ids with those of the CPU in float32."""
    rows = rows_of(scale, 2, 0)
    wanted = await trained_numbers(model, "cpu", "float32", rows)
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        report, gradient = await trained_numbers(model, device, dtype, rows)
        assert report.logprobs is not None
        assert wanted[0].logprobs is not None
        pairs = zip(report.logprobs, wanted[0].logprobs, strict=True)
        found[dtype] = {
            "logprobs": max(float(np.nanmax(np.abs(a - b))) for a, b in pairs),
            "gradient": relative(gradient, wanted[1]),
        }
    right = await greedy_ids(model, "cpu", scale)
    own = await greedy_ids(model, device, scale)
    found["equal ids"] = statistics.fmean(a == b for a, b in zip(own, right, strict=True))
    return found


async def trained_numbers(
    model: str, device: str, dtype: str, rows: Sequence[TrainSample]
) -> tuple[StepReport, list[Tensor]]:
    """The report of one gradient, and the gradient of each weight on the CPU."""
    trainer = TorchTrainer(TrainerConfig.model_validate({"device": device, "dtype": dtype}), 1)
    try:
        await trainer.create(POLICY, PolicySpec(model=model))
        report = await trainer.forward_backward(POLICY, rows, LOSS, "gradient", logprobs=True)
        gradient = trainer._policies[POLICY].optimizer.gradient()
        return report, [each.float().cpu() for each in gradient if each is not None]
    finally:
        await trainer.close()


def relative(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The norm of the difference of two gradients, by the norm of the second."""
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(found, wanted, strict=True))
    return float((apart / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5)


async def greedy_ids(model: str, device: str, scale: Scale) -> list[int]:
    """The most probable continuations of a few prompts in float32, all in one list."""
    parts = build_parts(job_of(model, device, "float32"))
    try:
        await parts.engine.resume()
        prompts = prompts_of(4, scale, 0)
        return [i for ids in await replies(parts, prompts, min(scale.new_tokens, 64), temperature=0.0) for i in ids]
    finally:
        await close(parts)


def prompts_of(count: int, scale: Scale, seed: int) -> list[Ids]:
    """Different prompts of made-up ids."""
    draw = np.random.default_rng(seed)
    return [draw.integers(LEAST_ID, MOST_ID, scale.prompt_tokens, dtype=np.int32) for _ in range(count)]


async def replies(parts: Parts, prompts: Sequence[Ids], tokens: int, temperature: float = 1.0) -> list[list[int]]:
    """A reply of so many tokens to each prompt, all at the same time."""

    async def one(number: int, prompt: Ids) -> list[int]:
        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, min_tokens=tokens, seed=number)
        request = EngineRequest(policy=POLICY, prompt=TokenSequence(prompt), sampling=sampling)
        return [token async for piece in parts.engine.generate(request) for token in piece.ids]

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


async def close(parts: Parts) -> None:
    """End engine and trainer."""
    await parts.engine.close()
    if parts.trainer is not None:
        await parts.trainer.close()


# Speed


async def rollout(model: str, device: str, scale: Scale, vllm: str | None) -> dict[str, Any]:
    """Tokens a second of the embedded engine, and of bare vLLM where its interpreter is given."""
    works = {
        "groups": [p for p in prompts_of(scale.prompts // 2, scale, 1) for _ in range(scale.samples)],
        "different prompts": prompts_of(scale.prompts * 4, scale, 2),
    }
    found: dict[str, Any] = {}
    parts = build_parts(job_of(model, device))
    try:
        await parts.engine.resume()
        await replies(parts, prompts_of(2, scale, 3), scale.new_tokens)
        for name, prompts in works.items():
            begin = time.perf_counter()
            sampled = sum(map(len, await replies(parts, prompts, scale.new_tokens)))
            found[name] = {"Palestra": sampled / (time.perf_counter() - begin)}
        found["peak GiB"] = peak_gib(device)
    finally:
        await close(parts)
    if vllm is not None:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        asked = {name: [prompt.tolist() for prompt in prompts] for name, prompts in works.items()}
        words = (vllm, HERE / "peers" / "gpu_vllm.py", model_folder(model), scale.new_tokens, json.dumps(asked))
        for name, rate in run_json(words)["tokens a second"].items():
            found[name]["vLLM"] = rate
    return found


async def training(model: str, device: str, scale: Scale) -> dict[str, Any]:
    """Seconds of a training step and of handing its weights to the engine, MFU, and memory."""
    parts = build_parts(job_of(model, device))
    assert isinstance(parts.trainer, TorchTrainer)
    steps, syncs, computed = list[float](), list[float](), list[int]()
    report = None
    try:
        await parts.engine.resume()
        await parts.trainer.create(POLICY, PolicySpec(model=model))
        for number in range(scale.steps):
            begin = time.perf_counter()
            rows = rows_of(scale, scale.prompts, number)
            report = await parts.trainer.forward_backward(POLICY, rows, LOSS, f"gradient {number}")
            await parts.trainer.optim_step(POLICY, OptimParams(learning_rate=1e-6), f"update {number}")
            wait_for(device)
            steps.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            weights = await parts.trainer.weights(POLICY)
            await parts.engine.sync_weights(POLICY, parts.trainer.version(POLICY), weights)
            wait_for(device)
            syncs.append(time.perf_counter() - begin)
            computed.append(report.forward_tokens)
        policy = parts.trainer._policies[POLICY]
        counted = count_weights(policy.model.named_parameters(), policy.model.vocab_size)
    finally:
        await close(parts)
    assert report is not None
    seconds = statistics.median(steps[1:])
    rate = train_flop(counted, computed[-1], report.trained_tokens) / seconds
    fastest = product_rate(device)
    return {
        "step s": steps[1:],
        "sync s": syncs[1:],
        "computed tokens": computed[-1],
        "trained tokens": report.trained_tokens,
        "tokens a second": computed[-1] / seconds,
        "TFLOP a second": rate / 1e12,
        "product TFLOP a second": fastest / 1e12,
        "MFU": rate / fastest,
        "peak GiB": peak_gib(device),
    }


def product_rate(device: str) -> float:
    """Operations a second of large products in bfloat16 on this device: the best of a few tries."""
    size = 8192 if device == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    taken = []
    for _ in range(6):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(10):
            left @ right
        wait_for(device)
        taken.append((time.perf_counter() - begin) / 10)
    return 2.0 * size**3 / min(taken)


# Memory


async def largest(model: str, device: str, scale: Scale) -> dict[str, Any]:
    """The largest of some random models of which all weights can be trained with the memory of the device."""
    tokenizer, fits, too_large = load_tokenizer(model), 0, 0
    for hidden, layers in scale.sizes:
        try:
            count = train_once(hidden, layers, tokenizer, device, scale)
        except torch.OutOfMemoryError:
            too_large = weights_of(hidden, layers, len(tokenizer))
            break
        fits = count
        print(f"{count / 1e9:.2f} billion weights fit", file=sys.stderr, flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"fits": fits, "does not": too_large}


def shape_of(hidden: int, layers: int, vocabulary: int) -> LlamaConfig:
    """A model in the proportions of Llama's."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 128, 2),
        num_key_value_heads=max(hidden // 512, 1),
        max_position_embeddings=4096,
        attn_implementation=FLAT_ATTENTION,
    )


def weights_of(hidden: int, layers: int, vocabulary: int) -> int:
    """The number of weights of such a model."""
    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(shape_of(hidden, layers, vocabulary)).parameters())


def train_once(hidden: int, layers: int, tokenizer: Any, device: str, scale: Scale) -> int:
    """Train one step with layers that are computed again, and return the number of weights.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    with torch.device(device):
        model = CausalLM(LlamaForCausalLM(shape_of(hidden, layers, len(tokenizer))).eval())
    model.recompute_blocks()
    policy = TorchPolicy(model, tokenizer, TrainerConfig.model_validate({"device": device}))
    rows = rows_of(scale, 2, 0)
    policy.gradient_pieces(rows, LOSS).run()
    policy.optimizer.step(OptimParams(learning_rate=1e-6))
    wait_for(device)
    return sum(p.numel() for p in model.model.parameters())


PARTS: dict[str, Callable[..., Any]] = {
    "correctness": correctness,
    "rollout": rollout,
    "training": training,
    "largest": largest,
}


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm", help="an interpreter that has vLLM")
    parser.add_argument("--rehearsal", action="store_true", help="as little as shows that the code runs")
    wanted = parser.parse_args()
    tune_process()
    more = (wanted.vllm,) if wanted.part == "rollout" else ()
    print(json.dumps(asyncio.run(PARTS[wanted.part](wanted.model, wanted.device, Scale(wanted.rehearsal), *more))))


if __name__ == "__main__":
    main()
