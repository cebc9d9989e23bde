"""A policy with an adapter: what is trained, published and saved of it; reference and critic on the same base."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import ClippedValueLoss
from palestra.config import AdapterConfig, TrainerConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.errors import CheckpointError, ModelError
from palestra.models.catalog import model_folder
from palestra.models.loading import LoadedModels
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import PolicyVersion
from unit.trainer.test_critic import batch, critic_of, critic_state, critic_weights, same
from unit.trainer.test_torch_trainer import LOSS, batch_of_two_groups, close, gradients, weights

# PEFT reads an attribute that this version of transformers warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
CPU = torch.device("cpu")
TINY = "tiny-random"
LORA = AdapterConfig(rank=4, alpha=8.0)
WIDE = LORA.model_copy(update={"targets": ["all-linear", "lm_head", "embed_tokens"]})
SPEC = PolicySpec(model=TINY, adapter=LORA, seed=3)
VALUE = LossSpec.of(ClippedValueLoss(clip=0.0))
PARAMS = OptimParams(learning_rate=1e-2)


@asynccontextmanager
async def trained(spec: PolicySpec = SPEC, models: LoadedModels | None = None, **config):
    settings = TrainerConfig.model_validate({"threads": 1, "dtype": "float32"} | config)
    trainer = TorchTrainer(settings, 2, models or LoadedModels())
    try:
        await trainer.create("policy", spec)
        yield trainer
    finally:
        await trainer.close()


def model_of(trainer):
    return trainer._policies["policy"].model


async def step(trainer, number: int, critic: bool = False) -> None:
    if critic:
        await trainer.forward_backward("policy", batch()[number % 3 :], VALUE, f"v{number}")
        await trainer.optim_step("policy", PARAMS, f"uv{number}", "critic")
    await trainer.forward_backward("policy", batch()[number % 3 :], LOSS, f"g{number}")
    await trainer.optim_step("policy", PARAMS, f"u{number}")
    await trainer.weights("policy")


def base_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" not in name}


def doubled(trainer) -> None:
    """Give all weights of the policy 64 bits."""
    for _, parameter in model_of(trainer).named_parameters():
        parameter.data = parameter.data.double()


def moments(trainer) -> dict[str, torch.Tensor]:
    optimizer = trainer._policies["policy"].optimizer
    state = optimizer.adamw.state
    return {f"{key} {name}": v.clone() for name, p in optimizer.parameters for key, v in state.get(p, {}).items()}


async def test_only_the_adapter_has_gradients_and_moments_and_the_base_stays_bit_by_bit():
    async with trained() as trainer:
        before, own = base_of(model_of(trainer)), weights(trainer)
        await trainer.forward_backward("policy", batch(), LOSS, "g")
        assert all("lora_" in name for name in gradients(trainer))
        assert all(p.grad is None for name, p in model_of(trainer).named_parameters() if ".lora_" not in name)
        assert (await trainer.optim_step("policy", PARAMS, "u")).applied
        assert {name.split(" ")[1] for name in moments(trainer)} == own.keys()
        assert same(base_of(model_of(trainer)), before)
        assert not same(weights(trainer), own)


async def test_the_gradient_follows_from_that_of_full_weights_by_the_chain_rule():
    """With W' = W + scale B A: dA = scale B^T dW', dB = scale dW' A^T. In double precision, see `test_invariance`."""
    draw = torch.Generator().manual_seed(4)
    async with trained() as trainer:
        doubled(trainer)
        adapter = model_of(trainer).adapter
        with torch.no_grad():
            for layer in adapter.layers.values():
                layer.lora_B.weight.copy_(0.1 * torch.randn(layer.lora_B.weight.shape, generator=draw))
        await trainer.forward_backward("policy", batch(), LOSS, "g")
        found = gradients(trainer)
        async with trained(PolicySpec(model=TINY)) as full:
            doubled(full)
            own = dict(full._policies["policy"].parameters)
            with torch.no_grad():
                for name, layer in adapter.layers.items():
                    own[f"{name}.weight"] += layer.scale * layer.lora_B.weight @ layer.lora_A.weight
            await full.forward_backward("policy", batch(), LOSS, "g")
            wanted = {}
            for name, layer in adapter.layers.items():
                gradient = layer.scale * own[f"{name}.weight"].grad
                wanted[f"{name}.lora_A.weight"] = layer.lora_B.weight.detach().T @ gradient
                wanted[f"{name}.lora_B.weight"] = gradient @ layer.lora_A.weight.detach().T
        close(found, wanted, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("critic", [None, "states", "actions"])
async def test_going_on_from_a_checkpoint_is_bit_identical_to_never_stopping(tmp_path, critic):
    spec = PolicySpec(model=TINY, adapter=WIDE, seed=3, critic=critic)
    trains_critic = critic == "states"
    async with trained(spec) as trainer:
        for number in range(3):
            await step(trainer, number, trains_critic)
        wanted = (weights(trainer), moments(trainer), critic_state(trainer) if trains_critic else {})
    async with trained(spec) as trainer:
        for number in range(2):
            await step(trainer, number, trains_critic)
        folder = await trainer.save("policy", tmp_path, {"step": 2}, "s")
        assert not list(folder.glob("model*.safetensors"))
        assert sum(f.stat().st_size for f in folder.glob("*.safetensors")) < 1.5e6
    async with trained(PolicySpec(model=TINY, adapter=WIDE, seed=99, critic=critic)) as trainer:
        assert (await trainer.load("policy", tmp_path))["step"] == 2
        await step(trainer, 2, trains_critic)
        found = (weights(trainer), moments(trainer), critic_state(trainer) if trains_critic else {})
        assert all(same(one, two) for one, two in zip(found, wanted, strict=True))
        assert trainer.version("policy") == PolicyVersion(0, 3)
    async with trained(PolicySpec(model=TINY)) as full:
        with pytest.raises(CheckpointError, match="another model"):
            await full.load("policy", tmp_path)


async def test_a_checkpoint_is_loaded_by_peft_with_the_same_logits(tmp_path):
    async with trained() as trainer:
        await step(trainer, 0)
        folder = await trainer.save("policy", tmp_path, {"step": 1}, "s")
        rows = batch_of_two_groups()
        ours = (await trainer.forward("policy", rows, {"old_logprobs"}))["old_logprobs"]
    base = AutoModelForCausalLM.from_pretrained(model_folder(TINY), dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, folder).eval()
    for row, found in zip(rows, ours, strict=True):
        ids = torch.tensor(row.ids.astype(np.int64))
        places = torch.tensor(np.flatnonzero(row.loss_mask))
        with torch.inference_mode():
            scores = theirs(ids[None]).logits[0] / torch.tensor(row.temperatures).clamp_min(0.1).roll(-1)[:, None]
        wanted = scores.log_softmax(-1)[places - 1, ids[places]]
        torch.testing.assert_close(torch.tensor(found)[places], wanted, rtol=1e-4, atol=1e-5)


async def test_the_engine_gets_the_adapter_alone_and_shares_the_base():
    models = LoadedModels()
    config = EmbeddedEngineConfig(threads=1, dtype="float32", cache_gib=0.01)
    sampled, _ = models.adapted(TINY, LORA, None, torch.float32, CPU)
    engine = EmbeddedEngine({"policy": PolicyModel(model=sampled, stop_ids=frozenset())}, config)
    try:
        async with trained(models=models) as trainer:
            mine = model_of(trainer)
            shared = {name: p.data_ptr() for name, p in sampled.named_parameters() if ".lora_" not in name}
            assert shared == {name: p.data_ptr() for name, p in mine.named_parameters() if ".lora_" not in name}
            await step(trainer, 0)
            source = await trainer.weights("policy")
            assert {name for name, _ in source.tensors()} == {name for name, _ in sampled.own_parameters()}
            await engine.sync_weights("policy", PolicyVersion(0, 1), source)
            for (name, theirs), (_, own) in zip(sampled.own_parameters(), mine.own_parameters(), strict=True):
                assert torch.equal(theirs, own), name
                assert theirs.data_ptr() != own.data_ptr()
        async with trained(PolicySpec(model=TINY)) as full:
            with pytest.raises(ModelError, match="no weight"):
                await engine.sync_weights("policy", PolicyVersion(0, 2), await full.weights("policy"))
    finally:
        await engine.close()


async def test_the_reference_is_the_base_without_the_adapter_and_no_second_copy_of_its_weights():
    spec = PolicySpec(model=TINY, adapter=LORA, seed=3, reference=TINY)
    async with trained(spec) as trainer:
        rows = batch_of_two_groups()
        before = (await trainer.forward("policy", rows, {"old_logprobs"}))["old_logprobs"]
        await step(trainer, 0)
        found = await trainer.forward("policy", rows, {"old_logprobs", "reference_logprobs"})
        for first, reference, now in zip(before, found["reference_logprobs"], found["old_logprobs"], strict=True):
            assert np.array_equal(first, reference, equal_nan=True)
            assert not np.array_equal(now, reference, equal_nan=True)
        reference = trainer._policies["policy"]._frozen["reference_logprobs"].model
        own = {name: p.data_ptr() for name, p in model_of(trainer).named_parameters() if ".lora_" not in name}
        assert {name: p.data_ptr() for name, p in reference.named_parameters()} == own


async def test_the_reference_of_training_that_goes_on_is_the_adapter_that_it_began_with(tmp_path):
    async with trained() as trainer:
        await step(trainer, 0)
        folder = str(await trainer.save("policy", tmp_path, {"step": 1}, "s"))
    async with trained(PolicySpec(model=folder, adapter=LORA, reference=folder)) as trainer:
        await step(trainer, 1)
        rows = batch_of_two_groups()
        found = await trainer.forward("policy", rows, {"reference_logprobs"})
    async with trained(PolicySpec(model=folder, adapter=LORA)) as trainer:
        wanted = await trainer.forward("policy", rows, {"old_logprobs"})
    for one, two in zip(found["reference_logprobs"], wanted["old_logprobs"], strict=True):
        assert np.array_equal(one, two, equal_nan=True)


@pytest.mark.parametrize("critic", ["states", "actions"])
async def test_the_critic_has_an_adapter_of_its_own_on_the_same_base(critic):
    async with trained(PolicySpec(model=TINY, adapter=LORA, seed=3, critic=critic)) as trainer:
        nets = [critic_of(trainer)._net, critic_of(trainer)._target]
        own = {name: p.data_ptr() for name, p in model_of(trainer).named_parameters() if ".lora_" not in name}
        for net in nets[: 1 if critic == "states" else 2]:
            body = {name: p.data_ptr() for name, p in net.model.named_parameters() if ".lora_" not in name}
            assert body == own
            assert all("lora_" in name or name.startswith("value_head.") for name, _ in net.named_parameters())
        if critic == "actions":
            copied = dict(critic_of(trainer)._target.named_parameters())
            assert all(torch.equal(p, copied[name]) for name, p in critic_of(trainer).optimizer.parameters)
            return
        policy, base = weights(trainer), base_of(model_of(trainer))
        for number in range(2):  # the adapter of the critic has a gradient when its head is no longer zero
            before = critic_weights(trainer)
            await trainer.forward_backward("policy", batch(), VALUE, f"v{number}")
            await trainer.optim_step("policy", PARAMS, f"uv{number}", "critic")
        after = critic_weights(trainer)
        assert [name for name in before if torch.equal(before[name], after[name]) and "lora_B" in name] == []
        assert same(weights(trainer), policy)
        assert same(base_of(model_of(trainer)), base)


@pytest.mark.parametrize("critic", ["states", "actions"])
async def test_the_critic_has_no_matrices_on_the_head_which_it_does_not_use(critic):
    async with trained(PolicySpec(model=TINY, adapter=WIDE, seed=3, critic=critic)) as trainer:
        names = {name for name, _ in critic_of(trainer).optimizer.parameters}
        own = {f"body.{name}" for name in weights(trainer)}
        assert own - names == {"body.lm_head.lora_A.weight", "body.lm_head.lora_B.weight"}
        assert all(name.startswith("value_head.") for name in names - own)


async def test_an_adapter_of_the_head_alone_is_trained_alone_and_in_a_pass_with_others():
    """The hidden states have no gradient then, and a batch without a trained token has none at all."""
    spec = PolicySpec(model=TINY, adapter=LORA.model_copy(update={"targets": ["lm_head"]}), seed=3)
    found = []
    for together in (False, True):
        async with trained(spec) as trainer:
            await trainer.create("other", spec)
            before = weights(trainer)
            batches = {"policy": batch(), "other": batch()[1:]}
            works = [trainer.forward_backward(name, rows, LOSS, f"g{name}") for name, rows in batches.items()]
            reports = await asyncio.gather(*works) if together else [await work for work in works]
            assert all(report.trained_tokens for report in reports)
            assert (await trainer.optim_step("policy", PARAMS, "u")).applied
            after = weights(trainer)
            assert torch.equal(after["lm_head.lora_A.weight"], before["lm_head.lora_A.weight"])  # B was zero
            assert not torch.equal(after["lm_head.lora_B.weight"], before["lm_head.lora_B.weight"])
            found.append(after)
            nothing = [replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in batch()]
            assert (await trainer.forward_backward("policy", nothing, LOSS, "g2")).trained_tokens == 0
    close(found[0], found[1], 1e-6)


async def test_two_policies_with_adapters_share_a_base_and_nothing_else():
    async with trained() as trainer:
        await trainer.create("other", PolicySpec(model=TINY, adapter=AdapterConfig(rank=2), seed=4))
        other = trainer._policies["other"]
        before = {name: p.detach().clone() for name, p in other.parameters}
        await step(trainer, 0)
        assert same({name: p.detach() for name, p in other.parameters}, before)
        shared = {p.data_ptr() for name, p in other.model.named_parameters() if ".lora_" not in name}
        assert shared == {p.data_ptr() for name, p in model_of(trainer).named_parameters() if ".lora_" not in name}


@pytest.mark.parametrize("tokens", [1, 20, 70])
async def test_how_the_batch_is_cut_and_ordered_does_not_matter(tokens):
    found = []
    for size, samples in ((tokens, batch()[::-1]), (None, batch())):
        async with trained(micro_batch_tokens=size) as trainer:
            with torch.no_grad():
                for name, parameter in model_of(trainer).own_parameters():
                    draw = torch.Generator().manual_seed(len(name))
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
            await trainer.forward_backward("policy", samples, LOSS, "g")
            found.append(gradients(trainer))
    close(found[0], found[1], 1e-5)
