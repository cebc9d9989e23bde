"""A reference policy, the penalty of divergence from it and the bonus of entropy, against transformers' own models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.errors import ConfigError
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.token_forward import LOGIT_CHUNK
from unit.building import make_sample
from unit.trainer.networks import load, networks, transformers_model
from unit.trainer.test_torch_trainer import batch_of_two_groups, close, gradients, weights

pytestmark = pytest.mark.ci

LOSS = LossSpec.of(PPOClipLoss(clip_low_threshold=0.8, clip_high_threshold=1.3))


async def with_reference(trainer, samples):
    found = await trainer.forward("policy", samples, {"reference_logprobs"})
    return [replace(s, reference_logprobs=r) for s, r in zip(samples, found["reference_logprobs"], strict=True)]


def own_scores(model, sample) -> torch.Tensor:
    """[T, V] log-probabilities at the trained positions of a row, at its temperature."""
    places = np.flatnonzero(sample.loss_mask)
    logits = model(torch.tensor(sample.ids[None].astype(np.int64))).logits[0]
    return torch.log_softmax(logits / float(sample.temperatures[places[0]]), dim=-1)[torch.tensor(places - 1)]


def chosen(model, sample) -> torch.Tensor:
    ids = torch.tensor(sample.ids[sample.loss_mask].astype(np.int64))
    return own_scores(model, sample).gather(1, ids[:, None])[:, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_reference_is_the_policy_at_the_start_bit_by_bit_and_stays(dtype):
    samples = batch_of_two_groups()
    async with networks(reference="sharp", dtype=dtype) as trainer:
        both = await trainer.forward("policy", samples, {"old_logprobs", "reference_logprobs"})
        for ours, theirs in zip(both["old_logprobs"], both["reference_logprobs"], strict=True):
            assert np.array_equal(ours, theirs, equal_nan=True)
        await trainer.forward_backward("policy", samples, LOSS, "g")
        await trainer.optim_step("policy", OptimParams(learning_rate=1e-2), "u")
        later = await trainer.forward("policy", samples, {"old_logprobs", "reference_logprobs"})
        for first, now, moved in zip(
            both["reference_logprobs"], later["reference_logprobs"], later["old_logprobs"], strict=True
        ):
            assert np.array_equal(first, now, equal_nan=True)
            assert not np.array_equal(first, moved, equal_nan=True)


async def test_another_model_as_the_reference_says_what_it_says_in_transformers():
    samples = batch_of_two_groups()
    own = transformers_model("tiny")
    for tokens in (1, 40, None):
        async with networks(reference="tiny", micro_batch_tokens=tokens) as trainer:
            for sample in await with_reference(trainer, samples):
                wanted = chosen(own, sample).detach().numpy()
                np.testing.assert_allclose(sample.reference_logprobs[sample.loss_mask], wanted, atol=1e-5)
                assert np.array_equal(np.isnan(sample.reference_logprobs), ~sample.loss_mask)


async def test_without_a_reference_none_is_kept_and_its_logprobs_are_refused():
    async with networks() as trainer:
        assert trainer._policies["policy"]._frozen == {}
        with pytest.raises(ConfigError, match=r"compute.*reference_logprobs"):
            await trainer.forward("policy", batch_of_two_groups(), {"reference_logprobs"})
        with pytest.raises(ConfigError, match="`reference_logprobs`"):
            await trainer.forward_backward(
                "policy", batch_of_two_groups(), LOSS.model_copy(update={"kl_coefficient": 0.1}), "g"
            )


async def test_a_reference_with_another_tokenizer_or_fewer_tokens_is_refused():
    from palestra.config import TrainerConfig
    from palestra.models.loading import LoadedModels
    from palestra.trainer.torch_trainer import TorchTrainer

    class OtherTokenizer:
        def get_vocab(self):
            return {"a": 0}

    def loads(name, dtype, device):
        model, tokenizer = load(name, dtype, device)
        if name == "smaller":
            model.vocab_size = 100
        return model, OtherTokenizer() if name == "other" else tokenizer

    trainer = TorchTrainer(TrainerConfig(threads=1), 2, LoadedModels(loads))
    with pytest.raises(ConfigError, match="'other' has"):
        await trainer.create("policy", PolicySpec(model="tiny", reference="other"))
    with pytest.raises(ConfigError, match=r"'smaller'.*100.*259"):
        await trainer.create("policy", PolicySpec(model="tiny", reference="smaller"))
    await trainer.create("policy", PolicySpec(model="tiny"))  # nothing was kept of the policy that was refused
    await trainer.close()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("chunk", [7, 2048])
async def test_penalty_and_bonus_have_the_gradient_that_is_written_out(estimator, chunk, monkeypatch):
    samples = batch_of_two_groups()
    spec = LOSS.model_copy(update={"kl_coefficient": 0.3, "kl_estimator": estimator, "entropy_coefficient": 0.05})
    own, reference = transformers_model("sharp"), transformers_model("tiny")
    total, terms, entropies = torch.zeros(()), [], []
    for sample in samples:
        scores, now = own_scores(own, sample), chosen(own, sample)
        x = now - chosen(reference, sample).detach()
        kl = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[estimator]
        entropy = -(scores.exp() * scores).sum(-1)
        ratio = torch.exp(now - torch.tensor(sample.logprobs[sample.loss_mask]))
        a = torch.tensor(sample.advantages[sample.loss_mask])
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.3) * a)
        losses = -surrogate + 0.3 * kl - 0.05 * entropy
        total = total + (losses * torch.tensor(sample.loss_weights[sample.loss_mask])).sum()
        terms.append(kl.detach())
        entropies.append(entropy.detach())
    total.backward()
    monkeypatch.setitem(LOGIT_CHUNK, "cpu", chunk)
    async with networks(reference="tiny") as trainer:
        report = await trainer.forward_backward("policy", await with_reference(trainer, samples), spec, "g")
        close(gradients(trainer), {name: p.grad for name, p in own.named_parameters()}, 2e-5)
    assert report.metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert report.metrics[f"reference_kl_{estimator}"] == pytest.approx(float(torch.cat(terms).mean()), rel=1e-4)
    assert report.metrics["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)


async def test_with_coefficients_of_zero_both_are_measured_and_the_gradient_is_that_of_the_loss_alone():
    samples = batch_of_two_groups()
    async with networks(reference="tiny") as trainer:
        plain = await trainer.forward_backward("policy", samples, LOSS, "1")
        alone = gradients(trainer)
        await trainer.optim_step("policy", OptimParams(learning_rate=1e-9), "u")
    assert not any(name.startswith("reference") for name in plain.metrics)
    async with networks(reference="tiny") as trainer:
        report = await trainer.forward_backward("policy", await with_reference(trainer, samples), LOSS, "1")
        found = gradients(trainer)
    assert all(torch.equal(found[name], g) for name, g in alone.items())
    assert report.metrics["reference_kl_k3"] > 0
    assert report.metrics["entropy"] == plain.metrics["entropy"]
    assert report.metrics["sampling_kl"] > 0


async def test_divergence_from_the_sampling_policy_is_zero_for_what_was_sampled_by_the_present_one():
    samples = batch_of_two_groups()
    async with networks() as trainer:
        now = (await trainer.forward("policy", samples, {"old_logprobs"}))["old_logprobs"]
        exact = [replace(s, logprobs=n) for s, n in zip(samples, now, strict=True)]
        report = await trainer.forward_backward("policy", exact, LOSS, "g")
        assert report.metrics["sampling_kl"] == 0.0
        shifted = [replace(s, logprobs=n + np.float32(0.1)) for s, n in zip(samples, now, strict=True)]
        report = await trainer.forward_backward("policy", shifted, LOSS, "h")
        assert report.metrics["sampling_kl"] == pytest.approx(np.exp(-0.1) - 1 + 0.1, rel=1e-4)


@pytest.mark.parametrize("tokens", [1, 20, 70])
async def test_with_penalties_it_does_not_matter_how_the_batch_is_cut(tokens):
    spec = LOSS.model_copy(update={"kl_coefficient": 0.3, "entropy_coefficient": 0.05})
    found = []
    for size in (tokens, None):
        async with networks(reference="tiny", micro_batch_tokens=size) as trainer:
            rows = await with_reference(trainer, batch_of_two_groups())
            await trainer.forward_backward("policy", rows, spec, "g")
            found.append(gradients(trainer))
    close(found[0], found[1], 1e-5)


async def test_entropy_alone_makes_a_policy_more_random():
    row = make_sample([1, 2, 3, 4, 5, 6], [3, 4, 5], advantage=0.0, weight=1 / 3)
    spec = LOSS.model_copy(update={"entropy_coefficient": 1.0})
    async with networks() as trainer:
        entropies = []
        for number in range(5):
            report = await trainer.forward_backward("policy", [row], spec, f"g{number}")
            entropies.append(report.metrics["entropy"])
            await trainer.optim_step("policy", OptimParams(learning_rate=3e-3), f"u{number}")
        assert entropies == sorted(entropies)
        assert entropies[-1] > entropies[0] + 0.01
        assert all(torch.isfinite(w).all() for w in weights(trainer).values())
