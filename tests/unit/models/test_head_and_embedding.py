"""Adapters of the head and of the embedding: against PEFT, tied and untied, merged, and several in one pass."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from palestra.config import AdapterConfig
from palestra.engine.embedded.model_runner import check_determinism
from palestra.errors import ConfigError, ModelError
from palestra.models import mixed_adapters
from palestra.models.adapter_files import WEIGHTS
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.models.loading import LoadedModels
from palestra.models.mixed_adapters import MIN_ROWS
from unit.engine.test_embedded import deterministic_dtype
from unit.models.test_adapters import logits
from unit.models.test_mixed_adapters import Bench, Sequences

pytestmark = [
    pytest.mark.ci,
    # PEFT reads an attribute that this version of transformers warns of.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    # PEFT says that it does not train one adapter for both of a tied model, and that it saves the base's weights.
    pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers:UserWarning"),
]
CPU = torch.device("cpu")
TINY = "tiny-random"
CONFIGS = {
    "head": AdapterConfig(rank=3, alpha=5.0, targets=["lm_head"]),
    "embedding": AdapterConfig(rank=4, alpha=6.0, targets=["embed_tokens", "q_proj"]),
    "all": AdapterConfig(rank=8, alpha=9.0, targets=["all-linear", "lm_head", "embed_tokens"]),
}
MIXED = [CONFIGS["all"], CONFIGS["head"], AdapterConfig(rank=2, alpha=3.0), CONFIGS["embedding"]]


@pytest.fixture(params=["tied", "untied"])
def base(request, tmp_path) -> str:
    """The tiny model, whose embedding and head are one matrix, and one with two."""
    if request.param == "tied":
        return TINY
    model = AutoModelForCausalLM.from_pretrained(model_folder(TINY), dtype=torch.float32)
    model.config.tie_word_embeddings = False
    weight = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(5))
    model.lm_head.weight = torch.nn.Parameter(0.02 * weight)
    model.save_pretrained(tmp_path / "untied")
    load_tokenizer(TINY).save_pretrained(tmp_path / "untied")
    return str(tmp_path / "untied")


def adapted(base: str, config: AdapterConfig, dtype=torch.float32, seed: int = 1):
    """A model whose adapter changes something everywhere."""
    model, _ = LoadedModels().adapted(base, config, 7, dtype, CPU)
    changed(model, seed)
    return model


def changed(model, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.own_parameters():
            if name.endswith(("lora_B.weight", "lora_embedding_A")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))


def ids_of(seed: int = 2, length: int = 23) -> torch.Tensor:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed))


def transformers_model(base: str):
    return AutoModelForCausalLM.from_pretrained(
        model_folder(base), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def of_peft(base: str, model, folder):
    folder.mkdir()
    model.save(folder, load_tokenizer(base))
    return PeftModel.from_pretrained(transformers_model(base), folder, is_trainable=True)


def gradients(theirs) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_and_gradients_are_those_of_peft_on_transformers_own_model(tmp_path, base, config):
    model, ids = adapted(base, config), ids_of()
    theirs = of_peft(base, model, tmp_path / "adapter")
    ours, wanted = logits(model, ids), theirs(ids[None]).logits[0]
    # Of the largest logit: a small one is a sum of large products, which are added in another order.
    assert bool(((ours - wanted).abs() < 5e-6 * wanted.abs().max()).all())
    with torch.inference_mode():
        assert distance(logits(LoadedModels().frozen(base, torch.float32, CPU)[0], ids), wanted) > 0.01
    of = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    (ours * of).sum().backward()
    (wanted * of).sum().backward()
    own, found = dict(model.own_parameters()), gradients(theirs)
    assert own.keys() == found.keys()
    for name, gradient in found.items():
        assert distance(own[name].grad, gradient) < 1e-5, name
    assert all(p.grad is None and not p.requires_grad for name, p in model.named_parameters() if name not in own)


@pytest.mark.parametrize("tying", [False, True])
def test_an_adapter_of_peft_can_be_used(tmp_path, base, tying):
    """PEFT writes the base's own embedding beside the matrices, and may give a tied model one adapter for both."""
    config = LoraConfig(
        r=5, lora_alpha=7, target_modules=["q_proj", "embed_tokens", "lm_head"], init_lora_weights=False
    )
    if tying and base != TINY:
        pytest.skip("nothing is tied")
    config.ensure_weight_tying = tying
    theirs = get_peft_model(transformers_model(base), config).eval()
    folder = tmp_path / "adapter"
    theirs.save_pretrained(folder)
    assert any("base_layer" in name for name in load_file(folder / WEIGHTS))
    data = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(data | {"base_model_name_or_path": base}))
    found, _ = LoadedModels().frozen(str(folder), torch.float32, CPU)
    assert {"lm_head", "model.embed_tokens"} < set(found.adapter.names)
    ids = ids_of()
    with torch.inference_mode():
        wanted = theirs(ids[None]).logits[0]
        torch.testing.assert_close(logits(found, ids), wanted, rtol=1e-4, atol=1e-4)
        merged = load_causal_lm(str(folder), torch.float32)
        torch.testing.assert_close(logits(merged, ids), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_merged_export_is_the_model_with_its_adapter(tmp_path, base, config):
    """Also for transformers itself, which has to find two matrices where the base has one."""
    model, ids = adapted(base, config), ids_of()
    (tmp_path / "adapter").mkdir()
    model.save(tmp_path / "adapter", load_tokenizer(base))
    merged = load_causal_lm(str(tmp_path / "adapter"), torch.float32)
    merged.save(tmp_path / "merged", load_tokenizer(base))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = logits(model, ids)
        assert distance(logits(merged, ids), wanted) < 1e-5
        assert distance(theirs(ids[None]).logits[0], wanted) < 1e-5
    assert not theirs.config.tie_word_embeddings
    assert theirs.lm_head.weight.data_ptr() != theirs.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_in_bfloat16_engine_and_trainer_say_the_same_and_nearly_what_float32_says(base, config):
    ids = ids_of()
    trainer, engine = (adapted(base, config, torch.bfloat16) for _ in range(2))
    engine.adapter.freeze(torch.bfloat16)
    exact = adapted(base, config)
    with torch.inference_mode():
        found, wanted = logits(trainer, ids), logits(exact, ids)
        assert torch.equal(logits(engine, ids), found)
        assert distance(found, wanted) < 0.05


def test_the_likeliest_logits_have_the_products_of_the_head_in_float32():
    """What is rounded is the vector of low rank, as the output of every product; the others are rounded once more."""
    model = adapted(TINY, CONFIGS["head"], torch.bfloat16)
    model.adapter.freeze(torch.bfloat16)
    head, hidden = model.adapter.layers["lm_head"], torch.randn((5, 64), generator=torch.Generator().manual_seed(1))
    hidden = hidden.bfloat16().float()
    with torch.inference_mode():
        found = model.logits(hidden)
        low = ((hidden.bfloat16() @ head.lora_A.weight.T) * head.scale).double()
        wanted = hidden.double() @ head.weight.double().T + low @ head.lora_B.weight.double().T
        off = (found.double() - wanted).abs()
        largest = wanted.topk(8).indices
    assert float(off.gather(1, largest).max()) < 1e-6
    assert float(off.max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, None, 0, 3, 0, 1]], ids=str)
def test_gradients_of_a_mixed_batch_are_those_of_peft(tmp_path, base, order):
    """The body in one pass, and each policy's logits by its own model, as the trainer computes them."""
    bench = Bench(configs=MIXED, base=base)
    for number, model in enumerate(bench.models):
        changed(model, number)
    sequences = [(which, ids_of(n, 9 + n)) for n, which in enumerate(order)]
    sizes = (len(ids) for _, ids in sequences)
    weights = [
        torch.randn((size, bench.base.vocab_size), generator=torch.Generator().manual_seed(size)) for size in sizes
    ]
    models = [bench.base if which is None else bench.models[which] for which, _ in sequences]
    parts = zip(models, bench.hidden(*sequences), weights, strict=True)
    sum((model.logits(hidden) * weight).sum() for model, hidden, weight in parts).backward()
    for which in {which for which in order if which is not None}:
        theirs = of_peft(base, bench.models[which], tmp_path / str(which))
        for number, (other, ids) in enumerate(sequences):
            if other == which:
                (theirs(ids[None]).logits[0] * weights[number]).sum().backward()
        own, found = dict(bench.models[which].own_parameters()), gradients(theirs)
        assert own.keys() == found.keys()
        for name, gradient in found.items():
            assert distance(own[name].grad, gradient) < 1e-5, name


def mixed_logits(bench: Bench, *sequences) -> tuple[torch.Tensor, ...]:
    """Of the last tokens of sequences that are (number of the adapter or None, ids), as an engine computes them."""
    hidden = torch.stack([found[-1] for found in bench.hidden(*sequences)])
    adapters = [None if which is None else bench.adapters[which] for which, _ in sequences]
    return bench.mixed.logits(hidden, [(adapter, 1) for adapter in adapters]).unbind(0)


def alone_logits(bench: Bench, which, ids) -> torch.Tensor:
    model = bench.base if which is None else bench.models[which]
    return model.logits(model.hidden(ids, torch.arange(len(ids)), Sequences([len(ids)]))[-1:])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["dense", "padded", "grouped"])
def test_rows_of_a_mixed_pass_have_the_logits_of_passes_of_their_own(monkeypatch, dtype, way):
    if way != "dense":
        monkeypatch.setattr(mixed_adapters, "_FEW_ROWS", 0)
        monkeypatch.setattr(mixed_adapters, "_PADDED", 100 if way == "padded" else 0)
    bench = Bench(dtype, configs=MIXED)
    for number, model in enumerate(bench.models):
        changed(model, number)
    bench.freeze()
    order = [0, 1, None, 2, 0, 3, 1]
    sequences = [(which, ids_of(n, 1 + n)) for n, which in enumerate(order)]

    def check() -> list[torch.Tensor]:
        found = mixed_logits(bench, *sequences)
        for (which, ids), one in zip(sequences, found, strict=True):
            assert distance(one, alone_logits(bench, which, ids)) < (1e-5 if dtype == torch.float32 else 0.03)
        return list(found)

    with torch.inference_mode():
        check()  # the first pass finds out which layers read the same input
        before = check()
        for _, parameter in bench.models[1].own_parameters():
            parameter.mul_(1.5)
        bench.mixed.refresh(bench.adapters[1])
        assert not torch.equal(check()[1], before[1])


async def test_in_the_exact_mode_no_bit_of_a_logit_depends_on_what_is_beside_a_row():
    dtype = await deterministic_dtype()
    bench = Bench(dtype, exact=True, configs=MIXED)
    for number, model in enumerate(bench.models):
        changed(model, number)
    bench.freeze()
    mine = (0, ids_of(77, 1))
    others = [(1, ids_of(1, 9)), (2, ids_of(2, 1)), (3, ids_of(3, 3)), (None, ids_of(4, 6)), (1, ids_of(5, 1))]
    with torch.inference_mode():
        wanted = mixed_logits(bench, *[mine] * MIN_ROWS)[0]
        for beside in (others, others[::-1], [*others, (0, ids_of(9, 4))], others[1:4]):
            for place in range(len(beside) + 1):
                assert torch.equal(mixed_logits(bench, *beside[:place], mine, *beside[place:])[place], wanted)


class Made(TorchDispatchMode):
    """Records the sizes of all tensors that are made, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in known:
                self.sizes.add(one.numel())
        return found


def test_neither_pass_makes_a_matrix_of_the_size_of_the_head():
    """The product B A of the head or the embedding would have V d numbers for each adapter."""
    model, ids = adapted(TINY, CONFIGS["all"]), ids_of(length=11)
    size = model.vocab_size * 64
    with Made() as made:
        logits(model, ids).logsumexp(dim=-1).sum().backward()
    assert max(made.sizes) < size
    bench = Bench(configs=MIXED)
    bench.freeze()
    sequences = [(which, ids_of(which, 3)) for which in range(4)]
    with torch.inference_mode():
        mixed_logits(bench, *sequences)
        with Made() as made:
            mixed_logits(bench, *sequences)
    assert max(made.sizes) < size


def test_a_new_adapter_changes_nothing_and_is_drawn_as_peft_draws_it(base):
    model, _ = LoadedModels().adapted(base, CONFIGS["all"], 5, torch.float32, CPU)
    with torch.inference_mode():
        assert torch.equal(
            logits(model, ids_of()), logits(LoadedModels().frozen(base, torch.float32, CPU)[0], ids_of())
        )
    embedding = model.adapter.embedding["model.embed_tokens"]
    assert not embedding.lora_embedding_A.any()
    assert 0.8 < float(embedding.lora_embedding_B.detach().std()) < 1.2
    # Those of linear layers are drawn as if there were no embedding.
    alone, _ = LoadedModels().adapted(base, AdapterConfig(rank=8), 5, torch.float32, CPU)
    own = dict(model.own_parameters())
    assert all(torch.equal(p, own[name]) for name, p in alone.own_parameters())


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path):
    for config, match in (
        (AdapterConfig(rank=65, targets=["lm_head"]), r"lm_head.*64.*259"),
        (
            AdapterConfig(rank=65, targets=["embed_tokens"]),
            r"model.embed_tokens.*259.*64",
        ),
        (AdapterConfig(targets=["wte"]), r"'wte'.*down_proj.*embed_tokens"),
    ):
        with pytest.raises(ConfigError, match=match):
            LoadedModels().adapted(TINY, config, 0, torch.float32, CPU)
    model = adapted(TINY, CONFIGS["embedding"])
    model.save(tmp_path, load_tokenizer(TINY))
    models = LoadedModels()
    wider = CONFIGS["embedding"].model_copy(update={"targets": ["embed_tokens", "q_proj", "lm_head"]})
    with pytest.raises(ConfigError, match=r"differ.*lm_head"):
        models.adapted(str(tmp_path), wider, 0, torch.float32, CPU)
    data = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(data | {"trainable_token_indices": [1]}))
    with pytest.raises(ModelError, match="trainable_token_indices"):
        models.frozen(str(tmp_path), torch.float32, CPU)


def test_the_check_of_determinism_looks_at_the_products_of_both(monkeypatch):
    model, _ = LoadedModels().adapted(TINY, CONFIGS["all"], None, torch.float32, CPU)
    check_determinism(model, 16)
    own = torch.addmm
    for outputs, name in ((259, "lm_head.lora_B.weight"), (64, "model.embed_tokens.lora_embedding_B")):
        monkeypatch.setattr(
            torch,
            "addmm",
            lambda out, a, b, n=outputs: own(out, a, b) + (1.0 if len(a) == 5 and b.shape[1] == n else 0.0),
        )
        with pytest.raises(ModelError, match=name if outputs == 259 else r"bits.*5"):
            check_determinism(model, 16)


def test_copies_have_matrices_of_their_own():
    """The matrices are parameters of the embedding, which a copy gets as well."""
    model, ids = adapted(TINY, CONFIGS["all"]), ids_of()
    with torch.inference_mode():
        wanted = logits(model, ids)
        copy = model.copied()
        assert torch.equal(logits(copy, ids), wanted)
        for _, parameter in copy.own_parameters():
            parameter.zero_()
        assert torch.equal(logits(model, ids), wanted)
        assert torch.equal(logits(copy, ids), logits(LoadedModels().frozen(TINY, torch.float32, CPU)[0], ids))
