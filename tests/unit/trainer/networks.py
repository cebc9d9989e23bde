"""Trainers with a reference policy or a critic, and what transformers' own models say of the same rows."""

from __future__ import annotations

from contextlib import asynccontextmanager

import torch

from palestra.config import TrainerConfig
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.models.loading import LoadedModels
from palestra.trainer.base import PolicySpec
from palestra.trainer.torch_trainer import TorchTrainer


def sharpen(model) -> None:
    """Random weights attend to everything alike; so that it matters who sees whom, queries and keys are made larger."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10.0 if "q_proj" in name or "k_proj" in name else 2.0)


def load(name: str, dtype: torch.dtype, device: torch.device):
    """`sharp` is `tiny-random` with larger weights."""
    model = load_causal_lm("tiny-random", torch.float32, device)
    if name == "sharp":
        sharpen(model.model)
    return model, load_tokenizer("tiny-random")


def transformers_model(name: str):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_folder("tiny-random"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if name == "sharp":
        sharpen(model)
    return model


@asynccontextmanager
async def networks(
    model: str = "sharp", reference: str | None = None, critic: str | None = None, teacher: str | None = None, **config
):
    settings = TrainerConfig.model_validate({"threads": 1, "dtype": "float32"} | config)
    trainer = TorchTrainer(settings, 2, LoadedModels(load))
    try:
        await trainer.create("policy", PolicySpec(model=model, reference=reference, critic=critic, teacher=teacher))
        yield trainer
    finally:
        await trainer.close()
