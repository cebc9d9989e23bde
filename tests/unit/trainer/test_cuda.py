"""The trainer on a GPU goes on from a checkpoint that was written on a CPU, with the moments beside their weights."""

from __future__ import annotations

import pytest
import torch

from palestra.models.causal_lm import load_causal_lm
from unit.trainer.test_torch_trainer import everything, sharpen, step, training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def on_the_gpu():
    model = load_causal_lm("tiny-random", torch.float32, torch.device("cuda"))
    sharpen(model.model)
    return model


async def test_a_checkpoint_of_the_cpu_is_continued(tmp_path):
    async with training() as trainer:
        await step(trainer, 0)
        await trainer.save("policy", tmp_path, {"step": 1}, "save")
        await step(trainer, 1)
        wanted = everything(trainer)
    async with training(on_the_gpu()) as trainer:
        await trainer.load("policy", tmp_path)
        await step(trainer, 1)
        found = everything(trainer)
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    for name, tensor in wanted.items():
        assert torch.allclose(found[name].cpu(), tensor, rtol=1e-3, atol=1e-5), name
