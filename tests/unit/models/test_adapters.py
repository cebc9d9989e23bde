"""Adapters: against PEFT, against merged weights, in memory once, and what is refused."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from palestra.config import AdapterConfig
from palestra.engine.embedded.model_runner import check_determinism
from palestra.errors import ConfigError, ModelError
from palestra.models.adapter_files import CONFIG, WEIGHTS, read_adapter
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.models.loading import LoadedModels

# PEFT reads an attribute that this version of transformers warns of.
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")]
CPU = torch.device("cpu")
TINY = "tiny-random"
LORA = AdapterConfig(rank=4, alpha=8.0)
SOME = AdapterConfig(rank=3, alpha=5.0, targets=["q_proj", "mlp.down_proj"])


class Causal:
    """Plain causal attention of one sequence."""

    def __call__(self, layer, query, key, value, scale, window):
        seen = torch.ones((key.shape[2], key.shape[2]), dtype=torch.bool).tril()
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model.hidden(ids, torch.arange(len(ids)), Causal()))


def adapted(config: AdapterConfig = LORA, dtype=torch.float32, models: LoadedModels | None = None):
    """A model whose adapter changes something: B is random, too."""
    model, _ = (models or LoadedModels()).adapted(TINY, config, 7, dtype, CPU)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.own_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 250, (23,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("config", [LORA, SOME], ids=["all", "some"])
def test_logits_and_gradients_are_those_of_peft_on_transformers_own_model(tmp_path, ids, config):
    model = adapted(config)
    model.save(tmp_path, load_tokenizer(TINY))
    base = AutoModelForCausalLM.from_pretrained(model_folder(TINY), dtype=torch.float32, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base.eval(), tmp_path, is_trainable=True)
    ours = logits(model, ids)
    wanted = theirs(ids[None]).logits[0]
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    of = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    (ours * of).sum().backward()
    (wanted * of).sum().backward()
    grads = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    own = dict(model.own_parameters())
    assert own.keys() == grads.keys()
    for name, wanted_gradient in grads.items():
        found = own[name].grad
        assert float((found - wanted_gradient).norm() / wanted_gradient.norm()) < 1e-5, name
    assert all(p.grad is None and not p.requires_grad for name, p in model.named_parameters() if name not in own)


@pytest.mark.parametrize("config", [LORA, SOME], ids=["all", "some"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_the_model_with_its_adapter_is_the_merged_model(tmp_path, ids, config, dtype, tolerance):
    """In bfloat16 the merged weights are rounded, and so are products; in float32 only the order of sums differs."""
    adapted(config).save(tmp_path, load_tokenizer(TINY))
    models = LoadedModels()
    with torch.inference_mode():
        beside = logits(models.frozen(str(tmp_path), dtype, CPU)[0], ids)
        merged = logits(models.own(str(tmp_path), dtype, CPU)[0], ids)
        base = logits(models.frozen(TINY, dtype, CPU)[0], ids)
    assert float((beside - merged).norm() / merged.norm()) < tolerance
    assert float((beside - base).norm() / base.norm()) > 5 * tolerance


@pytest.mark.parametrize("stabilised", [False, True])
def test_an_adapter_of_peft_can_be_used(tmp_path, ids, stabilised):
    base = AutoModelForCausalLM.from_pretrained(model_folder(TINY), dtype=torch.float32, attn_implementation="eager")
    theirs = get_peft_model(
        base.eval(),
        LoraConfig(r=5, lora_alpha=7, target_modules="all-linear", init_lora_weights=False, use_rslora=stabilised),
    ).eval()
    theirs.save_pretrained(tmp_path)
    found, _ = LoadedModels().frozen(str(tmp_path), torch.float32, CPU)
    assert found.adapter.config.rank == 5
    assert len(found.adapter.layers) == 14
    with torch.inference_mode():
        torch.testing.assert_close(logits(found, ids), theirs(ids[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_a_new_adapter_changes_nothing_and_its_first_matrix_is_drawn_as_peft_draws_it(ids):
    models = LoadedModels()
    model, _ = models.adapted(TINY, LORA, 5, torch.float32, CPU)
    with torch.inference_mode():
        assert torch.equal(logits(model, ids), logits(models.frozen(TINY, torch.float32, CPU)[0], ids))
    for name, parameter in model.own_parameters():
        if "lora_B" in name:
            assert not parameter.any()
        else:  # uniform below 1 / sqrt(in)
            bound = parameter.shape[1] ** -0.5
            assert bound * 0.9 < float(parameter.detach().abs().max()) <= bound
    same, _ = models.adapted(TINY, LORA, 5, torch.float32, CPU)
    other, _ = models.adapted(TINY, LORA, 6, torch.float32, CPU)
    pairs = zip(model.own_parameters(), same.own_parameters(), other.own_parameters(), strict=True)
    for (name, one), (_, two), (_, three) in pairs:
        assert torch.equal(one, two)
        assert torch.equal(one, three) == ("lora_B" in name)


def storages(model) -> dict[str, int]:
    """Where each weight lies; those with an adapter beside them keep their names."""
    return {name: p.data_ptr() for name, p in model.named_parameters() if ".lora_" not in name}


@pytest.mark.slow
def test_the_base_is_in_memory_once_and_freed_with_its_last_user(ids):
    models = LoadedModels()
    users = [adapted(models=models), adapted(SOME, models=models), models.frozen(TINY, torch.float32, CPU)[0]]
    users.append(models.frozen(str(model_folder(TINY)), torch.float32, CPU)[0])
    assert all(storages(user) == storages(users[0]) for user in users)
    assert not users[-1].own_parameters()
    owner = models.own(TINY, torch.float32, CPU)[0]
    assert not set(storages(owner).values()) & set(storages(users[0]).values())
    rounded = models.frozen(TINY, torch.bfloat16, CPU)[0]
    assert not set(storages(rounded).values()) & set(storages(users[0]).values())
    assert len(models._bases) == 2
    del users, rounded
    gc.collect()
    assert len(models._bases) == 0


def test_models_on_one_base_compute_at_the_same_time(ids):
    """Each has layers of its own: a pass inside of a pass would find the other's attention."""
    models = LoadedModels()
    model, bare = adapted(models=models), models.frozen(TINY, torch.float32, CPU)[0]

    class Nested(Causal):
        def __call__(self, *arguments):
            logits(bare, ids[:5])
            return super().__call__(*arguments)

    with torch.inference_mode():
        wanted = logits(model, ids)
        found = model.logits(model.hidden(ids, torch.arange(len(ids)), Nested()))
    assert torch.equal(found, wanted)


def test_training_goes_on_from_an_adapter_of_the_same_kind_only(tmp_path):
    model, models = adapted(), LoadedModels()
    model.save(tmp_path, load_tokenizer(TINY))
    again, _ = models.adapted(str(tmp_path), LORA, 9, torch.float32, CPU)
    pairs = zip(model.own_parameters(), again.own_parameters(), strict=True)
    assert all(torch.equal(one, two) for (_, one), (_, two) in pairs)
    assert again.adapter.base == TINY
    for changed, match in (
        ({"rank": 5}, r"adapter.rank.*5.*4.*take"),
        ({"alpha": 4.5}, r"adapter.alpha.*4.5"),
        ({"targets": ["q_proj"]}, r"model\.layers\.0\.mlp\.down_proj"),
    ):
        with pytest.raises(ConfigError, match=match):
            models.adapted(str(tmp_path), LORA.model_copy(update=changed), 9, torch.float32, CPU)


def test_what_does_not_fit_is_refused_in_a_sentence():
    for config, match in (
        (AdapterConfig(rank=33), r"adapter\.rank.*33.*model\.layers\.0\.self_attn\.k_proj.*64"),
        (AdapterConfig(targets=["qproj"]), r"'qproj'.*down_proj.*embed_tokens"),
    ):
        with pytest.raises(ConfigError, match=match):
            LoadedModels().adapted(TINY, config, 0, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "PREFIX_TUNING"}, r"peft_type.*'PREFIX_TUNING'"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"r": 9}, r"rank.*9"),
        ({"base_model_name_or_path": ""}, r"model.*''.*model"),
    ],
)
def test_other_kinds_of_adapters_are_refused(tmp_path, changes, match):
    adapted().save(tmp_path, load_tokenizer(TINY))
    data = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(data | changes))
    with pytest.raises(ModelError, match=match):
        read_adapter(tmp_path)


def test_a_damaged_adapter_is_refused(tmp_path):
    adapted().save(tmp_path, load_tokenizer(TINY))
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ModelError, match="be read"):
        load_causal_lm(str(tmp_path), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_of_determinism_looks_at_the_products_of_an_adapter(dtype, monkeypatch):
    model, _ = LoadedModels().adapted(TINY, LORA, None, dtype, CPU)
    check_determinism(model, 16)
    own = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda out, a, b: own(out, a, b) + (1.0 if len(a) == 5 else 0.0))
    with pytest.raises(ModelError, match=r"q_proj\.lora_B\.weight.*5"):
        check_determinism(model, 16)
