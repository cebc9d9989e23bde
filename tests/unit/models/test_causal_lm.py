from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from palestra.errors import ModelError
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import CausalLM, load_causal_lm, load_tokenizer


class Causal:
    """Plain causal attention of one sequence."""

    def __call__(self, layer, query, key, value, scale):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


def test_a_flat_forward_pass_is_that_of_transformers(tiny, reference):
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 259, 50))
    with torch.inference_mode():
        logits = tiny.logits(tiny.hidden(ids, torch.arange(50), Causal()))
        wanted = reference(ids[None]).logits[0]
    assert logits.shape == (50, tiny.vocab_size) == (50, 259)
    assert torch.allclose(logits, wanted, atol=1e-5)


def test_the_model_can_not_be_called_without_an_attend(tiny):
    with pytest.raises(AssertionError, match="Attend"):
        tiny.model(torch.tensor([[1, 2]]))
    with pytest.raises(RuntimeError, match="mine"):
        tiny.hidden(torch.tensor([1]), torch.tensor([0]), lambda *_: (_ for _ in ()).throw(RuntimeError("mine")))
    with pytest.raises(AssertionError):  # an error leaves no Attend behind
        tiny.model(torch.tensor([[1, 2]]))


def test_each_weight_stands_once_in_the_same_order(tiny):
    names = [name for name, _ in tiny.named_parameters()]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names  # tied to the embedding
    assert names == [name for name, _ in load_causal_lm("tiny-random", torch.float32).named_parameters()]


def test_two_models_do_not_share_where_their_attention_is_found(tiny):
    other = load_causal_lm("tiny-random", torch.float32)
    seen = []

    class Watching(Causal):
        def __call__(self, layer, *arguments):
            with torch.inference_mode():
                seen.append((layer, other.hidden(torch.arange(3), torch.arange(3), Causal()).shape[0]))
            return super().__call__(layer, *arguments)

    with torch.inference_mode():
        assert tiny.hidden(torch.arange(5), torch.arange(5), Watching()).shape[0] == 5
    assert seen == [(0, 3), (1, 3)]


def test_saving_writes_what_transformers_loads_and_leaves_the_model_usable(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny.save(tmp_path, load_tokenizer("tiny-random"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert "palestra" not in (tmp_path / "config.json").read_text()
    assert loaded(torch.tensor([[1, 2]])).logits.shape == (1, 2, 259)
    with torch.inference_mode():
        assert tiny.hidden(torch.arange(3), torch.arange(3), Causal()).shape == (3, 64)


@pytest.mark.parametrize(
    "change",
    [{"attn_logit_softcapping": 30.0}, {"logit_scale": 0.5}, {"attention_chunk_size": 64}],
)
def test_an_architecture_whose_arithmetic_would_be_lost_is_refused(change):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder("tiny-random"))
    model = AutoModelForCausalLM.from_config(config)
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelError, match=next(iter(change))):
        CausalLM(model)


def test_sliding_windows_are_refused():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    with pytest.raises(ModelError, match="full attention"):
        CausalLM(MistralForCausalLM(config))


def test_a_folder_without_a_model_is_one_line(tmp_path):
    for load in (lambda: load_causal_lm(str(tmp_path), torch.float32), lambda: load_tokenizer(str(tmp_path))):
        with pytest.raises(ModelError) as caught:
            load()
        assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="chat template"):
        load_tokenizer(str(tmp_path))


@pytest.mark.model
def test_smollm2_gives_the_logits_of_transformers_and_knows_english():
    """The converted weights are really those of the model: English is likely to it, shuffled English is not."""
    from transformers import AutoModelForCausalLM

    name = "SmolLM2-135M-Instruct"
    text = "The sun rises in the east and sets in the west. Water boils at one hundred degrees."
    ids = load_tokenizer(name).encode(text)
    reference = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32).eval()
    model = load_causal_lm(name, torch.float32)

    def surprise(tokens: list[int]) -> float:
        flat = torch.tensor(tokens)
        with torch.inference_mode():
            wanted = reference(flat[None]).logits[0]
            found = model.logits(model.hidden(flat, torch.arange(len(tokens)), Causal()))
        assert torch.allclose(found, wanted, atol=2e-3)
        scores = found.log_softmax(-1)[:-1]
        return -float(scores[range(len(tokens) - 1), tokens[1:]].mean())

    assert surprise(ids) < 4.0
    assert surprise(sorted(ids)) > 6.0
