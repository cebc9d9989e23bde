"""Layers in fewer steps: the same bits where matrices are small, and gradients as good as those of autograd."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from palestra.models import llama_layers
from palestra.models.attention_backend import TrialAttention
from palestra.models.causal_lm import CausalLM
from palestra.models.packed import pack
from unit.models.test_causal_lm import rounded_like_the_engine, two_of

IDS = torch.from_numpy(np.random.default_rng(0).integers(1, 97, 40))
KINDS = [("llama", {}), ("qwen2", {}), ("mistral", {"sliding_window": 7}), ("llama", {"num_key_value_heads": 4})]


def with_own_layers(model: CausalLM) -> CausalLM:
    """The same model, whose layers compute as transformers has written them."""
    other = copy.deepcopy(model)
    shortened = [layer for layer in other.blocks if "forward" in vars(layer)]
    assert len(shortened) == other.layers
    for layer in shortened:
        del layer.forward
    return other


def drawn(kind: str, changes: dict) -> CausalLM:
    """A small model with weights, also of norms and biases, that are neither zero nor one."""
    model = CausalLM(two_of(kind, **changes)[1])
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model


def gradients(model: CausalLM) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states, and the gradients of a sum of them."""
    hidden = model.hidden(IDS, torch.arange(40), TrialAttention())
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    model.model.zero_grad()
    (hidden * weights).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_a_trainer_gets_the_same_bits_and_gradients_no_worse_than_those_of_autograd(kind, changes):
    short = drawn(kind, changes)
    exact = gradients(short)[1]  # float32 computes as before
    own = with_own_layers(short)
    assert torch.equal(gradients(own)[0], gradients(short)[0])
    for model in (short, own):
        model.compute_in(torch.bfloat16)
    found, wanted = gradients(short), gradients(own)
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys() == exact.keys()
    for name, gradient in exact.items():
        errors = [float((made[1][name] - gradient).norm() / gradient.norm()) for made in (found, wanted)]
        assert errors[0] < 1.5 * errors[1] + 1e-3, name
        assert errors[0] < 0.05, name


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_an_engine_with_packed_matrices_gets_the_same_bits(kind, changes, monkeypatch):
    """But for sums that compiled kernels add in another order: few numbers are rounded to a neighbour then."""
    packed = rounded_like_the_engine(drawn(kind, changes).model)
    pack(packed)
    with torch.inference_mode():
        compiled = packed.hidden(IDS, torch.arange(40), TrialAttention())
        monkeypatch.setattr(llama_layers, "cpu_kernels", lambda: None)
        found = packed.hidden(IDS, torch.arange(40), TrialAttention())
        kept = [vars(layer).pop("forward") for layer in packed.blocks]
        assert torch.equal(found, packed.hidden(IDS, torch.arange(40), TrialAttention()))
    assert len(kept) == packed.layers
    assert float((compiled - found).norm()) <= 2e-3 * float(found.norm())


def test_layers_are_recomputed_with_the_same_gradients():
    model = drawn("llama", {})
    model.compute_in(torch.bfloat16)
    wanted = gradients(model)
    model.recompute_blocks()
    found = gradients(model)
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())


def test_a_copy_computes_with_its_own_weights():
    model = drawn("llama", {})
    model.compute_in(torch.bfloat16)
    before = gradients(model)[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.zero_()
    assert torch.equal(gradients(other)[0], before)
