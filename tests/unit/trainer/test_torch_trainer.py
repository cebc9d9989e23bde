from __future__ import annotations

import asyncio
import copy
import gc
import math
import threading
import weakref
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LOSSES, Loss, LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.algorithms.policy_gradient import importance_weights
from palestra.config import TrainerConfig
from palestra.errors import CheckpointError
from palestra.models import device
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.models.loading import LoadedModels
from palestra.trainer import checkpoint
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.token_forward import LOGIT_CHUNK
from palestra.trainer.torch_policy import MICRO_BATCH_TOKENS, PolicyNetworks, TorchPolicy
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import PolicyVersion
from palestra.types.records import TrainSample
from unit.building import make_sample

pytestmark = pytest.mark.ci

LOSS = LossSpec.of(PPOClipLoss(clip_high_threshold=1.3))


def sharpen(model) -> None:
    """Random weights attend to everything alike; so that it matters who sees whom, queries and keys are made larger."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10.0 if "q_proj" in name or "k_proj" in name else 2.0)


def sharp_tiny():
    model = load_causal_lm("tiny-random", torch.float32)
    sharpen(model.model)
    return model


@pytest.fixture(scope="module")
def sharp_reference():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_folder("tiny-random"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    sharpen(model)
    return model


@asynccontextmanager
async def training(model=None, **config):
    settings = TrainerConfig.model_validate({"threads": 1, "dtype": "float32"} | config)
    loaded = (model or sharp_tiny(), load_tokenizer("tiny-random"))
    trainer = TorchTrainer(settings, 2, LoadedModels(lambda name, dtype, device: loaded))
    try:
        await trainer.create("policy", PolicySpec(model="tiny-random"))
        yield trainer
    finally:
        await trainer.close()


def parameters(trainer: TorchTrainer) -> list[tuple[str, torch.nn.Parameter]]:
    return trainer._policies["policy"].parameters


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in parameters(trainer) if p.grad is not None}


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in parameters(trainer)}


def batch_of_two_groups() -> list[TrainSample]:
    """Rows that share prompts, rows that fork inside what another sampled, a row of two turns, odd temperatures."""
    draw = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return draw.integers(0, 259, n).tolist()

    prompt, other = ids(11), ids(7)
    reply = ids(8)
    fork = [*prompt, *reply[:4], *ids(5)]  # four tokens that the first row sampled are context here
    turns = [*prompt, *ids(3), *ids(4), *ids(6)]

    def at_sampling(n: int) -> list[float]:
        return (-draw.exponential(5.5, n)).tolist()  # about what the random model itself says: ratios on both sides

    def sample(row, trained, advantage, weight, temperature=1.0, name="e"):
        return make_sample(row, trained, advantage, weight, at_sampling(len(trained)), temperature, name)

    return [
        sample([*prompt, *reply], range(11, 19), 1.5, 0.02),
        sample(fork, range(15, 20), -0.7, 0.05),
        sample(turns, [11, 12, 13, *range(18, 24)], 0.4, 0.03, temperature=0.7),
        sample([*prompt, *ids(2)], [12], -1.2, 0.1),
        sample([*other, *ids(9)], range(7, 16), 2.0, 0.01, temperature=1.4),
        sample([*other, *ids(1)], [7], -2.0, 0.2),
    ]


def flat(reference, samples: Sequence[TrainSample]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients and sums from plain rows, one by one, through transformers' own model and a loss written out here."""
    reference.zero_grad(set_to_none=True)
    total, entropy, gaps, ratios, clipped, count = 0.0, 0.0, [], 0.0, 0, 0
    for sample in samples:
        logits = reference(torch.tensor(sample.ids[None].astype(np.int64))).logits[0] / float(
            sample.temperatures[sample.loss_mask][0]
        )
        scores = torch.log_softmax(logits, dim=-1)
        loss = torch.zeros(())
        for t in np.flatnonzero(sample.loss_mask):
            row = scores[t - 1]
            ratio = torch.exp(row[int(sample.ids[t])] - float(sample.logprobs[t]))
            a, w = float(sample.advantages[t]), float(sample.loss_weights[t])
            limit = 1.3 if a > 0 else 0.8
            value = float(ratio.detach())
            outside = value > limit if a > 0 else value < limit
            loss = loss - w * a * (torch.tensor(limit) if outside else ratio)
            entropy += float(-(row.detach().exp() * row.detach()).sum())
            gaps.append(abs(float(row[int(sample.ids[t])].detach()) - float(sample.logprobs[t])))
            ratios += value
            clipped += outside
            count += 1
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    sums = {
        "loss": total,
        "entropy": entropy / count,
        "logprob_gap_mean": sum(gaps) / count,
        "logprob_gap_max": max(gaps),
        "ratio_mean": ratios / count,
        "clip_fraction": clipped / count,
    }
    return {name: p.grad.clone() for name, p in reference.named_parameters()}, sums


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every weight's gradient within `tolerance` of its norm."""
    assert found.keys() == wanted.keys()
    worst = max(float((found[name] - g).norm() / g.norm()) for name, g in wanted.items())
    assert worst <= tolerance


# The gradient


async def test_merged_rows_have_the_loss_and_gradient_of_plain_rows_in_transformers(sharp_reference):
    samples = batch_of_two_groups()
    wanted, sums = flat(sharp_reference, samples)
    assert 0 < sums["clip_fraction"] < 1
    async with training() as trainer:
        report = await trainer.forward_backward("policy", samples, LOSS, "1")
        close(gradients(trainer), wanted, 1e-5)
    for name, value in sums.items():
        assert report.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


async def test_what_was_seen_is_counted_exactly():
    samples = batch_of_two_groups()
    async with training() as trainer:
        report = await trainer.forward_backward("policy", samples, LOSS, "1")
    assert (report.rows, report.trained_tokens) == (6, 8 + 5 + 9 + 1 + 9 + 1)
    assert report.flat_tokens == 19 + 20 + 24 + 13 + 16 + 8
    assert report.forward_tokens == report.flat_tokens - 15 - 11 - 11 - 7


async def test_clipping_is_also_counted_of_the_tokens_that_the_present_policy_sampled():
    samples = batch_of_two_groups()
    async with training() as trainer:
        first = await trainer.forward_backward("policy", samples, LOSS, "1")
        assert first.metrics["clip_fraction_on_policy"] == first.metrics["clip_fraction"]  # all are of version 0.0
        older = [replace(s, versions=np.where(s.loss_mask[:, None], -1, s.versions)) for s in samples[1:]]
        mixed = await trainer.forward_backward("policy", [samples[0], *older], LOSS, "2")
        alone = await trainer.forward_backward("policy", samples[:1], LOSS, "3")
        assert mixed.metrics["clip_fraction_on_policy"] == alone.metrics["clip_fraction"]
        assert alone.metrics["clip_fraction"] != first.metrics["clip_fraction"]
        stale = await trainer.forward_backward("policy", older, LOSS, "4")
        assert math.isnan(stale.metrics["clip_fraction_on_policy"])


@pytest.mark.parametrize("mode", ["token-truncate", "token-mask", "sequence-truncate", "sequence-mask"])
async def test_importance_is_applied_once_in_each_epoch_beside_the_ratio_to_the_policy_before_the_step(
    sharp_reference, mode
):
    """Written out: w = pi_old / mu, fixed for the step; the clipped ratio is pi / pi_old, in the second epoch, too."""
    limit = 1.5
    async with training() as trainer:
        samples = [replace(s, episode_id=f"e{n}") for n, s in enumerate(batch_of_two_groups()[:3])]
        old = (await trainer.forward("policy", samples, {"old_logprobs"}))["old_logprobs"]
        noise = np.random.default_rng(1).normal(0, 0.8 if mode.startswith("token") else 0.4, 100).astype(np.float32)
        samples = [replace(s, logprobs=now + noise[: len(now)]) for s, now in zip(samples, old, strict=True)]
        found = importance_weights(samples, old, mode, limit).weights
        corrected = [
            replace(s, old_logprobs=before, loss_weights=s.loss_weights * w)
            for s, before, w in zip(samples, old, found, strict=True)
        ]
        await trainer.forward_backward("policy", corrected, LOSS, "first")
        await trainer.optim_step("policy", OptimParams(learning_rate=2e-2), "update")
        await trainer.forward_backward("policy", corrected, LOSS, "second")
        found, now_weights = gradients(trainer), weights(trainer)
    reference = copy.deepcopy(sharp_reference)
    reference.load_state_dict(now_weights, strict=False)
    total, clipped, bounded = torch.zeros(()), 0, 0
    for sample, before in zip(samples, old, strict=True):
        t = torch.tensor(np.flatnonzero(sample.loss_mask))
        ids = torch.tensor(sample.ids.astype(np.int64))
        scores = (reference(ids[None]).logits[0] / float(sample.temperatures[t[0]])).log_softmax(-1)
        pi, pi_old, mu = scores[t - 1, ids[t]], torch.tensor(before)[t], torch.tensor(sample.logprobs)[t]
        w = (pi_old - mu).exp() if mode.startswith("token") else (pi_old - mu).sum().exp().expand(len(t))
        outside = (w > limit) | ((w < 1 / limit) & mode.endswith("mask"))
        w = w.masked_fill(outside, 0.0 if mode.endswith("mask") else limit)
        ratio, a = (pi - pi_old).exp(), float(sample.advantages[t[0]])
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.3) * a)
        clipped, bounded = clipped + int((surrogate < ratio * a).sum()), bounded + int(outside.sum())
        total = total - (w * surrogate * float(sample.loss_weights[t[0]])).sum()
    total.backward()
    assert clipped > 0
    assert bounded > 0
    close(found, {name: p.grad for name, p in reference.named_parameters()}, 1e-4)


async def gradients_with(**config) -> dict[str, torch.Tensor]:
    async with training(**config) as trainer:
        report = await trainer.forward_backward("policy", batch_of_two_groups(), LOSS, "1")
        assert report.trained_tokens == 33
        return gradients(trainer)


@pytest.mark.parametrize("tokens", [1, 20, 40, 70])
async def test_how_the_batch_is_cut_into_micro_batches_does_not_matter(tokens):
    close(await gradients_with(micro_batch_tokens=tokens), await gradients_with(), 1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 32])
async def test_how_the_logits_are_cut_into_chunks_does_not_matter(chunk, monkeypatch):
    whole = await gradients_with()
    monkeypatch.setitem(LOGIT_CHUNK, "cpu", chunk)
    close(await gradients_with(), whole, 3e-6)


async def test_two_calls_add_their_gradients():
    samples = batch_of_two_groups()
    async with training() as trainer:
        await trainer.forward_backward("policy", samples[:3], LOSS, "1")
        await trainer.forward_backward("policy", samples[3:], LOSS, "2")
        close(gradients(trainer), await gradients_with(), 3e-6)


async def test_equal_batches_have_bit_identical_gradients():
    one, two = await gradients_with(), await gradients_with()
    assert all(torch.equal(one[name], two[name]) for name in one)


async def test_context_tokens_have_no_part_in_the_loss_whatever_stands_beside_them():
    """NaN logprobs, weights and advantages of positions that are not trained are never looked at."""
    samples = batch_of_two_groups()
    dirty = []
    for s in samples:
        advantages, weights_ = s.advantages.copy(), s.loss_weights.copy()
        advantages[~s.loss_mask] = weights_[~s.loss_mask] = np.nan
        dirty.append(replace(s, advantages=advantages, loss_weights=weights_))
    async with training() as trainer:
        await trainer.forward_backward("policy", dirty, LOSS, "1")
        found = gradients(trainer)
    wanted = await gradients_with()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


async def test_rows_without_anything_to_train_change_nothing():
    samples = batch_of_two_groups()
    empty = replace(samples[0], loss_mask=np.zeros_like(samples[0].loss_mask))
    async with training() as trainer:
        report = await trainer.forward_backward("policy", [empty], LOSS, "1")
        assert (report.trained_tokens, report.metrics["loss"], report.metrics["logprob_gap_max"]) == (0, 0.0, 0.0)
        assert all(not g.any() for g in gradients(trainer).values())


async def test_bf16_compute_gives_nearly_the_gradient_of_float32(monkeypatch):
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: True)  # slowly, if need be
    exact, rounded = [
        await gradients_with(model=load_causal_lm("tiny-random", torch.float32), dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]
    a, b = (torch.cat([g[name].flatten() for name in sorted(g)]) for g in (exact, rounded))
    assert all(g.dtype == torch.float32 for g in rounded.values())
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.995
    assert 0.9 < float(b.norm() / a.norm()) < 1.1
    assert not torch.equal(a, b)


async def test_a_batch_that_failed_in_the_middle_and_is_sent_again_counts_once(monkeypatch):
    """The first micro-batch's gradient must not be in it twice."""
    calls = 0

    @dataclass(frozen=True)
    class BreaksOnce(Loss):
        metrics = PPOClipLoss.metrics

        def __call__(self, inputs):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("out of memory")
            return PPOClipLoss(clip_high_threshold=1.3)(inputs)

    monkeypatch.setitem(LOSSES, "breaks-once", BreaksOnce)
    breaks_once = LossSpec(name="breaks-once")
    samples = batch_of_two_groups()
    async with training(micro_batch_tokens=20) as trainer:
        with pytest.raises(RuntimeError, match="of memory"):
            await trainer.forward_backward("policy", samples, breaks_once, "1")
        await trainer.forward_backward("policy", samples, breaks_once, "1")
        close(gradients(trainer), await gradients_with(), 1e-5)


# The update


async def test_an_update_is_adamw_on_the_clipped_gradient():
    """Against AdamW written out (Loshchilov & Hutter, algorithm 2), three steps, in float64."""
    settings = {"betas": (0.8, 0.9), "epsilon": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5}
    rates = [1e-3, 5e-4, 2e-3]
    async with training() as trainer:
        wanted = {name: w.double() for name, w in weights(trainer).items()}
        first = {name: torch.zeros_like(w) for name, w in wanted.items()}
        second = {name: torch.zeros_like(w) for name, w in wanted.items()}
        for number, rate in enumerate(rates, 1):
            await trainer.forward_backward("policy", batch_of_two_groups(), LOSS, f"g{number}")
            grads = {name: g.double() for name, g in gradients(trainer).items()}
            norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
            params = OptimParams(learning_rate=rate, **settings)
            report = await trainer.optim_step("policy", params, f"u{number}")
            assert report.grad_norm == pytest.approx(norm, rel=1e-5)
            assert (report.learning_rate, report.applied) == (rate, True)
            for name, g in grads.items():
                g = g * min(1.0, 0.5 / (norm + 1e-6))
                first[name] = 0.8 * first[name] + 0.2 * g
                second[name] = 0.9 * second[name] + 0.1 * g**2
                step = first[name] / (1 - 0.8**number)
                step = step / ((second[name] / (1 - 0.9**number)).sqrt() + 1e-6)
                decay = 0.1 if g.ndim >= 2 else 0.0  # norms and biases do not decay
                wanted[name] = wanted[name] * (1 - rate * decay) - rate * step
            assert gradients(trainer) == {}
        assert norm > 0.5  # it was clipped
        for name, found in weights(trainer).items():
            assert float((found.double() - wanted[name]).abs().max()) < 2e-6, name


async def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported():
    async with training() as trainer:
        before = weights(trainer)
        bad = batch_of_two_groups()[:1]
        bad[0].loss_weights[12] = np.inf
        await trainer.forward_backward("policy", bad, LOSS, "1")
        report = await trainer.optim_step("policy", OptimParams(learning_rate=1e-3), "2")
        assert not report.applied
        assert trainer.version("policy") == PolicyVersion(0, 0)
        assert all(torch.equal(before[name], w) for name, w in weights(trainer).items())
        assert gradients(trainer) == {}


async def test_a_repeated_request_is_answered_and_not_done_again():
    samples = batch_of_two_groups()
    async with training() as trainer:
        first, again = await asyncio.gather(*(trainer.forward_backward("policy", samples, LOSS, "g") for _ in range(2)))
        assert first == again
        close(gradients(trainer), await gradients_with(), 3e-6)
        one, two = [await trainer.optim_step("policy", OptimParams(learning_rate=1e-3), "u") for _ in range(2)]
        assert one == two
        assert trainer.version("policy").n == 1


# Checkpoints


async def step(trainer: TorchTrainer, number: int) -> None:
    samples = batch_of_two_groups()[number % 3 :]
    await trainer.forward_backward("policy", samples, LOSS, f"gradient {number}")
    await trainer.optim_step("policy", OptimParams(learning_rate=1e-3), f"update {number}")
    await trainer.weights("policy")


def everything(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's moments."""
    found = weights(trainer)
    for name, parameter in parameters(trainer):
        for key, value in trainer._policies["policy"].optimizer.adamw.state[parameter].items():
            found[f"{key} {name}"] = value.clone()
    return found


@pytest.mark.parametrize("stop_after", [1, 2])
async def test_going_on_from_a_checkpoint_is_bit_identical_to_never_stopping(tmp_path, stop_after):
    async with training() as trainer:
        for number in range(3):
            await step(trainer, number)
        wanted, version = everything(trainer), trainer.version("policy")
    async with training() as trainer:
        for number in range(stop_after):
            await step(trainer, number)
        await trainer.save("policy", tmp_path, {"step": stop_after, "seen": [1, "x"]}, "save")
    async with training() as trainer:
        state = await trainer.load("policy", tmp_path)
        assert (state["step"], state["seen"]) == (stop_after, [1, "x"])
        assert trainer.version("policy") == PolicyVersion(0, stop_after)
        for number in range(stop_after, 3):
            await step(trainer, number)
        found = everything(trainer)
        assert trainer.version("policy") == version
    assert found.keys() == wanted.keys()
    assert len(found) == 4 * len(weights(trainer))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


async def test_saving_changes_nothing_for_the_run_that_goes_on(tmp_path):
    async with training() as trainer:
        await step(trainer, 0)
        await step(trainer, 1)
        wanted = everything(trainer)
    async with training() as trainer:
        await step(trainer, 0)
        await trainer.save("policy", tmp_path, {"step": 1}, "save")
        await step(trainer, 1)
        found = everything(trainer)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


async def test_equal_runs_write_equal_checkpoints_whatever_random_numbers_others_drew(tmp_path):
    for number in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            async with training() as trainer:
                await step(trainer, 0)
                await trainer.save("policy", tmp_path / str(number), {"step": 1}, "save")
    one, two = (
        {file.name: file.read_bytes() for file in (tmp_path / str(number) / "step-000001").iterdir()}
        for number in range(2)
    )
    assert one == two


async def test_optimizer_state_is_put_where_its_parameter_is(tmp_path):
    """A checkpoint is read on the CPU, and parameters may be elsewhere: here on the meta device, and in float64."""
    async with training() as trainer:
        await step(trainer, 0)
        wanted = everything(trainer)
        await trainer.save("policy", tmp_path, {"step": 1}, "save")
    async with training() as trainer:
        moved, optimizer = {}, trainer._policies["policy"].optimizer.adamw
        for number, (name, parameter) in enumerate(list(parameters(trainer))):
            if number in (0, 1, 2):  # matrices, and in both of the optimizer's groups one parameter stays
                placed = parameter.double() if number == 2 else parameter.to("meta")
                moved[parameter] = torch.nn.Parameter(placed.detach())
                parameters(trainer)[number] = (name, moved[parameter])
        for group in optimizer.param_groups:
            group["params"] = [moved.get(parameter, parameter) for parameter in group["params"]]
        await trainer.load("policy", tmp_path)
        for name, parameter in parameters(trainer):
            state = optimizer.state[parameter]
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert {tensor.device for tensor in state.values()} == {parameter.device}  # fused: `step`, too
            assert state["step"].dtype == torch.float32
            for key in ("exp_avg", "exp_avg_sq"):
                assert state[key].dtype == parameter.dtype
                if parameter.device.type == "cpu":
                    assert torch.equal(state[key].float(), wanted[f"{key} {name}"])


async def test_a_checkpoint_without_its_optimizer_is_whole_and_moments_begin_anew(tmp_path):
    async with training() as trainer:
        await step(trainer, 0)
        path = await trainer.save("policy", tmp_path, {"step": 1}, "save")
        wanted = weights(trainer)
    checkpoint.without_optimizer(path)
    assert not list(path.glob("*optimizer*"))
    async with training() as trainer:
        assert (await trainer.load("policy", tmp_path))["step"] == 1
        assert all(torch.equal(wanted[name], value) for name, value in weights(trainer).items())
        assert not trainer._policies["policy"].optimizer.adamw.state
        await step(trainer, 1)


async def test_incarnations_are_part_of_a_checkpoint(tmp_path):
    async with training() as trainer:
        await step(trainer, 0)
        trainer.begin_incarnation("policy", 3)
        assert trainer.version("policy") == PolicyVersion(3, 1)
        await trainer.save("policy", tmp_path, {"step": 1}, "save")
    async with training() as trainer:
        await trainer.load("policy", tmp_path)
        assert trainer.version("policy") == PolicyVersion(3, 1)


async def test_the_checkpoint_loads_in_transformers_with_the_same_weights(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    async with training() as trainer:
        await step(trainer, 0)
        path = await trainer.save("policy", tmp_path, {"step": 1}, "save")
        wanted = weights(trainer)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert {name: torch.equal(p, wanted[name]) for name, p in loaded.named_parameters()} == dict.fromkeys(wanted, True)
    assert AutoTokenizer.from_pretrained(path).chat_template
    ids = torch.tensor([[1, 2, 3]])
    assert loaded(ids).logits.shape == (1, 3, 259)


async def test_without_a_checkpoint_nothing_is_loaded(tmp_path):
    async with training() as trainer:
        before = weights(trainer)
        assert await trainer.load("policy", tmp_path) is None
        assert all(torch.equal(before[name], w) for name, w in weights(trainer).items())


async def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    async with training() as trainer:
        await step(trainer, 0)
        await trainer.save("policy", tmp_path, {"step": 1}, "1")
        wanted = everything(trainer)
        await step(trainer, 1)
        path = await trainer.save("policy", tmp_path, {"step": 2}, "2")
    for file in ("model.safetensors", "optimizer-0.safetensors"):
        whole = (path / file).read_bytes()
        (path / file).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        async with training() as trainer:
            assert (await trainer.load("policy", tmp_path))["step"] == 1
            found = everything(trainer)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        (path / file).write_bytes(whole)


async def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from palestra.models.causal_lm import CausalLM

    async with training() as trainer:
        await trainer.save("policy", tmp_path, {"step": 1}, "1")
    config = AutoConfig.from_pretrained(model_folder("tiny-random"), num_hidden_layers=3)
    async with training(
        CausalLM(AutoModelForCausalLM.from_config(config, attn_implementation="palestra_flat"))
    ) as trainer:
        with pytest.raises(CheckpointError, match="another model"):
            await trainer.load("policy", tmp_path)


async def test_the_trainers_thread_ends_with_its_work_and_with_it_what_openmp_keeps_for_it():
    async with training() as trainer:
        await trainer.forward_backward("policy", [make_sample([1, 2, 3], [2])], LOSS, "1")
        while any(thread.name == "palestra-trainer" for thread in threading.enumerate()):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_layers_that_are_computed_again_give_the_same_gradient_with_less_in_memory(dtype):
    batch, found, kept = batch_of_two_groups(), [], []
    for again in (False, True):
        async with training(activation_checkpointing=again, dtype=dtype) as trainer:
            saved = [0]

            def count(tensor, saved=saved):
                saved[0] += tensor.nbytes
                return tensor

            policy = trainer._policies["policy"]
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                policy.forward_backward(batch, LOSS)
            found.append(gradients(trainer))
            kept.append(saved[0])
    assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())
    assert kept[1] < 0.7 * kept[0]


async def test_weights_of_a_removed_policy_are_freed_without_a_collection_by_chance(monkeypatch):
    trainer, threads, start = TorchTrainer(TrainerConfig(threads=1), 2, LoadedModels()), [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.append(thread) or start(thread))
    gc.disable()
    try:
        await trainer.create("policy", PolicySpec(model="tiny-random"))
        weight = weakref.ref(trainer._policies["policy"].parameters[0][1])
        for thread in threads:  # what a thread keeps for itself alone goes with it, a little after its work
            thread.join()
        await trainer.remove("policy")
        assert weight() is None
    finally:
        gc.enable()
        await trainer.close()


def test_a_policy_whose_weights_are_on_another_device_than_computes_has_the_defaults_of_that_one():
    networks = PolicyNetworks(model=sharp_tiny(), tokenizer=load_tokenizer("tiny-random"))
    made = TorchPolicy(networks, TrainerConfig(), device=torch.device("cuda"))
    assert (made.micro_batch_tokens, made._forward._size) == (MICRO_BATCH_TOKENS["cuda"], LOGIT_CHUNK["cuda"])
    made.close()
