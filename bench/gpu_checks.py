"""The checks of `gpu`: what a card computes, each beside what the CPU computes in float32."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from gpu_works import LOSS, Scale, close, job_of, prompts_of, replies, rows_of, sampled
from made_rows import POLICY, made_row, made_rows
from torch import Tensor, nn

from palestra.config import TrainerConfig, parse_config
from palestra.runtime.parts import Parts, build_parts, pooled_parts
from palestra.trainer.base import OptimParams, PolicySpec, StepReport, Trainer
from palestra.trainer.block_attention import BlockAttention
from palestra.trainer.moment_files import read_moments
from palestra.trainer.optimizer import moments_folder, read_named
from palestra.trainer.packing import Tree, pack
from palestra.trainer.torch_policy import OPTIMIZER
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import Ids
from palestra.types.records import TrainSample
from palestra_sharded.trainer import ShardedTrainer

SCALE = 0.125  # of scores of attention, for heads of 64 numbers


async def correctness(model: Path, device: str, scale: Scale) -> dict[str, Any]:
    """Compare logprobs, gradients and greedy ids with those of the CPU in float32."""
    rows = rows_of(scale, 2, 0)
    wanted = await trained_numbers(model, "cpu", "float32", rows)
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        report, gradient = await trained_numbers(model, device, dtype, rows)
        found[dtype] = {
            "logprobs": furthest(report, wanted[0]),
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
    assert any(bool(b.any()) for b in wanted), "there is no gradient to compare with"
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


# Attention


async def attention(device: str, scale: Scale) -> dict[str, Any]:
    """Compare FlexAttention over blocks of nodes, and its gradient, with a mask of all nodes in float64 on the CPU.

    A CPU has no gradient of FlexAttention, so that a rehearsal compares values alone.
    """
    rows = made_rows(
        0,
        prompts=2,
        samples=max(scale.samples // 2, 2),
        prompt_tokens=scale.prompt_tokens,
        new_tokens=scale.new_tokens,
    )
    trees = [tree for micro in pack(rows, 10**9) for tree in micro.trees]
    nodes, found = sum(map(len, trees)), dict[str, Any]()
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn((1, heads, nodes, 64), generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]
    upstream = torch.randn((nodes, 4, 64), generator=draw, dtype=torch.float64)
    for name, window in (("all ancestors", None), (f"{scale.window} tokens", scale.window)):
        values, gradient = masked_attention(trees, inputs, upstream, window)
        for dtype in ("float32", "bfloat16"):
            own = [each.to(device, getattr(torch, dtype)).requires_grad_(device == "cuda") for each in inputs]
            out = BlockAttention(trees, torch.device(device))(*own, SCALE, window)
            one = {"values": relative([out.detach().cpu().double()], [values])}
            if device == "cuda":
                back = torch.autograd.grad(out, own, upstream.to(device, out.dtype))
                one["gradient"] = relative([each.cpu().double() for each in back], gradient)
            found[f"{name}, {dtype}"] = one
    return found


def masked_attention(
    trees: Sequence[Tree], inputs: Sequence[Tensor], upstream: Tensor, window: int | None
) -> tuple[Tensor, Sequence[Tensor]]:
    """Attention with a mask of all nodes of all trees, [N, H, D], and the gradient of query, key and value."""
    masks = [
        mask if (mask := tree.mask()) is not None else torch.ones((len(tree),) * 2).tril().bool() for tree in trees
    ]
    seen = torch.block_diag(*masks).bool()
    if window is not None:
        places = torch.tensor([place for tree in trees for place in tree.positions])
        seen &= places.unsqueeze(1) - places < window
    own = [each.clone().requires_grad_() for each in inputs]
    out = F.scaled_dot_product_attention(*own, attn_mask=seen, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    return out.detach(), torch.autograd.grad(out, own, upstream)


# A trainer over devices


async def sharded(model: Path, device: str, scale: Scale) -> dict[str, Any]:
    """Compare a rank that is alone, on a card over NCCL, with one process on the CPU.

    With `trainer.cpu_offload` as well, which there is on a card only. Each rank writes a checkpoint after one update,
    and continues from that of the CPU with another.
    """
    ways: dict[str, dict[str, Any]] = {"one rank": {}}
    if device == "cuda":
        ways["one rank, offloaded"] = {"cpu_offload": True}
    first, second = rows_of(scale, 2, 0), rows_of(scale, 2, 1)
    arithmetic = {"dtype": "float32"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        right = TorchTrainer(TrainerConfig.model_validate(arithmetic | {"device": "cpu"}), 2)
        try:
            await right.create(POLICY, PolicySpec(model=model))
            wanted, at = await updated(right, POLICY, first, folder / "cpu", 1)
            _, then = await updated(right, POLICY, second, folder / "cpu", 2)
        finally:
            await right.close()
        for way, more in ways.items():
            rank = ShardedTrainer(TrainerConfig.model_validate(arithmetic | {"device": device} | more), 2, "float32")
            try:
                await rank.create(POLICY, PolicySpec(model=model))
                report, path = await updated(rank, POLICY, first, folder / way, 1)
                published = dict((await rank.weights(POLICY)).tensors())
                saved = saved_weights(path)
                await rank.create("continued", PolicySpec(model=model))
                await rank.load("continued", folder / "cpu", 1)
                _, after = await updated(rank, "continued", second, folder / f"{way}, continued", 2)
            finally:
                await rank.close()
            found[way] = {
                "logprobs": furthest(report, wanted),
                "gradient": moments_apart(path, at),
                "continued": moments_apart(after, then),
                "published": all(torch.equal(value, saved[name]) for name, value in published.items()),
            }
    return found


async def updated(
    trainer: Trainer, policy: str, rows: Sequence[TrainSample], folder: Path, step: int
) -> tuple[StepReport, Path]:
    """Update a policy by rows, and return the report of the gradient, and the checkpoint that was saved then."""
    report = await trainer.forward_backward(policy, rows, LOSS, f"gradient {step}", logprobs=True)
    params = OptimParams(learning_rate=1e-4, max_grad_norm=1e9)
    await trainer.optim_step(policy, params, f"update {step}")
    return report, await trainer.save(policy, folder, {"step": step}, f"save {step}")


def furthest(found: StepReport, wanted: StepReport) -> float:
    """The largest difference of two log-probabilities of a token."""
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    return max(float(np.nanmax(np.abs(a - b))) for a, b in zip(found.logprobs, wanted.logprobs, strict=True))


def moments_apart(found: Path, wanted: Path) -> float:
    """How far apart the first moments of two checkpoints are, which are sums of gradients."""
    ours, theirs = first_moments(found), first_moments(wanted)
    assert ours.keys() == theirs.keys()
    return relative([ours[name] for name in theirs], list(theirs.values()))


def first_moments(path: Path) -> dict[str, Tensor]:
    """The first moments of a checkpoint by the name of the weight, whoever has written it."""
    shards = moments_folder(path, OPTIMIZER)
    if shards.is_dir():
        moments = read_moments(shards, [(name, nn.Parameter(value)) for name, value in saved_weights(path).items()])
    else:
        moments = read_named(path, OPTIMIZER)
    return {key: value for key, value in sorted(moments.items()) if key.startswith("exp_avg.")}


def saved_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint by their names."""
    found: dict[str, Tensor] = {}
    for file in path.glob("model*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found


# vLLM as a job's engine


async def served(model: Path, device: str, scale: Scale, vllm: str | None) -> dict[str, Any]:
    """Compare what vLLM says of its tokens with what the trainer says, before and after new weights."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    engine = {"kind": "vllm", "python": vllm, "dtype": dtype, "cache_gib": 2 if device == "cuda" else 1}
    prompts, tokens = prompts_of(8, scale, 4), min(scale.new_tokens, 64)
    with tempfile.TemporaryDirectory() as folder:
        policy = {"model": str(model), "max_context": 1024}
        trainer = {"device": device, "dtype": dtype}
        config = parse_config({"run_dir": folder, "policies": {POLICY: policy}, "engine": engine, "trainer": trainer})
        parts = await pooled_parts(config, {})
        assert parts.trainer is not None
        try:
            await parts.engine.resume()
            for name in (POLICY, "before"):
                await parts.trainer.create(name, PolicySpec(model=model))
            rows = await sampled_rows(parts, prompts, tokens)
            found = {"gap": await gap(parts.trainer, POLICY, rows)}
            await parts.trainer.forward_backward(POLICY, rows, LOSS, "gradient")
            await parts.trainer.optim_step(POLICY, OptimParams(learning_rate=3e-4), "update")
            begin = time.perf_counter()
            source = await parts.trainer.weights(POLICY)
            await parts.engine.sync_weights(POLICY, parts.trainer.version(POLICY), source)
            found["sync s"] = time.perf_counter() - begin
            rows = await sampled_rows(parts, prompts, tokens)
            found["gap after new weights"] = await gap(parts.trainer, POLICY, rows)
            found["gap to the weights before"] = await gap(parts.trainer, "before", rows)
        finally:
            await close(parts)
    return found


async def sampled_rows(parts: Parts, prompts: Sequence[Ids], tokens: int) -> list[TrainSample]:
    """A row for each prompt, with what the engine has sampled; advantages of both signs."""
    rows = []
    for number, (prompt, reply) in enumerate(zip(prompts, await sampled(parts, prompts, tokens), strict=True)):
        ids = np.concatenate((prompt, np.array([token for token, _ in reply], np.int32)))
        weight = 1.0 / (len(prompts) * tokens)
        rows.append(made_row(f"{number}", ids, len(prompt), [p for _, p in reply], (-1.0) ** number, weight))
    return rows


async def gap(trainer: Trainer, policy: str, rows: Sequence[TrainSample]) -> float:
    """The mean difference of what the engine and the trainer say of a sampled token, in nats."""
    said = (await trainer.forward(policy, rows, ("old_logprobs",)))["old_logprobs"]
    apart = [np.abs(own - row.logprobs)[row.loss_mask] for own, row in zip(said, rows, strict=True)]
    return float(np.concatenate(apart).mean())
