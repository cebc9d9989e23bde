"""Rows of several adapters in one pass: against PEFT, against passes of their own, and whatever is beside them."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from palestra.config import AdapterConfig
from palestra.models import mixed_adapters
from palestra.models.adapter_stacks import KEPT_PASSES
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_tokenizer
from palestra.models.device import multiplies_bfloat16
from palestra.models.loading import LoadedModels
from palestra.models.mixed_adapters import MIN_ROWS, MixedModel
from palestra_cpu.packed import PackedLinear
from unit.engine.test_embedded import deterministic_dtype

# PEFT reads an attribute that this version of transformers warns of.
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")]
CPU = torch.device("cpu")
TINY = "tiny-random"
CONFIGS = [
    AdapterConfig(rank=4, alpha=8.0),
    AdapterConfig(rank=3, alpha=5.0, targets=["q_proj", "mlp.down_proj"]),
    AdapterConfig(rank=13, alpha=6.0, targets=["v_proj", "q_proj", "gate_proj"]),
    AdapterConfig(rank=1, alpha=2.0),
]
LENGTHS = [11, 23, 5, 9]


class Sequences:
    """Plain causal attention within sequences that lie one after another."""

    def __init__(self, lengths):
        self.lengths = list(lengths)

    def __call__(self, layer, query, key, value, scale, window):
        pieces, start = [], 0
        for length in self.lengths:
            part = slice(start, start + length)
            seen = torch.ones((length, length), dtype=torch.bool).tril()
            out = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, part], key[:, :, part], value[:, :, part], attn_mask=seen, scale=scale, enable_gqa=True
            )
            pieces.append(out[0].transpose(0, 1))
            start += length
        return torch.cat(pieces)


class Bench:
    """A base with adapters that all change something, and the mixed model on it."""

    def __init__(self, dtype=torch.float32, exact=False, configs=CONFIGS, base=TINY, sampling=False):
        models = LoadedModels()
        self.models = [models.adapted(base, config, seed, dtype, CPU)[0] for seed, config in enumerate(configs)]
        self.base = models.frozen(base, dtype, CPU)[0]
        draw = torch.Generator().manual_seed(1)
        for model in self.models:
            with torch.no_grad():
                for name, parameter in model.own_parameters():
                    if "lora_B" in name:
                        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
        self.mixed = MixedModel(self.models[0].base, exact, sampling)
        self.adapters = [model.adapter for model in self.models]

    def ids(self, number: int, length: int) -> torch.Tensor:
        return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(number))

    def hidden(self, *sequences):
        """Of sequences that are (number of the adapter or None, ids)."""
        lengths = [len(ids) for _, ids in sequences]
        runs = [(None if which is None else self.adapters[which], len(ids)) for which, ids in sequences]
        positions = torch.cat([torch.arange(n) for n in lengths])
        ids = torch.cat([ids for _, ids in sequences])
        return self.mixed.hidden(ids, positions, Sequences(lengths), runs).split(lengths)

    def alone(self, which, ids):
        model = self.base if which is None else self.models[which]
        return model.hidden(ids, torch.arange(len(ids)), Sequences([len(ids)]))

    def freeze(self):
        for model in self.models:
            model.adapter.freeze(model.compute_dtype)


def gradients_of_peft(bench, which, ids, of, folder):
    bench.models[which].save(folder, load_tokenizer(TINY))
    base = AutoModelForCausalLM.from_pretrained(model_folder(TINY), dtype=torch.float32, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base.eval(), folder, is_trainable=True)
    (theirs(ids[None]).logits[0] * of).sum().backward()
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }


@pytest.mark.slow
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, None, 0, 3, 0, 1], [3, 1]], ids=str)
@pytest.mark.parametrize("separate", [False, True])
def test_gradients_of_a_mixed_batch_are_those_of_peft_on_transformers_own_model(tmp_path, order, separate):
    """Also where rows of one adapter lie in two places, and beside rows of the base."""
    bench = Bench(exact=separate)
    sequences = [(which, bench.ids(n, LENGTHS[n % 4])) for n, which in enumerate(order)]
    found = bench.hidden(*sequences)
    size = bench.mixed.model.vocab_size
    weights = [
        torch.randn((len(ids), size), generator=torch.Generator().manual_seed(n))
        for n, (_, ids) in enumerate(sequences)
    ]
    sum((bench.mixed.model.logits(h) * w).sum() for h, w in zip(found, weights, strict=True)).backward()
    for which in {which for which in order if which is not None}:
        wanted = {}
        for number, (other, ids) in enumerate(sequences):
            if other == which:
                folder = tmp_path / str(number)
                folder.mkdir()
                for name, gradient in gradients_of_peft(bench, which, ids, weights[number], folder).items():
                    wanted[name] = wanted.get(name, 0) + gradient
        own = dict(bench.models[which].own_parameters())
        assert own.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert float((own[name].grad - gradient).norm() / gradient.norm()) < 1e-5, name
    for which in set(range(4)) - set(order):
        assert all(p.grad is None for _, p in bench.models[which].own_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["dense", "padded", "grouped"])
@pytest.mark.parametrize("order", [[0, 1, None, 2, 0, 3, None, 1], [3, 1, 2, 0, 1]], ids=str)
def test_rows_of_a_mixed_pass_are_those_of_passes_of_their_own(monkeypatch, dtype, way, order):
    """Also where some rows have the base alone, and where none has."""
    if way != "dense":
        monkeypatch.setattr(mixed_adapters, "_FEW_ROWS", 0)
        monkeypatch.setattr(mixed_adapters, "_PADDED", 100 if way == "padded" else 0)
    bench = Bench(dtype)
    bench.freeze()
    sequences = [(which, bench.ids(n, 1 + n % 5)) for n, which in enumerate(order)]
    with torch.inference_mode():
        bench.hidden(*sequences)  # in the first pass it finds out which layers read the same
        mixed = bench.hidden(*sequences)
        assert len(bench.mixed._stacks.adapters) == 4
        close = 1e-5 if dtype == torch.float32 else 0.03
        for (which, ids), found in zip(sequences, mixed, strict=True):
            wanted = bench.alone(which, ids)
            assert float((found - wanted).norm() / wanted.norm()) < close
            if which is not None:
                base = bench.alone(None, ids)
                assert float((base - wanted).norm() / wanted.norm()) > 3 * close


def packed_layers(model) -> list[str]:
    return [name for name, module in model.model.named_modules() if isinstance(module, PackedLinear)]


@pytest.mark.skipif(not multiplies_bfloat16(), reason="oneDNN multiplies no bfloat16 on this processor")
@pytest.mark.parametrize("way", ["dense", "padded", "grouped"])
def test_rows_over_a_packed_base_are_those_over_plain_matrices(monkeypatch, way):
    """Also of adapters for the head and the embedding, of rows without an adapter, and in passes of one adapter."""
    if way != "dense":
        monkeypatch.setattr(mixed_adapters, "_FEW_ROWS", 0)
        monkeypatch.setattr(mixed_adapters, "_PADDED", 100 if way == "padded" else 0)
    configs = [*CONFIGS, AdapterConfig(rank=8, alpha=9.0, targets=["all-linear", "lm_head", "embed_tokens"])]
    plain, packed = (Bench(torch.bfloat16, configs=configs, sampling=sampling) for sampling in (False, True))
    assert not packed_layers(plain.mixed.model)
    linear = {name for name, _ in packed.base.model.named_modules() if name.endswith("_proj")}
    assert {name.removesuffix(".packed") for name in packed_layers(packed.mixed.model)} == {*linear, "lm_head"}
    assert packed.base.packed is None
    for bench in (plain, packed):
        bench.freeze()
    with torch.inference_mode():
        for order in ([0, 4, None, 2, 4, 1, None, 3], [4], [1, 1], [None], [0, 4, None, 2, 4, 1, None, 3]):
            sequences = [(which, plain.ids(n, 1 + n % 5)) for n, which in enumerate(order)]
            runs = [(which, len(ids)) for which, ids in sequences]
            found, wanted = (
                bench.mixed.logits(
                    torch.cat(bench.hidden(*sequences)),
                    [(None if which is None else bench.adapters[which], count) for which, count in runs],
                )
                for bench in (packed, plain)
            )
            # The last bit of bfloat16 differs where oneDNN multiplies plain matrices by another kernel.
            assert float((found - wanted).norm() / wanted.norm()) < 5e-3, order
            assert wanted.norm() > 0


def test_a_base_is_not_packed_where_it_is_exact_in_float32_or_too_large(monkeypatch):
    assert not packed_layers(Bench(torch.bfloat16, exact=True, sampling=True).mixed.model)
    assert not packed_layers(Bench(torch.float32, sampling=True).mixed.model)
    monkeypatch.setenv("PALESTRA_MEMORY_GIB", "0.00001")
    assert not packed_layers(Bench(torch.bfloat16, sampling=True).mixed.model)


async def test_in_the_exact_mode_no_bit_depends_on_what_is_beside_a_row():
    """Other ranks, layers, lengths, numbers of rows and orders; also where it has one row of many."""
    dtype = await deterministic_dtype()
    bench = Bench(dtype, exact=True)
    bench.freeze()
    mine = bench.ids(77, 7)
    single = bench.ids(78, 1)
    others = [(1, bench.ids(1, 9)), (2, bench.ids(2, 1)), (3, bench.ids(3, 30)), (None, bench.ids(4, 6))]
    with torch.inference_mode():
        wanted = bench.alone(0, mine)
        padded = bench.hidden(*[(0, single)] * MIN_ROWS)[0]
        for beside in (others, others[::-1], others[:1], [*others, *others, (0, bench.ids(9, 4))], others[1:3]):
            for place in range(len(beside) + 1):
                batch = [*beside[:place], (0, mine), *beside[place:]]
                assert torch.equal(bench.hidden(*batch)[place], wanted)
                batch[place] = (0, single)
                assert torch.equal(bench.hidden(*batch)[place], padded)


@pytest.mark.parametrize(("few", "padded"), [(128, 2), (0, 100), (0, 0)], ids=["dense", "padded", "grouped"])
def test_an_adapter_that_is_not_finite_spoils_its_own_rows_alone(monkeypatch, few, padded):
    monkeypatch.setattr(mixed_adapters, "_FEW_ROWS", few)
    monkeypatch.setattr(mixed_adapters, "_PADDED", padded)
    bench = Bench()
    bench.freeze()
    ids = bench.ids(0, 6)
    with torch.inference_mode():
        for matrix in ("lora_A", "lora_B"):
            for _, parameter in (p for p in bench.models[1].own_parameters() if matrix in p[0]):
                parameter.fill_(float("nan"))
            bench.mixed.refresh(bench.adapters[1])
            bench.hidden((0, ids))
            first, second, third = bench.hidden((0, ids), (1, ids), (2, ids))
            assert not second.isfinite().any()
            for which, found in ((0, first), (2, third)):
                wanted = bench.alone(which, ids)
                assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize(("few", "padded"), [(128, 2), (0, 100), (0, 0)], ids=["dense", "padded", "grouped"])
def test_what_is_kept_of_adapters_follows_their_weights_and_the_batch(monkeypatch, few, padded):
    monkeypatch.setattr(mixed_adapters, "_FEW_ROWS", few)
    monkeypatch.setattr(mixed_adapters, "_PADDED", padded)
    bench = Bench()
    bench.freeze()
    ids = bench.ids(0, 3)
    with torch.inference_mode():

        def right(*which):
            for one, found in zip(which, bench.hidden(*((one, ids) for one in which)), strict=True):
                wanted = bench.alone(one, ids)
                assert float((found - wanted).norm() / wanted.norm()) < 1e-5

        right(0)
        right(0, 1)
        right(1)
        right(1, None)  # one of them has left: its matrices are still there
        right(0, 1, 2, 3)
        right(3, 2)
        for _ in range(KEPT_PASSES + 1):  # the others are dropped
            right(2, 3)
        assert len(bench.mixed._stacks.adapters) == 2
        before = bench.hidden((0, ids), (1, ids))
        for _, parameter in bench.models[1].own_parameters():
            parameter.mul_(1.5)
        bench.mixed.refresh(bench.adapters[1])
        after = bench.hidden((0, ids), (1, ids))
        right(0, 1)
        assert not torch.equal(before[1], after[1])
        bench.mixed.forget(bench.adapters[1])
        right(0, 2)


@pytest.mark.parametrize("exact", [True, False])
def test_rows_of_the_base_alone_and_of_one_adapter_have_the_bits_of_models_of_their_own(exact):
    """Also after passes with others, whose matrices are kept beside its own."""
    bench = Bench(exact=exact)
    bench.freeze()
    ids = bench.ids(0, 8)
    with torch.inference_mode():
        for _ in range(2):
            bench.hidden(*((which, ids) for which in range(4)))
        assert torch.equal(bench.hidden((None, ids))[0], bench.alone(None, ids))
        for which in range(4):
            assert torch.equal(bench.hidden((which, ids))[0], bench.alone(which, ids))
