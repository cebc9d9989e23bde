"""Losses over whole episodes: how a batch is packed, cut and ordered does not matter. Losses that are no numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LOSSES, Loss, LossOutput, LossSpec
from palestra.algorithms.losses import GSPOLoss
from palestra.errors import InvalidAlgorithm
from palestra.trainer.gradient import SequenceMeans
from palestra.trainer.packing import pack
from palestra.trainer.token_forward import columns_of
from unit.trainer.test_torch_trainer import batch_of_two_groups, close, gradients, sharp_tiny, training, weights

GSPO = LossSpec.of(GSPOLoss(clip_low_threshold=0.95, clip_high_threshold=1.05))


def episodes():
    """Six rows of three episodes, whose logprobs at sampling are near the model's."""
    names = ["a", "a", "b", "c", "b", "c"]
    return [replace(sample, episode_id=name) for sample, name in zip(batch_of_two_groups(), names, strict=True)]


async def near_the_model(samples):
    """The samples with logprobs at sampling that are near the model's, as those of a policy that is a little older."""
    async with training() as trainer:
        found = (await trainer.forward("policy", samples, {"old_logprobs"}))["old_logprobs"]
    draw = np.random.default_rng(1)
    moved = [column + draw.normal(0, 0.3, column.shape).astype(np.float32) for column in found]
    return [replace(s, logprobs=np.where(s.loss_mask, m, np.nan)) for s, m in zip(samples, moved, strict=True)]


async def gspo(samples, **config):
    async with training(**config) as trainer:
        report = await trainer.forward_backward("policy", samples, GSPO, "g")
        return gradients(trainer), report.metrics


def same(found, wanted):
    """Every weight's gradient within 1e-5 of its norm, which is float32's rounding here, and equal metrics."""
    (a, of_a), (b, of_b) = found, wanted
    close(a, b, 1e-5)
    for name in ("loss", "ratio_mean", "clip_fraction"):
        assert of_a[name] == pytest.approx(of_b[name], abs=1e-6)


async def test_the_gradient_is_that_of_the_formula_on_whole_sequences():
    samples = await near_the_model(episodes())
    model = sharp_tiny()
    async with training(model) as trainer:
        named = dict(trainer._policies["policy"].parameters)
        logprobs = []
        policy = trainer._policies["policy"]
        (micro,) = pack(samples, 10_000)
        with torch.enable_grad():
            targets = columns_of(micro, torch.device("cpu"))
            found, _ = policy._forward(micro, targets)
            start = 0
            total = torch.zeros(())
            parts: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
            for sample in samples:
                stop = start + int(sample.loss_mask.sum())
                column = found[start:stop] - torch.from_numpy(sample.logprobs[sample.loss_mask])
                parts.setdefault(sample.episode_id, []).append(
                    (column, targets["advantages"][start:stop], targets["loss_weights"][start:stop])
                )
                logprobs.append(column)
                start = stop
            for of_episode in parts.values():
                ratios, advantages, shares = (torch.cat(columns) for columns in zip(*of_episode, strict=True))
                # GSPO-token: the value of the sequence's ratio, and the gradient of the token's.
                s = (ratios.mean().detach() + ratios - ratios.detach()).exp()
                surrogate = torch.min(s * advantages, s.clamp(0.95, 1.05) * advantages)
                total = total - (surrogate * shares).sum()
        total.backward()
        wanted = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
    found_gradients, metrics = await gspo(samples)
    assert metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-6)
    assert 0 < metrics["clip_fraction"] < 1
    close(found_gradients, wanted, 1e-5)


@pytest.mark.parametrize("tokens", [1, 20, 40])
async def test_how_the_batch_is_cut_into_micro_batches_does_not_matter(tokens):
    samples = await near_the_model(episodes())
    assert len(pack(samples, tokens)) > 1
    same(await gspo(samples, micro_batch_tokens=tokens), await gspo(samples, micro_batch_tokens=10_000))


async def test_the_order_of_rows_does_not_matter():
    samples = await near_the_model(episodes())
    same(await gspo(samples[::-1], micro_batch_tokens=20), await gspo(samples))


async def test_an_episode_that_is_cut_into_more_rows_is_the_same_episode():
    """The second half of a row's tokens is trained in a row of its own, as where a later call forked there."""
    samples = await near_the_model(episodes())
    whole = samples[0]
    first, second = (np.zeros_like(whole.loss_mask) for _ in range(2))
    places = np.flatnonzero(whole.loss_mask)
    first[places[:3]], second[places[3:]] = True, True
    cut = [
        replace(
            whole,
            loss_mask=mask,
            logprobs=np.where(mask, whole.logprobs, np.nan),
            advantages=np.where(mask, whole.advantages, np.float32(0)),
            loss_weights=np.where(mask, whole.loss_weights, np.float32(0)),
        )
        for mask in (first, second)
    ]
    same(await gspo([*cut, *samples[1:]], micro_batch_tokens=20), await gspo(samples))


async def test_only_micro_batches_with_a_part_of_an_episode_go_through_the_model_once_more():
    samples = [replace(sample, episode_id=str(n)) for n, sample in enumerate(batch_of_two_groups())]
    assert SequenceMeans(pack(samples, 1)).split == []
    means = SequenceMeans(pack(episodes(), 1))
    assert {sample.episode_id for micro in means.split for sample, _, _ in micro.samples} >= {"b", "c"}
    assert all(len(micro.samples) < 6 for micro in means.split)
    assert SequenceMeans(pack(episodes(), 10_000)).split == []


@pytest.mark.parametrize("wrong", ["nan", "shape"])
async def test_a_loss_that_is_no_number_ends_the_step_with_the_rows_named_and_weights_as_before(monkeypatch, wrong):
    @dataclass(frozen=True)
    class Broken(Loss):
        def __call__(self, inputs):
            values = inputs.logprobs * torch.where(inputs.advantages > 1.9, float("nan"), 1.0)
            return LossOutput(loss=values.sum() if wrong == "shape" else values, metrics={})

    Broken.name = "broken"
    monkeypatch.setitem(LOSSES, "broken", Broken)
    samples = [replace(sample, episode_id=f"episode-{n}") for n, sample in enumerate(batch_of_two_groups())]
    async with training(micro_batch_tokens=20) as trainer:
        before = weights(trainer)
        said = r"'broken'.*NaN.*9.*7.*episode-4"
        if wrong == "shape":
            said = r"'broken'.*numbers"
        with pytest.raises(InvalidAlgorithm, match=said):
            await trainer.forward_backward("policy", samples, LossSpec(name="broken"), "1")
        assert gradients(trainer) == {}
        assert all(torch.equal(w, before[name]) for name, w in weights(trainer).items())
