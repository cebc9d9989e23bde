"""Requests of several policies on one base, computed together as if each were alone; adapters that wait on disk."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.critic_losses import ClippedValueLoss
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import AdapterConfig, TrainerConfig
from palestra.errors import CheckpointError, InvalidAlgorithm, NotFound
from palestra.models.loading import LoadedModels
from palestra.models.mixed_adapters import MixedModel
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.merged import GradientRequest, UpdateRequest
from palestra.trainer.torch_trainer import TorchTrainer
from unit.trainer.test_critic import batch, same
from unit.trainer.test_torch_trainer import close

TINY = "tiny-random"
VALUE = LossSpec.of(ClippedValueLoss(clip=0.0))
SPECS = {
    "a": PolicySpec(model=TINY, adapter=AdapterConfig(rank=4, alpha=8.0), seed=3),
    "b": PolicySpec(model=TINY, adapter=AdapterConfig(rank=13, alpha=9.0, targets=["q_proj", "up_proj"]), seed=4),
    "c": PolicySpec(model=TINY, adapter=AdapterConfig(rank=1, alpha=4.0, rslora=True), seed=5, critic="states"),
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


@asynccontextmanager
async def trainer_of(*names: str, deterministic: bool = True, **config):
    settings = TrainerConfig.model_validate({"threads": 1, "dtype": "float32"} | config)
    trainer = TorchTrainer(settings, 2, LoadedModels(), deterministic)
    try:
        for name in names:
            await trainer.create(name, SPECS[name])
            await trainer.weights(name)  # which brings it into memory
            draw = torch.Generator().manual_seed(ord(name[0]))
            for key, parameter in trainer._policies[name].parameters:
                if "lora_B" in key:
                    parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
        yield trainer
    finally:
        await trainer.close()


def rows(name: str, step: int) -> list:
    """Another batch for each policy and step."""
    found = batch()[(step + len(name)) % 3 : 3 + ord(name[0]) % 4]
    return [replace(row, advantages=row.advantages * (1 + 0.1 * ord(name[0]) + step)) for row in found]


def gradient_of(name: str, step: int = 0) -> GradientRequest:
    return GradientRequest(policy=name, batch=rows(name, step), loss=LOSSES[name], request_id=f"g{step}")


def update_of(name: str, step: int = 0) -> UpdateRequest:
    return UpdateRequest(policy=name, params=PARAMS[name], request_id=f"u{step}")


async def state(trainer, name: str) -> dict[str, torch.Tensor]:
    """Weights, gradient and moments of a policy, which is brought into memory."""
    await trainer.weights(name)
    optimizer = trainer._policies[name].optimizer
    found = {f"weight {n}": p.detach().clone() for n, p in optimizer.parameters}
    found |= {f"gradient {n}": p.grad.clone() for n, p in optimizer.parameters if p.grad is not None}
    moments = optimizer.adamw.state
    return found | {f"{k} {n}": v.clone() for n, p in optimizer.parameters for k, v in moments.get(p, {}).items()}


async def alone(name: str, steps: int, **config):
    """Reports and state of a policy that has the trainer for itself."""
    async with trainer_of(name, **config) as trainer:
        reports = []
        for step in range(steps):
            request = gradient_of(name, step)
            reports.append(await trainer.forward_backward(name, request.batch, request.loss, request.request_id))
            reports.append(await trainer.optim_step(name, PARAMS[name], f"u{step}"))
        return reports, await state(trainer, name)


@pytest.mark.parametrize("config", [{}, {"micro_batch_tokens": 40}, {"logit_chunk": 3}, {"adapter_slots": 2}], ids=str)
async def test_gradients_and_reports_are_those_of_requests_of_their_own(config):
    async with trainer_of(*SPECS, deterministic=False, **config) as trainer:
        reports = await trainer.forward_backward_together([gradient_of(name) for name in SPECS])
        for name, found in zip(SPECS, reports, strict=True):
            async with trainer_of(name, **config) as one:
                wanted = await one.forward_backward(name, rows(name, 0), LOSSES[name], "g")
                gradients = {k: v for k, v in (await state(one, name)).items() if k.startswith("gradient")}
            mine = {k: v for k, v in (await state(trainer, name)).items() if k.startswith("gradient")}
            close(mine, gradients, 1e-5)
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
    async with trainer_of("a", "b", "c", deterministic=False, micro_batch_tokens=90) as trainer:
        found = await trainer.forward_backward_together([gradient_of(name) for name in "abc"])
    tokens = [report.forward_tokens for report in found]
    assert sum(seen) == sum(tokens)
    assert max(seen) <= 90
    assert len(seen) == 2


@pytest.mark.parametrize("slots", [None, *(pytest.param(slots, marks=pytest.mark.slow) for slots in (1, 2))])
async def test_twenty_steps_are_bit_for_bit_those_of_a_policy_alone(slots):
    """Beside others of other ranks, losses, learning rates and lengths, one of which is removed, others evicted."""
    steps = 20
    wanted = {name: await alone(name, steps) for name in "ab"}
    async with trainer_of(*SPECS, adapter_slots=slots) as trainer:
        found = {name: [] for name in SPECS}
        names = list(SPECS)
        for step in range(steps):
            if step == steps // 2:
                await trainer.remove("c")
                names.remove("c")
            order = names[step % len(names) :] + names[: step % len(names)]
            for requests, run in (
                ([gradient_of(name, step) for name in order], trainer.forward_backward_together),
                ([update_of(name, step) for name in order], trainer.optim_step_together),
            ):
                for name, report in zip(order, await run(requests), strict=True):
                    found[name].append(report)
            for name in names:
                await trainer.weights(name)
        for name, (reports, last) in wanted.items():
            assert [repr(one) for one in found[name]] == [repr(one) for one in reports]
            assert same(await state(trainer, name), last)
        assert (trainer._slots.evictions > steps) == (slots is not None)


async def test_a_request_that_fails_leaves_its_gradient_as_it_was_and_the_others_theirs():
    async with trainer_of("a", "b", "c", deterministic=False) as trainer:
        await trainer.forward_backward("b", rows("b", 5), LOSSES["b"], "before")
        before = await state(trainer, "b")
        wrong = [replace(row, advantages=np.full_like(row.advantages, np.nan)) for row in rows("b", 0)]
        requests = [gradient_of("a"), replace(gradient_of("b"), batch=wrong), gradient_of("c")]
        found = await trainer.forward_backward_together(requests)
        assert isinstance(found[1], InvalidAlgorithm)
        assert "not a number" in str(found[1])
        assert same(await state(trainer, "b"), before)
        again = await trainer.forward_backward_together([gradient_of("a"), gradient_of("b"), gradient_of("c")])
        assert (again[0], again[2]) == (found[0], found[2])  # the same answers; only `b` is computed
        assert again[1].rows == len(rows("b", 0))
        async with trainer_of("a") as one:
            await one.forward_backward("a", rows("a", 0), LOSSES["a"], "g")
            wanted = await state(one, "a")
        close(await state(trainer, "a"), wanted, 1e-5)


async def test_what_fails_together_is_computed_alone(monkeypatch):
    def broken(*_):
        raise RuntimeError("no room")

    async with trainer_of("a", "b", deterministic=False) as trainer:
        monkeypatch.setattr(MixedModel, "hidden", broken)
        found = await trainer.forward_backward_together([gradient_of("a"), gradient_of("b")])
        assert [report.rows for report in found] == [len(rows("a", 0)), len(rows("b", 0))]
        with pytest.raises(NotFound, match="no policy 'x'"):
            await trainer.forward_backward_together([gradient_of("a", 1), replace(gradient_of("b"), policy="x")])


async def test_updates_together_leave_out_a_gradient_that_is_not_finite():
    async with trainer_of("a", "b") as trainer:
        await trainer.forward_backward_together([gradient_of("a"), gradient_of("b")])
        trainer._policies["b"].parameters[3][1].grad[0, 0] = float("inf")
        before = await state(trainer, "b")
        found = await trainer.optim_step_together([update_of("a"), update_of("b")])
        assert [report.applied for report in found] == [True, False]
        after = await state(trainer, "b")
        assert same(after, {key: before[key] for key in after})
        assert (trainer.version("a").n, trainer.version("b").n) == (1, 0)
        assert await trainer.optim_step_together([update_of("a")]) == found[:1]
        assert trainer.version("a").n == 1


@pytest.mark.slow
async def test_an_adapter_waits_on_disk_with_a_gradient_that_is_not_applied_yet_and_its_critic(tmp_path):
    async def steps(trainer, others=()):
        for step in range(3):
            await trainer.forward_backward("c", rows("c", step), VALUE, f"v{step}")
            await trainer.forward_backward("c", rows("c", step), LOSSES["c"], f"g{step}")
            for other in others:
                await trainer.forward_backward_together([gradient_of(other, step)])
            if others:
                policy = trainer._policies["c"]
                assert not any(p.numel() for _, p in policy.parameters)
                assert not policy.optimizer.adamw.state
            await trainer.optim_step("c", PARAMS["c"], f"u{step}")
            await trainer.optim_step("c", PARAMS["c"], f"uv{step}", "critic")
        await trainer.save("c", tmp_path / str(len(others)), {"step": 3}, "s")
        values = await trainer.forward("c", rows("c", 9), {"values", "old_logprobs"})
        return await state(trainer, "c"), values

    async with trainer_of("c") as trainer:
        wanted, values = await steps(trainer)
    async with trainer_of("c", "a", "b", adapter_slots=1) as trainer:
        found, numbers = await steps(trainer, "ab")
        folder = trainer._slots._folder
        assert len(list(folder.iterdir())) == 2
        await trainer.remove("b")
        assert len(list(folder.iterdir())) == 1
        for name in values:
            assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(numbers[name], values[name], strict=True))
    assert same(found, wanted)
    assert not folder.exists()
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / n / "step-000003").glob("*.safetensors")} for n in "02"
    ]
    assert files[0] == files[1]


async def test_an_adapter_whose_files_are_damaged_is_refused_and_the_others_go_on():
    async with trainer_of("a", "b", "c", adapter_slots=1) as trainer:
        parked = trainer._slots._outside["a"]
        file = next(parked.glob("policy-weight-*"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(CheckpointError, match="is gone or damaged"):
            await trainer.forward_backward("a", rows("a", 0), LOSSES["a"], "g")
        found = await trainer.forward_backward_together([gradient_of("a"), gradient_of("b")])
        assert isinstance(found[0], CheckpointError)
        assert found[1].rows == len(rows("b", 0))
