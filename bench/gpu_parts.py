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
from collections.abc import Callable
from typing import Any

import torch
from gpu_checks import attention, correctness, served, sharded
from gpu_works import LOSS, Scale, close, job_of, peak_gib, prompts_of, replies, rows_of, shape_of, wait_for
from made_rows import POLICY
from processes import HERE, run_json
from step_floor import count_weights, train_flop
from transformers import LlamaForCausalLM

from palestra.config import TrainerConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import CausalLM, load_tokenizer
from palestra.models.device import tune_malloc
from palestra.runtime.parts import build_parts
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.torch_policy import TorchPolicy
from palestra.trainer.torch_trainer import TorchTrainer

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
        del parts  # bare vLLM gets the memory of its weights
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        asked = {name: [prompt.tolist() for prompt in prompts] for name, prompts in works.items()}
        words = (vllm, HERE / "peers" / "gpu_vllm.py", model_folder(model), scale.new_tokens, json.dumps(asked))
        for name, rate in run_json(words)["tokens a second"].items():
            found[name]["vLLM"] = rate
    return found


async def decoding(model: str, device: str, scale: Scale) -> dict[str, Any]:
    """Seconds of a decoding pass by how many replies it has: recorded as CUDA graphs, and launched step by step.

    Beside them the least time, in which the card reads the weights and the keys and values once.
    """
    found = dict[str, Any]()
    for way in ("graphs", "launched"):
        parts = build_parts(job_of(model, device))
        assert isinstance(parts.engine, EmbeddedEngine)
        runner = parts.engine._core.policies[POLICY].runner
        if way == "launched":
            runner._graphs = None
            runner.clear()
        try:
            await parts.engine.resume()
            for rows in scale.rows:
                prompts = prompts_of(1, scale, rows) * rows
                await replies(parts, prompts, 4)
                before, begin = parts.engine.load().passes, time.perf_counter()
                await replies(parts, prompts, scale.new_tokens // 2)
                wait_for(device)
                seconds = time.perf_counter() - begin
                passes = parts.engine.load().passes - before
                one = found.setdefault(str(rows), {})
                one[way] = seconds / passes
                one[f"tokens a second, {way}"] = rows * (scale.new_tokens // 2) / seconds
                tokens = rows * (scale.prompt_tokens + scale.new_tokens // 4)
                weights = sum(weight.nbytes for _, weight in runner.model.named_parameters())
                one["least"] = (weights + tokens * runner.model.token_bytes) / copy_rate(device)
        finally:
            await close(parts)
    return found


def copy_rate(device: str) -> float:
    """Bytes a second that a large copy on the device reads and writes: the best of a few tries."""
    source = torch.randn(2**28 if device == "cuda" else 2**22, device=device)
    other, taken = torch.empty_like(source), []
    for _ in range(5):
        wait_for(device)
        begin = time.perf_counter()
        other.copy_(source)
        wait_for(device)
        taken.append(time.perf_counter() - begin)
    return 2.0 * source.nbytes / min(taken)


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
    "attention": attention,
    "sharded": sharded,
    "served": served,
    "decoding": decoding,
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
    tune_malloc()
    more = (wanted.vllm,) if wanted.part in ("rollout", "served") else ()
    scale = Scale(wanted.rehearsal, beside_cpu=wanted.part in ("correctness", "sharded"))
    print(json.dumps(asyncio.run(PARTS[wanted.part](wanted.model, wanted.device, scale, *more))))


if __name__ == "__main__":
    main()
