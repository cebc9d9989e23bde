"""The tiny model, loaded as the engine and the trainer load it, and as transformers does."""

from __future__ import annotations

import pytest
import torch

from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_causal_lm


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference():
    """transformers' own model: its attention, its forward pass, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model_folder("tiny-random"), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.fixture
def tiny():
    return load_causal_lm("tiny-random", torch.float32)
