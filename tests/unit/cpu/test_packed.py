"""A model whose matrices are packed computes what it computed before, and takes and gives weights as before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palestra.models.causal_lm import CausalLM, load_causal_lm
from palestra_cpu import packed as packing
from palestra_cpu.packed import pack_model
from unit.models.test_causal_lm import SUPPORTED, Causal, rounded_like_the_engine, two_of

packs = pytest.mark.skipif(not packing.multiplies_bfloat16(), reason="oneDNN multiplies no bfloat16 on this processor")
IDS = torch.from_numpy(np.random.default_rng(0).integers(1, 97, 40))


def logits_of(model: CausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model.hidden(IDS, torch.arange(40), Causal()))


def other_weights(model: CausalLM) -> dict[str, torch.Tensor]:
    """Float32 weights of the model's names, as a trainer gives them."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=draw) * 0.1 + (len(shape) == 1) for name, shape in model.own_shapes().items()
    }


@packs
@pytest.mark.parametrize("kind", SUPPORTED)
def test_the_numbers_are_those_of_plain_matrices(kind):
    """The same bits; but where oneDNN multiplies plain matrices by another kernel, the last bit of bfloat16 differs."""
    flat = two_of(kind)[1]
    plain, packed = rounded_like_the_engine(flat), rounded_like_the_engine(flat)
    pack_model(packed)
    assert packed.packed is not None
    assert packed.own_shapes() == {name: p.shape for name, p in plain.named_parameters()}
    for _ in range(2):
        found, wanted = logits_of(packed), logits_of(plain)
        assert float((found - wanted).norm()) <= 2e-3 * float(wanted.norm())
        for name, weight in packed.own_weights():
            assert torch.equal(weight, dict(plain.named_parameters())[name])
        given = other_weights(plain)
        with torch.inference_mode():
            plain.take_weights(given)
            packed.take_weights(given)


@packs
def test_layers_that_read_the_same_input_are_one_matrix_and_plain_ones_are_gone():
    model = rounded_like_the_engine(two_of("qwen2")[1])
    pack_model(model)
    assert [[name.rpartition(".")[2] for name in matrix.names] for matrix in model.packed][:4] == [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]
    left = {name for name, p in model.named_parameters() if p.ndim == 2}
    assert left == {"model.embed_tokens.weight", "lm_head.weight"}, "what stays beside its packed copy"


@packs
def test_a_layer_that_reads_another_input_than_the_one_before_is_not_merged_with_it():
    """A parallel block gives attention and network the same norm's output; a serial one does not."""
    parallel, serial = (rounded_like_the_engine(two_of(kind)[1]) for kind in ("cohere", "llama"))
    pack_model(parallel)
    pack_model(serial)
    assert ["q_proj", "k_proj", "v_proj"] in [[n.rpartition(".")[2] for n in m.names] for m in serial.packed]
    assert all(len({n.rpartition(".")[0] for n in m.names}) == 1 for m in serial.packed)
    found = logits_of(parallel)
    assert torch.isfinite(found).all()


def test_a_copy_has_weights_of_its_own():
    model = rounded_like_the_engine(two_of("qwen2")[1])
    pack_model(model)
    before = logits_of(model)
    other = model.copied()
    with torch.inference_mode():
        model.take_weights(other_weights(model))
    assert torch.equal(logits_of(other), before)
    assert not torch.equal(logits_of(model), before)


def test_a_layer_called_again_with_another_input_computes_it():
    """What is kept for the layers that read the same input is never given for another one."""
    model = rounded_like_the_engine(two_of("llama")[1])
    plain = model.model.get_submodule("model.layers.0.self_attn")
    query, key = plain.q_proj, plain.k_proj
    pack_model(model)
    attention = model.model.get_submodule("model.layers.0.self_attn")
    one, two = torch.randn(2, 3, 32).bfloat16()
    with torch.inference_mode():
        assert torch.allclose(attention.q_proj(one), query(one), atol=1e-2)
        assert torch.allclose(attention.k_proj(two), key(two), atol=1e-2)
        assert torch.allclose(attention.q_proj(two), query(two), atol=1e-2)
        assert torch.allclose(attention.k_proj(one), key(one), atol=1e-2)


def test_models_that_can_not_be_packed_stay_as_they_are(tiny):
    pack_model(tiny)
    assert tiny.packed is None, "float32"
    base = load_causal_lm("tiny-random", torch.bfloat16)
    shared = base.on_same_weights()
    pack_model(shared)
    assert shared.packed is None, "weights of another model"


def test_a_model_that_packing_would_change_stays_as_it_is():
    """A block that changes its input in place between two layers that read it can't have them as one matrix."""

    def change(_module, inputs):
        inputs[0].mul_(3.0)

    model = rounded_like_the_engine(two_of("llama")[1])
    before = logits_of(model)
    attention = model.model.get_submodule("model.layers.0.self_attn")
    attention.k_proj.register_forward_pre_hook(change)
    spoiled = logits_of(model)
    assert not torch.equal(before, spoiled)
    pack_model(model)
    assert model.packed is None
    assert torch.equal(logits_of(model), spoiled)


def test_a_processor_on_which_nothing_is_packed_samples_from_plain_matrices(monkeypatch):
    model = rounded_like_the_engine(two_of("llama")[1])
    wanted = logits_of(model)
    monkeypatch.setattr(packing, "multiplies_bfloat16", lambda: False)
    pack_model(model)
    assert model.packed is None
    assert torch.equal(logits_of(model), wanted)
