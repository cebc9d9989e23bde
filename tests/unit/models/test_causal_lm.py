from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from palestra.errors import ModelError
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import CausalLM, load_causal_lm, load_tokenizer
from palestra.models.output_head import EXACT_LOGITS


class Causal:
    """Plain causal attention of one sequence."""

    def __call__(self, layer, query, key, value, scale, window):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


def test_a_flat_forward_pass_is_that_of_transformers(tiny, reference):
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 259, 50))
    with torch.inference_mode():
        logits = tiny.logits(tiny.hidden(ids, torch.arange(50), Causal()))
        wanted = reference(ids[None]).logits[0]
    assert logits.shape == (50, tiny.vocab_size) == (50, 259)
    assert torch.allclose(logits, wanted, atol=1e-5)


def test_the_model_can_not_be_called_without_an_attention_backend(tiny):
    with pytest.raises(AssertionError, match="AttentionBackend"):
        tiny.model(torch.tensor([[1, 2]]))
    with pytest.raises(RuntimeError, match="mine"):
        tiny.hidden(torch.tensor([1]), torch.tensor([0]), lambda *_: (_ for _ in ()).throw(RuntimeError("mine")))
    with pytest.raises(AssertionError):  # an error leaves no attention behind
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


SIZE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "pad_token_id": 0,
}
OLD_SIZE = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
ARCHITECTURES = [
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
]
# One of each kind of layer, for both tiers.
QUICK = {"gemma3_text", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"}
SUPPORTED = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in ARCHITECTURES]


def two_of(kind: str, **changes):
    """A small random model with transformers' own attention, and the same with ours."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def config():
        found = CONFIG_MAPPING[kind](**((OLD_SIZE if kind == "gpt2" else SIZE) | changes))
        found.pad_token_id = 0
        return found

    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(config(), attn_implementation="eager").eval()
    flat = AutoModelForCausalLM.from_config(config(), attn_implementation="palestra_flat").eval()
    flat.load_state_dict(own.state_dict())
    return own, flat


@pytest.mark.parametrize("kind", SUPPORTED)
def test_decoder_only_architectures_give_what_transformers_gives(kind):
    own, flat = two_of(kind)
    model = CausalLM(flat)
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 97, 40))
    with torch.inference_mode():
        found = model.logits(model.hidden(ids, torch.arange(40), Causal()))
        wanted = own(ids[None]).logits[0]
    assert torch.allclose(found, wanted, atol=1e-4)


def rounded_like_the_engine(flat) -> CausalLM:
    """The same weights with matrices in bfloat16, as `load_causal_lm` gives them."""
    other = copy.deepcopy(flat)
    for parameter in other.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.bfloat16()
    return CausalLM(other)


# Embeddings that are multiplied, and experts whose products autocast does not know, are rounded elsewhere.
NEARLY_ALIKE = {"gemma", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe"}


@pytest.mark.parametrize("kind", SUPPORTED)
def test_engine_and_trainer_round_alike(kind):
    """bfloat16 matrices, and float32 matrices that are rounded for each product, give the same bits."""
    flat = two_of(kind)[1]
    with torch.no_grad():
        for parameter in flat.parameters():
            parameter.mul_(3.0)
    engine, trainer = rounded_like_the_engine(flat), CausalLM(flat)
    trainer.compute_in(torch.bfloat16)
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 97, 40))
    with torch.inference_mode():
        hidden, wanted = (model.hidden(ids, torch.arange(40), Causal()) for model in (engine, trainer))
        assert hidden.dtype == torch.float32
        if kind in NEARLY_ALIKE:
            assert float((hidden - wanted).norm() / wanted.norm()) < 0.1
        else:
            assert torch.equal(hidden, wanted)
        assert torch.equal(engine.logits(hidden), trainer.logits(hidden))


def test_the_largest_logits_are_not_rounded():
    flat = two_of("llama")[1]
    model = rounded_like_the_engine(flat)
    head = model.model.get_output_embeddings().weight.double()
    hidden = 100 * torch.randn((70, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = model.logits(hidden)
    wanted = (hidden.double() @ head.T).float()
    places = found.topk(EXACT_LOGITS // 2, dim=-1).indices
    assert torch.allclose(found.gather(1, places), wanted.gather(1, places), rtol=1e-5, atol=1e-4)
    assert torch.allclose(found, wanted, rtol=0.02, atol=0.3)
    assert not torch.allclose(found, wanted, rtol=1e-4, atol=1e-3)  # the others are


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "deepseek_v3", "bloom", "mpt"])
def test_an_architecture_whose_arithmetic_would_be_lost_is_refused(kind):
    """Capped scores, attention sinks, values of another size than keys, distances as biases."""
    changes = {"mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4}, "bloom": {"n_layer": 2, "n_head": 4}}
    with pytest.raises(ModelError, match=f"{kind} models|attention sinks"):
        CausalLM(two_of(kind, **changes.get(kind, {}))[1])


def test_a_folder_without_a_model_is_one_line(tmp_path):
    for load in (lambda: load_causal_lm(str(tmp_path), torch.float32), lambda: load_tokenizer(str(tmp_path))):
        with pytest.raises(ModelError) as caught:
            load()
        assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
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
