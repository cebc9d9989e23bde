"""One question of `gpu`, in a process of its own; prints its answer as JSON lines, each with all that is known so far.

python bench/gpu_questions.py learns --dry-run
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_checks
import httpx2
import torch
from gpu_works import (
    LIKE_SMOLLM2,
    LOSS,
    QWEN,
    SMALL,
    Scale,
    close,
    copy_rate,
    job_of,
    peak_gib,
    product_rate,
    prompts_of,
    replies,
    train_once,
    wait_for,
    weights_of,
    write_qwen,
    write_shape,
)
from made_rows import POLICY, made_rows
from processes import HERE, ROOT, run_json
from step_floor import count_weights, train_flop
from transformers import Qwen3ForCausalLM

import palestra
from palestra.config import TINY, AdapterConfig, TrainerConfig, parse_config
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.models.causal_lm import CausalLM, load_tokenizer
from palestra.models.device import precision_of, tune_malloc
from palestra.runtime.parts import build_parts
from palestra.trainer.base import OptimParams
from palestra.trainer.torch_policy import PolicyNetworks, TorchPolicy

sys.path.insert(0, str(ROOT / "recipes"))
NOMINAL = 989.4e12  # bfloat16 products a second of an H100 or H200 (NVIDIA's data sheets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a question is asked with."""

    dry: bool
    vllm: str | None
    model: str  # that learns
    folder: Path  # for models and runs

    @property
    def device(self) -> str:
        """Where everything is computed."""
        return "cpu" if self.dry else "cuda"

    @property
    def arithmetic(self) -> dict[str, Any]:
        """Of engine and trainer."""
        return {"device": self.device}

    def report(self, found: Mapping[str, Any]) -> None:
        """Print what is known so far."""
        print(json.dumps(found), flush=True)


# Learning


def learns(asked: Asked, vllm: bool = False) -> dict[str, Any]:
    """Held-out reward, and the time of a step."""
    from addition import job, rollout, sums

    steps = 2 if asked.dry else 12 if vllm else 30
    config = job(0, steps, asked.model, vllm=asked.vllm if vllm else None).model_dump(mode="json", exclude_unset=True)
    config["run_dir"] = str(asked.folder / "run")
    config["trainer"] = asked.arithmetic
    config["evaluation"] = {"every_steps": 5}
    if not vllm:
        config["engine"] |= asked.arithmetic
    elif not asked.dry:
        config["engine"] |= {"gpu_memory_utilization": 0.3, "compile": False}
    training, validation = sums()
    begin = time.monotonic()
    with reporting(asked, learned):
        palestra.train(rollout, training, parse_config(config), validation_tasks=validation, quiet=True)
    return learned(rows_of_run(asked)) | {"whole s": time.monotonic() - begin, "peak GiB": peak_gib(asked.device)}


def learned(rows: list[dict[str, float]]) -> dict[str, Any]:
    """What a job has learned so far, and what a step takes."""
    return step_times(rows) | {
        "steps": len(rows) - 1,
        "held-out": [row["validation/reward_mean"] for row in rows if "validation/reward_mean" in row],
        "held-out at s": [row["wall_seconds"] for row in rows if "validation/reward_mean" in row],
        "logprob gap": [row["train/logprob_gap_mean"] for row in rows if "train/logprob_gap_mean" in row][-1:],
    }


def rows_of_run(asked: Asked) -> list[dict[str, float]]:
    """The metrics that the run in the question's folder has written so far, a row for each step."""
    path = asked.folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def reporting(asked: Asked, summary: Callable[[list[dict[str, float]]], dict[str, Any]]) -> Iterator[None]:
    """Print after each step what is known, so that a question that is stopped has an answer."""
    over = threading.Event()

    def report() -> None:
        known = 0
        while not over.wait(1.0):
            rows = rows_of_run(asked)
            if len(rows) > known:
                known = len(rows)
                asked.report(summary(rows))

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def step_times(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians of a step and its parts, the first left out."""
    found = {}
    for name in ("step", "rollout", "train", "publish"):
        taken = [row[f"time/{name}_seconds"] for row in rows if f"time/{name}_seconds" in row]
        if taken:
            found[f"{name} s"] = statistics.median(taken[1:] or taken)
    return found


def equal(asked: Asked) -> dict[str, Any]:
    """Train a deterministic job twice, and compare what its checkpoints hold."""
    from addition import job, rollout, sums

    training, _ = sums()
    digests, found = [], dict[str, Any]()
    for number in range(2):
        config = job(0, 3, asked.model).model_dump(mode="json", exclude_unset=True)
        config |= {"run_dir": str(asked.folder / str(number)), "deterministic": True, "trainer": asked.arithmetic}
        config["engine"] |= asked.arithmetic
        config["rollout"] = {"groups_per_step": 2 if asked.dry else 8, "group_size": 4}
        config["evaluation"] = {"every_steps": 0}
        try:
            result = palestra.train(rollout, training, parse_config(config), quiet=True)
        except palestra.errors.ConfigError as error:
            return {"refused": str(error)}
        found |= step_times(result.metrics)
        assert result.checkpoint is not None
        digests.append({file.name: digest(file) for file in sorted(result.checkpoint.glob("*.safetensors"))})
    return found | {"equal": digests[0] == digests[1]}


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def killed(asked: Asked) -> dict[str, Any]:
    """Kill a job while it plays its second step, resume it, and look whether anything is there twice or missing."""
    steps, run = 4, asked.folder / "run"
    settings = {"model": asked.model, "device": asked.device, "steps": steps, "run_dir": str(run)}
    command = [sys.executable, str(HERE / "gpu_questions.py"), "--job", json.dumps(settings)]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    while child.poll() is None and (not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text()):
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    begin = time.monotonic()
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    loaded = palestra.load_run(run)
    trained = [row["step"] for row in loaded.metrics()]
    episodes = [row["state"] for row in loaded.episodes("train", state=None)]
    return {
        "resumed in s": time.monotonic() - begin,
        "steps": trained,
        "episodes": len(episodes),
        "right": trained == list(range(1, steps + 1)) and set(episodes) <= {"completed", "failed", "abandoned"},
    }


def job_of_addition(settings: Mapping[str, Any], resume: bool) -> None:
    """A job that another process kills."""
    from addition import job, rollout, sums

    config = job(0, settings["steps"], settings["model"]).model_dump(mode="json", exclude_unset=True)
    arithmetic = {"device": settings["device"]}
    config |= {"run_dir": settings["run_dir"], "trainer": arithmetic, "evaluation": {"every_steps": 0}}
    config["engine"] |= arithmetic
    config["rollout"] = {"groups_per_step": 2, "group_size": 4}
    palestra.train(rollout, sums()[0], parse_config(config), resume=resume, quiet=True)


# Training


def train(asked: Asked, size: str, rank: int | None = None, recompute: bool = False) -> dict[str, Any]:
    """Tokens a second and MFU of steps on rows of 8k and 16k tokens, of a shape with random weights."""
    found: dict[str, Any] = {"products TFLOP/s": product_rate(asked.device) / 1e12}
    sizes = (64,) if asked.dry else (8192,) if rank or recompute else (8192, 16384)
    for tokens in sizes:
        found[f"{tokens} tokens"] = train_steps(asked, "tiny" if asked.dry else size, tokens, rank, recompute)
        asked.report(found)
        gc.collect()
        if not asked.dry:
            torch.cuda.empty_cache()
    return found


def train_steps(asked: Asked, size: str, tokens: int, rank: int | None, recompute: bool) -> dict[str, Any]:
    """Four steps on one row each, of which the first is not counted."""
    config = QWEN[size]
    with torch.device(asked.device):
        base = Qwen3ForCausalLM(config).eval()
    if rank:
        base = base.to(precision_of("bfloat16", torch.device(asked.device)))
    model = CausalLM(base)
    if rank:
        model = model.on_same_weights()
        model.add_adapter(AdapterConfig(rank=rank), size).fill(0)
    if recompute:
        model.recompute_blocks()
    settings = {"device": asked.device, "dtype": "bfloat16", "micro_batch_tokens": tokens}
    policy = TorchPolicy(
        PolicyNetworks(model=model, tokenizer=load_tokenizer(TINY)), TrainerConfig.model_validate(settings)
    )
    taken = []
    for step in range(4):
        rows = made_rows(step, prompts=1, samples=1, prompt_tokens=tokens // 8, new_tokens=tokens - tokens // 8)
        wait_for(asked.device)
        begin = time.perf_counter()
        policy.forward_backward(rows, LOSS)
        policy.optimizer.step(OptimParams(learning_rate=1e-6))
        wait_for(asked.device)
        taken.append(time.perf_counter() - begin)
    seconds = statistics.median(taken[1:])
    flop = train_flop(count_weights(base.named_parameters(), config.vocab_size), tokens, tokens - tokens // 8)
    flop *= 2 / 3 if rank else 1.0  # without the gradients of weights
    attended = 6.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens**2
    return {
        "first s": taken[0],
        "s": seconds,
        "tokens/s": tokens / seconds,
        "MFU of nominal": flop / seconds / NOMINAL,
        "with attention": (flop + attended) / seconds / NOMINAL,
        "peak GiB": peak_gib(asked.device),
    }


def profile(asked: Asked) -> dict[str, Any]:
    """The kernels that take most of a training step on 8k tokens, and the seconds in which any runs."""
    tokens = 64 if asked.dry else 8192
    with torch.device(asked.device):
        model = CausalLM(Qwen3ForCausalLM(QWEN["tiny" if asked.dry else "0.6b"]).eval())
    settings = {"device": asked.device, "dtype": "bfloat16", "micro_batch_tokens": tokens}
    policy = TorchPolicy(
        PolicyNetworks(model=model, tokenizer=load_tokenizer(TINY)), TrainerConfig.model_validate(settings)
    )

    def step(number: int) -> None:
        rows = made_rows(number, prompts=1, samples=1, prompt_tokens=tokens // 8, new_tokens=tokens - tokens // 8)
        policy.forward_backward(rows, LOSS)
        policy.optimizer.step(OptimParams(learning_rate=1e-6))
        wait_for(asked.device)

    step(0)
    begin = time.perf_counter()
    with torch.profiler.profile() as seen:
        step(1)
    seconds = time.perf_counter() - begin
    taken = sorted(
        (
            (event.self_device_time_total or event.self_cpu_time_total, event.count, event.key)
            for event in seen.key_averages()
        ),
        reverse=True,
    )
    busy = sum(event.self_device_time_total for event in seen.key_averages()) / 1e6
    kernels = {key[:80]: {"ms": micros / 1e3, "times": count} for micros, count, key in taken[:20]}
    return {"step s": seconds, "card busy s": busy, "kernels": kernels}


def shared(asked: Asked) -> dict[str, Any]:
    """Seconds of a step on groups that share their prompts, and on as many rows of the same lengths that don't."""
    groups, samples, prompt, new = (2, 2, 16, 8) if asked.dry else (16, 8, 1024, 256)
    with torch.device(asked.device):
        model = CausalLM(Qwen3ForCausalLM(QWEN["tiny" if asked.dry else "0.6b"]).eval())
    settings = {"device": asked.device, "dtype": "bfloat16"}
    policy = TorchPolicy(
        PolicyNetworks(model=model, tokenizer=load_tokenizer(TINY)), TrainerConfig.model_validate(settings)
    )
    found = {}
    for name, (prompts, each) in {"shared": (groups, samples), "in full": (groups * samples, 1)}.items():
        taken = []
        for step in range(4):
            rows = made_rows(step, prompts=prompts, samples=each, prompt_tokens=prompt, new_tokens=new)
            wait_for(asked.device)
            begin = time.perf_counter()
            policy.forward_backward(rows, LOSS)
            policy.optimizer.step(OptimParams(learning_rate=1e-6))
            wait_for(asked.device)
            taken.append(time.perf_counter() - begin)
        found[f"{name} s"] = statistics.median(taken[1:])
    return found | {"times": found["in full s"] / found["shared s"]}


def largest(asked: Asked) -> dict[str, Any]:
    """The largest of some random models of which all weights can be trained with the memory of the device."""
    tokenizer, found = load_tokenizer(TINY), dict[str, Any]()
    scale = Scale(asked.dry)
    for hidden, layers in scale.sizes:
        try:
            count = train_once(hidden, layers, tokenizer, asked.device, scale)
        except torch.OutOfMemoryError:
            return found | {"does not fit": f"{weights_of(hidden, layers, len(tokenizer)) / 1e9:.2f} billion weights"}
        found["fits"] = f"{count / 1e9:.2f} billion weights"
        asked.report(found)
        gc.collect()
        if not asked.dry:
            torch.cuda.empty_cache()
    return found


# Sampling


async def decoding(asked: Asked) -> dict[str, Any]:
    """Milliseconds of a pass by how many replies it has, and those in which weights, keys and values are read once."""
    scale, found = Scale(asked.dry), dict[str, Any]()
    folder = write_qwen("tiny" if asked.dry else "0.6b", asked.folder / "model")
    parts = build_parts(job_of(str(folder), asked.device))
    assert isinstance(parts.engine, EmbeddedEngine)
    runner = parts.engine._core.policies[POLICY].runner
    weights = sum(weight.nbytes for _, weight in runner.model.named_parameters())
    rate = copy_rate(asked.device)
    try:
        await parts.engine.resume()
        for rows in scale.rows:
            prompts = prompts_of(1, scale, rows) * rows
            await replies(parts, prompts, 4)
            before, begin = parts.engine.load().passes, time.perf_counter()
            await replies(parts, prompts, scale.new_tokens // 2)
            wait_for(asked.device)
            seconds = (time.perf_counter() - begin) / (parts.engine.load().passes - before)
            tokens = rows * (scale.prompt_tokens + scale.new_tokens // 4)
            found[f"{rows} replies"] = {
                "ms": seconds * 1e3,
                "least ms": (weights + tokens * runner.model.token_bytes) / rate * 1e3,
                "tokens/s": rows / seconds,
            }
            asked.report(found)
    finally:
        await close(parts)
    return found


WORK = (32, 8, 512, 256)  # groups, episodes of each, characters of a prompt, tokens of a reply
DRY_WORK = (2, 2, 64, 8)


def rollouts(asked: Asked, vllm: bool = False) -> dict[str, Any]:
    """Sampled tokens a second while a job plays its steps: claims, calls through the server, everything written."""
    groups, samples, characters, tokens = DRY_WORK if asked.dry else WORK
    folder = write_qwen("tiny" if asked.dry else "0.6b", asked.folder / "model")
    engine: dict[str, Any] = {"max_batch": groups * samples} | (
        {"kind": "vllm", "python": asked.vllm} if vllm else asked.arithmetic
    )
    if vllm and not asked.dry:
        engine["gpu_memory_utilization"] = 0.5
    config = {
        "run_dir": str(asked.folder / "run"),
        "steps": 2 if asked.dry else 4,
        "policies": {POLICY: {"model": str(folder), "max_context": 1024, "optimizer": {"learning_rate": 1e-7}}},
        "rollout": {"groups_per_step": groups, "group_size": samples},
        "evaluation": {"every_steps": 0},
        "engine": engine,
        "trainer": asked.arithmetic,
    }
    client = httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None))

    async def rollout(task: dict[str, Any], endpoint: palestra.ModelEndpoint) -> float:
        reply = await client.post(
            f"{endpoint.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {endpoint.api_key}"},
            json={
                "model": endpoint.model,
                "messages": [{"role": "user", "content": task["text"]}],
                "max_tokens": tokens,
            },
        )
        reply.raise_for_status()
        return float(len(reply.text) % 2)

    draw = random.Random(0)
    tasks = [
        {"id": str(number), "text": "".join(draw.choices("abcdefgh ", k=characters))} for number in range(groups * 8)
    ]
    with reporting(asked, sampled):
        palestra.train(rollout, tasks, parse_config(config), concurrency=groups * samples, quiet=True)
    return sampled(rows_of_run(asked)) | {"peak GiB": peak_gib(asked.device)}


def sampled(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Sampled tokens a second in each step's rollout, and what a step takes."""
    played = [row for row in rows if "rollout/completion_tokens" in row]
    return step_times(rows) | {
        "sampled tokens/s": [row["rollout/completion_tokens"] / row["time/rollout_seconds"] for row in played]
    }


def bare_vllm(asked: Asked) -> dict[str, Any]:
    """The work of `rollouts` with vLLM's own class, in its environment."""
    groups, samples, characters, tokens = DRY_WORK if asked.dry else WORK
    folder = write_qwen("tiny" if asked.dry else "0.6b", asked.folder / "model")
    draw = random.Random(0)
    prompts = [[draw.randrange(97, 105) for _ in range(characters)] for _ in range(groups) for _ in range(samples)]
    (asked.folder / "work.json").write_text(json.dumps({"work": prompts}))
    found: dict[str, Any] = run_json(
        (asked.vllm, HERE / "peers" / "gpu_vllm.py", folder, tokens, asked.folder / "work.json")
    )
    return {"sampled tokens/s": found["tokens a second"]["work"]}


QUESTIONS: dict[str, Callable[[Asked], Any]] = {
    "learns": learns,
    "learns-vllm": lambda asked: learns(asked, vllm=True),
    "train-0.6b": lambda asked: train(asked, "0.6b"),
    "train-1.7b": lambda asked: train(asked, "1.7b"),
    "train-4b": lambda asked: train(asked, "4b", recompute=True),
    "lora-4b": lambda asked: train(asked, "4b", rank=32),
    "lora-8b": lambda asked: train(asked, "8b", rank=32, recompute=True),
    "profile": profile,
    "shared": shared,
    "largest": largest,
    "decoding": decoding,
    "rollouts": rollouts,
    "rollouts-vllm": lambda asked: rollouts(asked, vllm=True),
    "bare-vllm": bare_vllm,
    "equal": equal,
    "killed": killed,
    "served": lambda asked: gpu_checks.served(
        write_shape("64x2x300" if asked.dry else LIKE_SMOLLM2, asked.folder / "model"),
        asked.device,
        Scale(asked.dry),
        asked.vllm,
    ),
    "correctness": lambda asked: gpu_checks.correctness(
        write_shape("64x2x300" if asked.dry else LIKE_SMOLLM2, asked.folder / "model"),
        asked.device,
        Scale(asked.dry, beside_cpu=True),
    ),
    "attention": lambda asked: gpu_checks.attention(asked.device, Scale(asked.dry)),
    "sharded": lambda asked: gpu_checks.sharded(
        write_shape("64x2x300" if asked.dry else SMALL, asked.folder / "model"),
        asked.device,
        Scale(asked.dry, beside_cpu=True),
    ),
}


def main() -> None:
    """Read the command line, answer, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS, nargs="?")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--vllm")
    parser.add_argument("--model")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    tune_malloc()
    if wanted.job:
        job_of_addition(wanted.job, wanted.resume)
        return
    model = wanted.model or (TINY if wanted.dry_run else "SmolLM2-135M-Instruct")
    with tempfile.TemporaryDirectory() as folder:
        asked = Asked(dry=wanted.dry_run, vllm=wanted.vllm, model=model, folder=Path(folder))
        found = QUESTIONS[wanted.question](asked)
        asked.report(asyncio.run(found) if asyncio.iscoroutine(found) else found)


if __name__ == "__main__":
    main()
