"""Requests of several policies on one base, computed together as if each were alone; adapters that wait on disk."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import ClippedValueLoss, PPOClipLoss
from palestra.config import AdapterConfig, TrainerConfig
from palestra.errors import CheckpointError, InvalidAlgorithm, NotFound
from palestra.models.loading import LoadedModels
from palestra.models.mixed_adapters import MixedModel
from palestra.trainer import optimizer
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.optimizer import Optimizer
from palestra.trainer.token_forward import LOGIT_CHUNK
from palestra_bases.training import slots
from palestra_bases.training.queue import REQUEST_TOKENS, TrainingQueue
from palestra_bases.training.shared_trainer import SharedTrainer
from palestra_bases.training.tenant_trainer import TenantTrainer
from unit.trainer.test_critic import batch, same
from unit.trainer.test_moment_memory import step as moments_step
from unit.trainer.test_moment_memory import weights_of
from unit.trainer.test_torch_trainer import close

TINY = "tiny-random"
WITH_HEAD = ["all-linear", "lm_head"]
VALUE = LossSpec.of(ClippedValueLoss(clip=0.0))
SPECS = {
    "a": PolicySpec(model=TINY, adapter=AdapterConfig(rank=4, alpha=8.0), seed=3),
    "b": PolicySpec(
        model=TINY, adapter=AdapterConfig(rank=13, alpha=9.0, targets=["q_proj", "lm_head", "embed_tokens"]), seed=4
    ),
    "c": PolicySpec(model=TINY, adapter=AdapterConfig(rank=1, alpha=4.0, targets=WITH_HEAD), seed=5, critic="states"),
    "full": PolicySpec(model=TINY),
}
LOSSES = {
    "a": LossSpec.of(PPOClipLoss(clip_high_threshold=1.3)),
    "b": LossSpec.of(PPOClipLoss(clip_high_threshold=1.2)).model_copy(update={"entropy_coefficient": 0.1}),
    "c": LossSpec.of(PPOClipLoss(clip_high_threshold=1.05)),
    "full": LossSpec.of(PPOClipLoss(clip_high_threshold=1.3)),
}
PARAMS = {
    "a": OptimParams(learning_rate=1e-2),
    "b": OptimParams(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.01),
    "c": OptimParams(learning_rate=1e-2),
    "full": OptimParams(learning_rate=1e-3, betas=(0.8, 0.95)),
}


class Tenants:
    """A trainer behind a queue; each policy is that of a tenant of the same name."""

    def __init__(self, trainer: SharedTrainer) -> None:
        self.trainer, self.queue = trainer, TrainingQueue(trainer)

    def of(self, name: str) -> TenantTrainer:
        return TenantTrainer(self.queue, name)

    async def gradients(self, names, step: int = 0, batches=None) -> list:
        """The reports of one batch of each, sent at the same time, or their errors."""
        asked = [
            self.of(name).forward_backward("p", (batches or {}).get(name, rows(name, step)), LOSSES[name], f"g{step}")
            for name in names
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    async def updates(self, names, step: int = 0) -> list:
        asked = [self.of(name).optim_step("p", PARAMS[name], f"u{step}") for name in names]
        return await asyncio.gather(*asked, return_exceptions=True)

    def policy(self, name: str):
        return self.trainer._policies[f"{name}/p"]

    async def state(self, name: str) -> dict[str, torch.Tensor]:
        """Weights, gradient and moments of a policy, which is brought into memory."""
        await self.trainer.weights(f"{name}/p")
        own = self.policy(name).optimizer
        found = {f"weight {n}": p.detach().clone() for n, p in own.parameters}
        found |= {f"gradient {n}": p.grad.clone() for n, p in own.parameters if p.grad is not None}
        moments = own.adamw.state
        return found | {f"{k} {n}": v.clone() for n, p in own.parameters for k, v in moments.get(p, {}).items()}


@asynccontextmanager
async def tenants_of(*names: str, deterministic: bool = True, at_once: int | None = None, **config):
    settings = TrainerConfig.model_validate({"threads": 1, "dtype": "float32"} | config)
    tenants = Tenants(SharedTrainer(settings, 2, LoadedModels(), deterministic, at_once))
    try:
        for name in names:
            tenants.queue.add_tenant(name)
            await tenants.of(name).create("p", SPECS[name])
            await tenants.of(name).weights("p")  # which brings it into memory
            draw = torch.Generator().manual_seed(ord(name[0]))
            for key, parameter in tenants.policy(name).parameters:
                if "lora_B" in key:
                    parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
        yield tenants
    finally:
        await tenants.queue.close()


def rows(name: str, step: int) -> list:
    """Another batch for each policy and step."""
    found = batch()[(step + len(name)) % 3 : 3 + ord(name[0]) % 4]
    return [replace(row, advantages=row.advantages * (1 + 0.1 * ord(name[0]) + step)) for row in found]


async def alone(name: str, steps: int, **config):
    """Reports and state of a policy that has the trainer for itself, without the queue."""
    async with tenants_of(name, **config) as tenants:
        trainer, reports = tenants.trainer, []
        for step in range(steps):
            reports.append(await trainer.forward_backward(f"{name}/p", rows(name, step), LOSSES[name], f"g{step}"))
            reports.append(await trainer.optim_step(f"{name}/p", PARAMS[name], f"u{step}"))
        return reports, await tenants.state(name)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"micro_batch_tokens": 40}, {"chunk": 3}, {"at_once": 2}], ids=str)
async def test_gradients_and_reports_are_those_of_requests_of_their_own(config, monkeypatch):
    config = dict(config)
    monkeypatch.setitem(LOGIT_CHUNK, "cpu", config.pop("chunk", LOGIT_CHUNK["cpu"]))
    async with tenants_of(*SPECS, deterministic=False, **config) as tenants:
        reports = await tenants.gradients(SPECS)
        for name, found in zip(SPECS, reports, strict=True):
            async with tenants_of(name, **config) as one:
                wanted = await one.trainer.forward_backward(f"{name}/p", rows(name, 0), LOSSES[name], "g")
                gradients = {k: v for k, v in (await one.state(name)).items() if k.startswith("gradient")}
            mine = {k: v for k, v in (await tenants.state(name)).items() if k.startswith("gradient")}
            close(mine, gradients, 1e-4)  # rounding of float32: 1.7e-5 on some processors
            assert (found.rows, found.trained_tokens, found.forward_tokens, found.flat_tokens) == (
                wanted.rows,
                wanted.trained_tokens,
                wanted.forward_tokens,
                wanted.flat_tokens,
            )
            assert found.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-5, nan_ok=True)


async def test_common_passes_are_fewer_and_keep_to_the_budget(monkeypatch):
    seen = []
    real = MixedModel.hidden
    monkeypatch.setattr(MixedModel, "hidden", lambda self, ids, *rest: seen.append(len(ids)) or real(self, ids, *rest))
    async with tenants_of("a", "b", "c", deterministic=False, micro_batch_tokens=90) as tenants:
        found = await tenants.gradients("abc")
        load = tenants.queue.load()
    assert load.passes == 2
    assert load.merged_passes == len(seen)
    assert 0 < max(seen) <= 90
    tokens = [report.forward_tokens for report in found]
    assert sum(seen) <= sum(tokens)
    assert [one.tokens for one in load.tenants] == [count + 2 * REQUEST_TOKENS for count in tokens]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [None, 1, 2])
async def test_twenty_steps_are_bit_for_bit_those_of_a_policy_alone(at_once):
    """Beside others of other ranks, losses, learning rates and lengths, one of which is removed, others evicted."""
    steps = 20
    wanted = {name: await alone(name, steps) for name in "ab"}
    async with tenants_of(*SPECS, at_once=at_once) as tenants:
        found = {name: [] for name in SPECS}
        names = list(SPECS)
        for step in range(steps):
            if step == steps // 2:
                await tenants.queue.remove_tenant("c")
                names.remove("c")
            order = names[step % len(names) :] + names[: step % len(names)]
            for run in (tenants.gradients, tenants.updates):
                for name, report in zip(order, await run(order, step), strict=True):
                    found[name].append(report)
            for name in names:
                await tenants.of(name).weights("p")
        for name, (reports, last) in wanted.items():
            assert [repr(one) for one in found[name]] == [repr(one) for one in reports]
            assert same(await tenants.state(name), last)
        assert (tenants.trainer._slots.evictions > steps) == (at_once is not None)


async def test_a_request_that_fails_leaves_its_gradient_as_it_was_and_the_others_theirs():
    async with tenants_of("a", "b", "c", deterministic=False) as tenants:
        await tenants.gradients("b", 5)
        before = await tenants.state("b")
        wrong = [replace(row, advantages=np.full_like(row.advantages, np.nan)) for row in rows("b", 0)]
        found = await tenants.gradients("abc", batches={"b": wrong})
        assert isinstance(found[1], InvalidAlgorithm)
        assert "not a number" in str(found[1])
        assert same(await tenants.state("b"), before)
        again = await tenants.gradients("abc")
        assert (again[0], again[2]) == (found[0], found[2])  # the same answers; only `b` is computed
        assert again[1].rows == len(rows("b", 0))
        async with tenants_of("a") as one:
            await one.gradients("a")
            wanted = await one.state("a")
        close(await tenants.state("a"), wanted, 1e-5)


async def test_what_fails_together_is_computed_alone(monkeypatch):
    def broken(*_):
        raise RuntimeError("no room")

    async with tenants_of("a", "b", deterministic=False, micro_batch_tokens=90) as tenants:
        await tenants.gradients("ab", 5)
        before = {name: await tenants.state(name) for name in "ab"}
        monkeypatch.setattr(MixedModel, "hidden", broken)
        found = await tenants.gradients("ab")
        assert [report.rows for report in found] == [len(rows("a", 0)), len(rows("b", 0))]
        assert tenants.queue.load().merged_passes >= 1
        monkeypatch.undo()
        for name in "ab":
            async with tenants_of(name) as one:
                for step in (5, 0):
                    await one.gradients(name, step)
                close(await tenants.state(name), await one.state(name), 1e-5)
            assert not same(await tenants.state(name), before[name])


async def test_updates_together_leave_out_a_gradient_that_is_not_finite():
    async with tenants_of("a", "b") as tenants:
        await tenants.gradients("ab")
        tenants.policy("b").parameters[3][1].grad[0, 0] = float("inf")
        before = await tenants.state("b")
        found = await tenants.updates("ab")
        assert [report.applied for report in found] == [True, False]
        after = await tenants.state("b")
        assert same(after, {key: before[key] for key in after})
        assert (tenants.of("a").version("p").n, tenants.of("b").version("p").n) == (1, 0)
        assert await tenants.updates("a") == found[:1]
        assert tenants.of("a").version("p").n == 1


@pytest.mark.slow
def broken(*_, **__):
    raise RuntimeError("no")


@pytest.mark.parametrize("where", ["policy", "moments", "numbers"])
async def test_an_update_that_fails_leaves_those_beside_it_as_they_are_alone(monkeypatch, where):
    """Its policy is gone; its moments find no memory; its numbers can't be used."""
    async with tenants_of("a", "b") as tenants:
        await tenants.gradients("ab")
        if where == "policy":
            await tenants.trainer.remove("b/p")
        elif where == "moments":
            monkeypatch.setattr(tenants.policy("b").optimizer, "state_of", broken)
        else:
            real = optimizer.adamw
            monkeypatch.setattr(
                optimizer, "adamw", lambda *a, **k: (broken if k["lr"] == PARAMS["b"].learning_rate else real)(*a, **k)
            )
        before = {} if where == "policy" else await tenants.state("b")
        mine, other = await tenants.updates("ab")
        assert isinstance(other, NotFound if where == "policy" else RuntimeError)
        async with tenants_of("a") as one:
            await one.gradients("a")
            assert await one.updates("a") == [mine]
            assert same(await tenants.state("a"), await one.state("a"))
        for key, tensor in before.items():
            if key.startswith("weight"):
                assert bool((tensor == (await tenants.state("b"))[key]).all())


async def test_an_adapter_waits_on_disk_with_a_gradient_that_is_not_applied_yet_and_its_critic(tmp_path):
    async def steps(tenants, others=""):
        mine = tenants.of("c")
        for step in range(3):
            await mine.forward_backward("p", rows("c", step), VALUE, f"v{step}")
            await mine.forward_backward("p", rows("c", step), LOSSES["c"], f"g{step}")
            for other in others:
                await tenants.gradients(other, step)
            if others:
                policy = tenants.policy("c")
                assert not any(p.numel() for _, p in policy.parameters)
                assert not policy.optimizer.adamw.state
            await mine.optim_step("p", PARAMS["c"], f"u{step}")
            await mine.optim_step("p", PARAMS["c"], f"uv{step}", "critic")
        await mine.save("p", tmp_path / str(len(others)), {"step": 3}, "s")
        values = await mine.forward("p", rows("c", 9), {"values", "old_logprobs"})
        return await tenants.state("c"), values

    async with tenants_of("c") as tenants:
        wanted, values = await steps(tenants)
    async with tenants_of("c", "a", "b", at_once=1) as tenants:
        found, numbers = await steps(tenants, "ab")
        folder = tenants.trainer._slots._folder
        assert len(list(folder.iterdir())) == 2
        await tenants.of("b").remove("p")
        assert len(list(folder.iterdir())) == 1
        for name in values:
            assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(numbers[name], values[name], strict=True))
    assert same(found, wanted)
    assert not folder.exists()
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / n / "step-000003").glob("*.safetensors")} for n in "02"
    ]
    assert files[0] == files[1]


def test_parked_moments_take_no_memory_and_come_back(monkeypatch, tmp_path):
    monkeypatch.setattr(optimizer, "_APART_BYTES", 0)
    parked, kept = Optimizer(weights_of()), Optimizer(weights_of())
    for each in (parked, kept):
        moments_step(each, 0)
    slots.park(parked, tmp_path, "policy")
    slots.let_go(parked)
    slots.unpark(parked, tmp_path, "policy")
    for each in (parked, kept):
        moments_step(each, 1)
    for (name, mine), (_, wanted) in zip(parked.parameters, kept.parameters, strict=True):
        assert torch.equal(mine, wanted), name


async def test_an_adapter_whose_files_are_damaged_is_refused_and_the_others_go_on():
    async with tenants_of("a", "b", "c", at_once=1) as tenants:
        parked = tenants.trainer._slots._outside["a/p"]
        file = next(parked.glob("policy-weight-*"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        (failure,) = await tenants.gradients("a")
        assert isinstance(failure, CheckpointError)
        assert "is gone or damaged" in str(failure)
        found = await tenants.gradients("ab", 1)
        assert isinstance(found[0], CheckpointError)
        assert found[1].rows == len(rows("b", 1))
