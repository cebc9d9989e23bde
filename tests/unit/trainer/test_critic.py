"""The critic: its values and gradient against transformers' own model, its checkpoint, and what it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.gae import chains_of, generalized_advantages
from palestra.algorithms.loss import LossSpec, ValueInputs
from palestra.algorithms.losses import ClippedValueLoss, PPOClipLoss
from palestra.errors import ConfigError
from palestra.trainer.base import CRITIC_METRICS, OptimParams
from palestra.trainer.checkpoint import link_model
from palestra.types.calls import PolicyVersion
from unit.algorithms.test_gae import played
from unit.building import make_sample
from unit.trainer.networks import networks, transformers_model
from unit.trainer.test_torch_trainer import batch_of_two_groups, close, gradients, weights

LOSS = LossSpec.of(PPOClipLoss(clip_low_threshold=0.8, clip_high_threshold=1.3))
VALUE = LossSpec.of(ClippedValueLoss(clip=0.0))
PARAMS = OptimParams(learning_rate=1e-3)


def critic_of(trainer):
    return trainer._policies["policy"]._critic


def set_head(trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights of the value head, which starts with zeros."""
    head = critic_of(trainer)._net._head
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=draw))
        head.bias.fill_(0.5)
    return head.weight.detach().clone(), head.bias.detach().clone()


def batch() -> list:
    draw = np.random.default_rng(7)
    return [
        replace(
            s,
            values=draw.normal(size=len(s.ids)).astype(np.float32),
            returns=draw.normal(size=len(s.ids)).astype(np.float32),
        )
        for s in batch_of_two_groups()
    ]


def own_values(model, weight, bias, sample) -> torch.Tensor:
    """[N] values after each token of a row."""
    hidden = model.model(torch.tensor(sample.ids[None].astype(np.int64))).last_hidden_state[0]
    return (hidden @ weight.T + bias)[:, 0]


def critic_weights(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in critic_of(trainer).optimizer.parameters}


def critic_state(trainer) -> dict[str, torch.Tensor]:
    """Weights and moments."""
    found, optimizer = critic_weights(trainer), critic_of(trainer).optimizer
    for name, parameter in optimizer.parameters:
        found |= {f"{key} {name}": v.clone() for key, v in optimizer.adamw.state[parameter].items()}
    return found


def same(one, two) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


async def test_at_first_every_value_is_zero():
    async with networks(critic="states") as trainer:
        found = await trainer.forward("policy", batch(), {"values", "next_values"})
    for name in ("values", "next_values"):
        for sample, row in zip(batch(), found[name], strict=True):
            assert np.array_equal(row[sample.loss_mask], np.zeros(sample.loss_mask.sum()))
            assert np.array_equal(np.isnan(row), ~sample.loss_mask)


@pytest.mark.parametrize("tokens", [1, 40, None])
async def test_values_are_of_the_states_before_and_after_each_token(tokens):
    own = transformers_model("sharp")
    async with networks(critic="states", micro_batch_tokens=tokens) as trainer:
        weight, bias = set_head(trainer)
        found = await trainer.forward("policy", batch(), {"values", "next_values"})
    for sample, before, after in zip(batch(), found["values"], found["next_values"], strict=True):
        wanted = own_values(own, weight, bias, sample).detach().numpy()
        places = np.flatnonzero(sample.loss_mask)
        np.testing.assert_allclose(before[places], wanted[places - 1], atol=1e-4)
        np.testing.assert_allclose(after[places], wanted[places], atol=1e-4)


@pytest.mark.parametrize("clip", [0.0, 0.4])
async def test_the_gradient_is_that_of_the_squared_error_written_out(clip):
    own, samples = transformers_model("sharp"), batch()
    async with networks(critic="states") as trainer:
        weight, bias = set_head(trainer)
        spec = LossSpec.of(ClippedValueLoss(clip=clip))
        report = await trainer.forward_backward("policy", samples, spec, "g")
        found = {name: p.grad.clone() for name, p in critic_of(trainer).optimizer.parameters}
        assert gradients(trainer) == {}
    weight.requires_grad_(), bias.requires_grad_()
    total, errors, clipped = torch.zeros(()), [], 0
    for sample in samples:
        values = own_values(own, weight, bias, sample)
        for t in np.flatnonzero(sample.loss_mask):
            v, old, r = values[t - 1], float(sample.values[t]), float(sample.returns[t])
            loss = (v - r) ** 2
            if clip:
                bounded = (min(max(v, torch.tensor(old - clip)), torch.tensor(old + clip)) - r) ** 2
                clipped += bool(bounded > loss)
                loss = torch.maximum(loss, bounded)
            total = total + float(sample.loss_weights[t]) * loss / 2
            errors.append(abs(float(v.detach()) - r))
    total.backward()
    wanted = {f"body.{name}": p.grad for name, p in own.model.named_parameters()}
    close(found, wanted | {"value_head.weight": weight.grad, "value_head.bias": bias.grad}, 1e-4)
    assert report.metrics.keys() == {m.name for m in (*CRITIC_METRICS, *ClippedValueLoss.metrics)}
    assert report.metrics["critic_loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert report.metrics["critic_error_mean"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert report.metrics["critic_clip_fraction"] == pytest.approx(clipped / len(errors))
    assert (clipped > 0) == (clip > 0)


@pytest.mark.parametrize("tokens", [1, 20, 70])
async def test_how_the_batch_is_cut_and_ordered_does_not_matter(tokens):
    found = []
    for size, samples in ((tokens, batch()[::-1]), (None, batch())):
        async with networks(critic="states", micro_batch_tokens=size) as trainer:
            set_head(trainer)
            await trainer.forward_backward("policy", samples, VALUE, "g")
            found.append({name: p.grad.clone() for name, p in critic_of(trainer).optimizer.parameters})
    close(found[0], found[1], 1e-5)


def test_a_value_that_moved_further_than_its_clip_has_no_gradient_where_that_would_help_it():
    """Written out: R = 1, V_old = 0, clip 0.2; V = 0.5 has moved enough, V = -0.5 may come back."""
    values = torch.tensor([[0.5], [-0.5], [0.1]], requires_grad=True)
    found = ClippedValueLoss(clip=0.2)(ValueInputs(values=values, old_values=torch.zeros(3), returns=torch.ones(3)))
    torch.testing.assert_close(found.loss.detach(), torch.tensor([0.8**2 / 2, 1.5**2 / 2, 0.9**2 / 2]))
    found.loss.sum().backward()
    torch.testing.assert_close(values.grad[:, 0], torch.tensor([0.0, -1.5, -0.9]))
    assert found.metrics["critic_clip_fraction"].values.tolist() == [1.0, 0.0, 0.0]


async def test_the_critics_update_leaves_the_policy_bit_by_bit_as_it_is_and_the_other_way_round():
    async with networks(critic="states") as trainer:
        policy, critic = weights(trainer), critic_weights(trainer)
        await trainer.forward_backward("policy", batch(), VALUE, "v")
        assert (await trainer.optim_step("policy", PARAMS, "uv", "critic")).applied
        assert same(weights(trainer), policy)
        assert not same(critic_weights(trainer), critic)
        assert trainer.version("policy") == PolicyVersion(0, 0)
        critic = critic_weights(trainer)
        await trainer.forward_backward("policy", batch(), LOSS, "g")
        await trainer.optim_step("policy", PARAMS, "u")
        assert same(critic_weights(trainer), critic)
        assert not same(weights(trainer), policy)
        assert trainer.version("policy") == PolicyVersion(0, 1)


async def test_the_policy_is_trained_to_the_same_bits_with_a_critic_beside_it():
    found = []
    for critic in (None, "states"):
        async with networks(critic=critic) as trainer:
            if critic:
                await trainer.forward_backward("policy", batch(), VALUE, "v")
            await trainer.forward_backward("policy", batch(), LOSS, "g")
            await trainer.optim_step("policy", PARAMS, "u")
            found.append(weights(trainer))
    assert same(*found)


async def step(trainer, number: int) -> None:
    await trainer.forward_backward("policy", batch()[number % 3 :], VALUE, f"v{number}")
    await trainer.optim_step("policy", PARAMS, f"uv{number}", "critic")
    await trainer.forward_backward("policy", batch()[number % 3 :], LOSS, f"g{number}")
    await trainer.optim_step("policy", PARAMS, f"u{number}")
    await trainer.weights("policy")


async def test_going_on_from_a_checkpoint_is_bit_identical_to_never_stopping(tmp_path):
    async with networks(critic="states") as trainer:
        for number in range(3):
            await step(trainer, number)
        wanted, policy = critic_state(trainer), weights(trainer)
    async with networks(critic="states") as trainer:
        await step(trainer, 0)
        await step(trainer, 1)
        await trainer.save("policy", tmp_path, {"step": 2}, "s")
    async with networks(critic="states") as trainer:
        assert (await trainer.load("policy", tmp_path))["step"] == 2
        await step(trainer, 2)
        assert same(critic_state(trainer), wanted)
        assert same(weights(trainer), policy)
    link_model(tmp_path, 2, tmp_path / "model")
    assert not list((tmp_path / "model").glob("critic*"))  # a model to sample from has no critic


async def test_a_checkpoint_without_a_critic_is_refused_where_there_is_one(tmp_path):
    from palestra.errors import CheckpointError

    async with networks() as trainer:
        await trainer.save("policy", tmp_path, {"step": 1}, "s")
    async with networks(critic="states") as trainer:
        with pytest.raises(CheckpointError, match=r"weight.*body\."):
            await trainer.load("policy", tmp_path)


async def test_without_a_critic_its_loss_and_its_update_are_refused():
    async with networks() as trainer:
        with pytest.raises(ConfigError, match="next_values"):
            await trainer.forward("policy", batch(), {"values", "next_values"})
        with pytest.raises(ConfigError, match=r"'value-clip'.*critic"):
            await trainer.forward_backward("policy", batch(), VALUE, "g")
        with pytest.raises(ConfigError, match="no critic"):
            await trainer.optim_step("policy", PARAMS, "u", "critic")


@pytest.mark.slow
@pytest.mark.parametrize("decay", [1.0, 0.9])
async def test_a_chain_of_three_states_has_the_values_that_are_known(decay):
    """Rewards 0, 0, 1 and a discount of 0.9: V = 0.81, 0.9, 1."""
    trajectory, rows = played([("agent", 1)] * 3, step_rewards=(0.0, 0.0, 1.0))
    rows = [make_sample([1, 20 + n, 2, 10], [3], weight=1 / 3, name=row.episode_id) for n, row in enumerate(rows)]
    rows = [replace(row, calls=np.where(row.loss_mask, n, -1).astype(np.int32)) for n, row in enumerate(rows)]
    chains = chains_of(trajectory, dict(enumerate(rows)), "step", 0.9)
    async with networks(model="tiny", critic="states") as trainer:
        for number in range(80):
            now = await trainer.forward("policy", rows, {"values", "next_values"})
            found = generalized_advantages(
                chains, rows, now["values"], now["next_values"], discount=0.9, decay=decay, level="token"
            )
            told = [
                replace(row, values=v, returns=r) for row, v, r in zip(rows, now["values"], found.returns, strict=True)
            ]
            await trainer.forward_backward("policy", told, VALUE, f"g{number}")
            await trainer.optim_step("policy", OptimParams(learning_rate=3e-3), f"u{number}", "critic")
        now = await trainer.forward("policy", rows, {"values"})
    np.testing.assert_allclose([v[3] for v in now["values"]], [0.81, 0.9, 1.0], atol=0.05)
