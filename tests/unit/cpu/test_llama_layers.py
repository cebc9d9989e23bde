"""Layers in fewer steps: the same bits where matrices are small, and gradients as good as those of autograd."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from palestra.models.attention_backend import TrialAttention
from palestra.models.causal_lm import CausalLM
from palestra_cpu import llama_layers
from palestra_cpu.packed import pack_model
from unit.models.test_causal_lm import rounded_like_the_engine, two_of

pytestmark = pytest.mark.ci

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


def errors_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def gradients(model: CausalLM) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states, and the gradients of a sum of them."""
    hidden = model.hidden(IDS, torch.arange(40), TrialAttention())
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    model.model.zero_grad()
    (hidden * weights).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(llama_layers, "cpu_kernels", lambda: None)


@pytest.mark.parametrize(("kind", "changes"), KINDS)
@pytest.mark.usefixtures("without_kernels")
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
        errors = [errors_of(made[1][name], gradient) for made in (found, wanted)]
        assert errors[0] < 1.5 * errors[1] + 1e-3, name
        assert errors[0] < 0.05, name


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_with_compiled_kernels_a_trainer_is_as_exact(kind, changes):
    """Sums are in another order, so that a few numbers may be rounded to a neighbour."""
    assert llama_layers.cpu_kernels() is not None
    short = drawn(kind, changes)
    exact = gradients(short)
    short.compute_in(torch.bfloat16)
    found, wanted = gradients(short), gradients(with_own_layers(short))
    assert float((found[0] - wanted[0]).norm()) <= 2e-3 * float(wanted[0].norm())
    assert errors_of(found[0], exact[0]) < 1.2 * errors_of(wanted[0], exact[0])
    for name, gradient in exact[1].items():
        assert errors_of(found[1][name], gradient) < 1.5 * errors_of(wanted[1][name], gradient) + 1e-3, name


@pytest.mark.parametrize("rounded", [False, True], ids=["float32 weights", "bfloat16 weights"])
def test_a_pass_without_gradients_has_the_bits_of_one_with_them(rounded):
    model = drawn("qwen2", {})
    model.compute_in(torch.bfloat16)
    wanted = gradients(model)[0]
    if rounded:  # as those of a reference are kept
        model.round_to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model.hidden(IDS, torch.arange(40), TrialAttention()), wanted)


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_an_engine_with_packed_matrices_gets_the_same_bits(kind, changes, monkeypatch):
    """But for sums that compiled kernels add in another order: few numbers are rounded to a neighbour then."""
    packed = rounded_like_the_engine(drawn(kind, changes).model)
    pack_model(packed)
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


def test_nothing_of_a_recomputed_pass_is_kept():
    model = drawn("llama", {})
    model.compute_in(torch.bfloat16)
    model.recompute_blocks()
    gradients(model)
    assert model.blocks[0].self_attn.palestra_slot.rotation is None


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def double_forward(module: torch.nn.Module) -> None:
    own = module.forward
    module.forward = lambda x: 2 * own(x)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj", "mlp", "input_layernorm", "mlp.act_fn"])
@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.register_forward_hook(lambda _module, _given, out: 2 * out),
        lambda one: one.register_forward_pre_hook(lambda _module, given: (2 * given[0],)),
        double_forward,
    ],
    ids=["hook", "hook before", "forward"],
)
def test_what_was_hung_on_a_part_of_a_layer_takes_part(name, change):
    model = drawn("llama", {})
    model.compute_in(torch.bfloat16)
    for layer in model.blocks:
        change(layer.get_submodule(name))
    found, wanted = gradients(model)[0], gradients(with_own_layers(model))[0]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["mlp.act_fn", "input_layernorm"])
def test_another_module_in_the_place_of_a_part_takes_part(name):
    model = drawn("llama", {})
    model.compute_in(torch.bfloat16)
    for layer in model.blocks:
        other = Doubled()
        other.weight = layer.input_layernorm.weight
        layer.set_submodule(name, other)
    assert torch.equal(gradients(model)[0], gradients(with_own_layers(model))[0])


def test_a_gradient_of_the_gradient_is_refused():
    model = drawn("llama", {})
    model.compute_in(torch.bfloat16)
    norm = model.blocks[0].input_layernorm.weight
    hidden = model.hidden(IDS, torch.arange(40), TrialAttention())
    (gradient,) = torch.autograd.grad(hidden.square().sum(), norm, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_gradients_do_not_depend_on_autocast_around_the_backward_pass():
    model = drawn("llama", {})
    model.compute_in(torch.bfloat16)
    wanted = gradients(model)[1]
    hidden = model.hidden(IDS, torch.arange(40), TrialAttention())
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    model.model.zero_grad()
    loss = (hidden * weights).sum()
    with torch.autocast("cpu", torch.float16):
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


def test_a_copy_computes_with_its_own_weights():
    model = drawn("llama", {})
    model.compute_in(torch.bfloat16)
    before = gradients(model)[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.zero_()
    assert torch.equal(gradients(other)[0], before)
