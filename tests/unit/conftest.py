"""The tiny model, loaded as the engine and the trainer load it, and as transformers does.

What they import is imported where they are used, so that tests of light rooms load no torch.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def reference():
    """transformers' own model: its attention, its forward pass, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from palestra.models.catalog import model_folder

    return AutoModelForCausalLM.from_pretrained(
        model_folder("tiny-random"), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.fixture
def tiny():
    import torch

    from palestra.models.causal_lm import load_causal_lm

    return load_causal_lm("tiny-random", torch.float32)
