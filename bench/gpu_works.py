"""What the parts of `gpu` have in common: how much is done, rows, prompts, replies, and models by their shapes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_rows import LEAST_ID, MOST_ID, POLICY, made_rows
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import TINY, JobConfig, TrainerConfig, parse_config
from palestra.engine.base import EngineRequest
from palestra.models.byte_model import write_random
from palestra.models.causal_lm import FLAT_ATTENTION, CausalLM, load_tokenizer
from palestra.runtime.parts import Parts
from palestra.trainer.base import OptimParams
from palestra.trainer.torch_policy import PolicyNetworks, TorchPolicy
from palestra.types.calls import Ids, SamplingParams, TokenSequence
from palestra.types.records import TrainSample

LOSS = LossSpec.of(PPOClipLoss())
LIKE_SMOLLM2 = "576x30x49152"
SMALL = "512x6x8192"  # for checkpoints: six of them are written
GIB = 2**30
# Hidden size and layers of the models for the largest that fits, about 0.1, 0.5, 1, 2, 3, 5, 7 and 9 billion weights.
SIZES = ((768, 12), (1536, 18), (2048, 20), (2560, 26), (3072, 30), (3584, 32), (4096, 34), (4608, 36))
REHEARSED = ((64, 2), (128, 2))


class Scale:
    """How much is measured: enough for a card, or as little as shows that the code runs."""

    def __init__(self, rehearsal: bool, beside_cpu: bool = False) -> None:
        """Choose sizes.

        Args:
            rehearsal: as little as shows that the code runs.
            beside_cpu: a CPU computes the same with the model, and is to be done within seconds.
        """
        self.prompts, self.samples = (2, 2) if rehearsal else (16, 4 if beside_cpu else 8)
        self.prompt_tokens, self.new_tokens = (12, 6) if rehearsal else (192, 64) if beside_cpu else (512, 256)
        self.rows = (1, 4) if rehearsal else (1, 8, 64, 128)  # replies that are decoded at the same time
        self.steps = 2 if rehearsal else 6  # the first is not counted
        self.window = 8 if rehearsal else 300  # of attention: less than a prompt, more than a block of the kernel
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


def job_of(model: str | Path, device: str, dtype: str = "bfloat16") -> JobConfig:
    """A job whose engine and trainer are on a device."""
    arithmetic = {"device": device, "dtype": dtype}
    policy, engine = {"model": str(model), "max_context": 1024}, {"max_batch": 128}
    return parse_config({"policies": {POLICY: policy}, "engine": arithmetic | engine, "trainer": arithmetic})


def wait_for(device: str) -> None:
    """Let the device finish, so that a clock tells what it took."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: str) -> float | None:
    """The most memory of the device that tensors have had; None on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None


def prompts_of(count: int, scale: Scale, seed: int) -> list[Ids]:
    """Different prompts of made-up ids."""
    draw = np.random.default_rng(seed)
    return [draw.integers(LEAST_ID, MOST_ID, scale.prompt_tokens, dtype=np.int32) for _ in range(count)]


async def replies(parts: Parts, prompts: Sequence[Ids], tokens: int, temperature: float = 1.0) -> list[list[int]]:
    """The ids of a reply of so many tokens to each prompt, all at the same time."""
    return [[token for token, _ in reply] for reply in await sampled(parts, prompts, tokens, temperature)]


async def sampled(
    parts: Parts, prompts: Sequence[Ids], tokens: int, temperature: float = 1.0
) -> list[list[tuple[int, float]]]:
    """A reply of so many tokens to each prompt, all at the same time: ids, each with its log-probability."""

    async def one(number: int, prompt: Ids) -> list[tuple[int, float]]:
        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, min_tokens=tokens, seed=number)
        request = EngineRequest(policy=POLICY, prompt=TokenSequence(prompt), sampling=sampling)
        return [
            pair
            async for piece in parts.engine.generate(request)
            for pair in zip(piece.ids, piece.logprobs, strict=True)
        ]

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


async def close(parts: Parts) -> None:
    """End engine and trainer."""
    await parts.engine.close()
    if parts.trainer is not None:
        await parts.trainer.close()


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
    policy = TorchPolicy(
        PolicyNetworks(model=model, tokenizer=tokenizer), TrainerConfig.model_validate({"device": device})
    )
    rows = rows_of(scale, 2, 0)
    policy.forward_backward(rows, LOSS)
    policy.optimizer.step(OptimParams(learning_rate=1e-6))
    wait_for(device)
    return sum(p.numel() for p in model.model.parameters())


# Models

_SHAPE = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")


def shape_of(hidden: int, layers: int, vocabulary: int) -> LlamaConfig:
    """A model in the proportions of Llama's, with heads of 128 numbers, or of 64 where these don't divide it."""
    width = 64 if hidden % 128 or hidden < 256 else 128
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // width, 2),
        num_key_value_heads=max(hidden // 512, 1),
        max_position_embeddings=4096,
        attn_implementation=FLAT_ATTENTION,
    )


def qwen(hidden: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int = 151_936) -> Qwen3Config:
    """The shape of one of Qwen3's dense models; heads of 128 numbers."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=128 if hidden > 64 else 16,
        intermediate_size=inner,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        attn_implementation=FLAT_ATTENTION,
    )


QWEN = {
    "tiny": qwen(64, 2, 4, 2, 128, 512),
    "0.6b": qwen(1024, 28, 16, 8, 3072),
    "1.7b": qwen(2048, 28, 16, 8, 6144),
    "4b": qwen(2560, 36, 32, 8, 9728),
    "8b": qwen(4096, 36, 32, 8, 12_288),
}


def write_qwen(size: str, folder: Path) -> Path:
    """Write such a model with random weights in bfloat16; its tokenizer has one token a byte."""
    config = QWEN[size]
    config.eos_token_id = load_tokenizer(TINY).eos_token_id
    write_random(folder, lambda: Qwen3ForCausalLM(config).to(torch.bfloat16), load_tokenizer(TINY))
    return folder


def is_shape(model: str) -> bool:
    """Whether a model is given by its shape, and not by its name."""
    return _SHAPE.fullmatch(model) is not None


def write_shape(shape: str, folder: Path) -> Path:
    """Write a model with random weights in the shape `HIDDENxLAYERS[xVOCABULARY]`, for machines without any model.

    Its tokenizer has one token a byte. Ids above those are never in a prompt, but are sampled and scored like others.
    """
    found = _SHAPE.fullmatch(shape)
    assert found is not None
    tokenizer = load_tokenizer(TINY)
    vocabulary = max(int(found[3] or 0), len(tokenizer))
    config = shape_of(int(found[1]), int(found[2]), vocabulary)
    config.tie_word_embeddings, config.eos_token_id = True, tokenizer.eos_token_id
    write_random(folder, lambda: LlamaForCausalLM(config), tokenizer)
    return folder
