"""Each loss of the Tinker API against its formula over the model of transformers: its value and its gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from palestra_bases.tinker import protobuf
from palestra_bases.tinker.datums import loss_without_gradient, output_of, read_batch
from palestra_bases.tinker.records import TinkerLimits
from unit.tinker.messages import batch_message, datum, logprobs_of
from unit.trainer.networks import networks, transformers_model
from unit.trainer.test_torch_trainer import close, gradients

VOCABULARY = 256


def ratio_of(p, q):
    return torch.exp(p - q)


def ppo(p, q, a, low=0.8, high=1.2):
    r = ratio_of(p, q)
    return -torch.minimum(r * a, torch.clamp(r, low, high) * a)


def gspo(p, q, a, mask, low=0.8, high=1.2):
    mean = ((p.detach() - q) * mask).sum() / mask.sum()
    r = torch.exp(mean + p - p.detach())
    return -torch.minimum(r * a, torch.clamp(r, low, high) * a)


FORMULAS = {
    "cross_entropy": lambda p, q, a, w: -w * p,
    "importance_sampling": lambda p, q, a, w: -ratio_of(p, q) * a,
    "ppo": lambda p, q, a, w: ppo(p, q, a),
    "ppo, other bounds": lambda p, q, a, w: ppo(p, q, a, 0.5, 3.0),
    "cispo": lambda p, q, a, w: -torch.clamp(ratio_of(p, q), 0.7, 1.1).detach() * p * a,
    "dro": lambda p, q, a, w: -(p * a - 0.5 * 0.05 * (p - q) ** 2),
    "dro, other beta": lambda p, q, a, w: -(p * a - 0.5 * 0.3 * (p - q) ** 2),
    "gspo": gspo,
    "gspo, other bounds": lambda p, q, a, w: gspo(p, q, a, w, 0.01, 100.0),
}
CONFIGS = {
    "ppo, other bounds": {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "dro, other beta": {"beta": 0.3},
    "gspo, other bounds": {"clip_low_threshold": 0.01, "clip_high_threshold": 100.0},
}


def some_data(loss: str):
    """Data with a common beginning, whose targets are any tokens, and whose first positions do not count."""
    draw = np.random.default_rng(1)
    prompt = draw.integers(0, VOCABULARY, 5).tolist()
    data = []
    for length in (4, 9, 1):
        tokens = [*prompt, *draw.integers(0, VOCABULARY, length)]
        n = len(tokens)
        targets = draw.integers(0, VOCABULARY, n)
        targets[:5] = 0
        counts = np.arange(n) >= 5
        if loss == "cross_entropy":
            inputs = {"weights": np.where(counts, draw.normal(0, 2, n), 0.0)}
        else:
            q = np.where(counts, -draw.exponential(5.5, n), 0.0)
            inputs = {"logprobs": q, "advantages": np.where(counts, draw.normal(0, 1, n), 0.0)}
            if loss == "gspo":  # also of a position without an advantage, and not of all that have one
                inputs["sequence_ratio_mask"] = (np.arange(n) >= 4) & (np.arange(n) != 6)
        data.append((tokens, targets.tolist(), inputs))
    return data


def computed(model, data, formula) -> tuple[list[np.ndarray], float, dict[str, torch.Tensor]]:
    """Logprobs, loss and gradients, one datum after another."""
    model.zero_grad(set_to_none=True)
    found, total = [], torch.zeros((), dtype=torch.float64)
    for tokens, targets, inputs in data:
        scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
        p = scores.gather(1, torch.tensor(targets)[:, None])[:, 0]
        given = {name: torch.tensor(np.asarray(values, np.float32)) for name, values in inputs.items()}
        loss = formula(
            p, given.get("logprobs"), given.get("advantages"), given.get("weights", given.get("sequence_ratio_mask"))
        )
        total = total + loss.double().sum()
        found.append(p.detach().numpy())
    total.backward()
    return found, float(total.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def reference():
    return transformers_model("sharp")


@pytest.mark.parametrize("case", FORMULAS)
async def test_a_loss_is_the_sum_of_its_formula_and_so_is_its_gradient(reference, case):
    name = case.split(",")[0]
    data = some_data(name)
    logprobs, loss, wanted = computed(reference, data, FORMULAS[case])
    message = batch_message([datum(t, g, **inputs) for t, g, inputs in data], name, CONFIGS.get(case))
    batch = read_batch(message, VOCABULARY, 100, TinkerLimits())
    async with networks() as trainer:
        before = await trainer.forward("policy", batch.rows, ["old_logprobs"])
        report = await trainer.forward_backward("policy", batch.rows, batch.loss, "1", logprobs=True)
        close(gradients(trainer), wanted, 1e-5)
    output = protobuf.parse("ForwardBackwardOutput", output_of(batch, report.logprobs, report.metrics["loss"]))
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert output.loss_fn_outputs[0].num_datums == len(data)
    for found, expected in zip(logprobs_of(output), logprobs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert loss_without_gradient(batch, before["old_logprobs"]) == pytest.approx(loss, rel=1e-5)


async def test_a_position_without_an_advantage_adds_nothing_whatever_its_logprob_says():
    tokens, targets = [3, 4, 5], [4, 5, 6]
    with_rubbish = datum(tokens, targets, logprobs=[-1e4, -2.0, -1e30], advantages=[0.0, 1.0, 0.0])
    plain = datum(tokens, targets, logprobs=[0.0, -2.0, 0.0], advantages=[0.0, 1.0, 0.0])
    found = []
    for one in (with_rubbish, plain):
        async with networks() as trainer:
            batch = read_batch(batch_message([one], "importance_sampling"), VOCABULARY, 100, TinkerLimits())
            report = await trainer.forward_backward("policy", batch.rows, batch.loss, "1")
            found.append((report.metrics["loss"], gradients(trainer)))
    assert math.isfinite(found[0][0])
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], gradient) for name, gradient in found[1][1].items())


async def test_gradients_of_two_requests_add_up(reference):
    data = some_data("cross_entropy")
    _, _, wanted = computed(reference, data, FORMULAS["cross_entropy"])
    async with networks() as trainer:
        for number, (tokens, targets, inputs) in enumerate(data):
            batch = read_batch(batch_message([datum(tokens, targets, **inputs)]), VOCABULARY, 100, TinkerLimits())
            await trainer.forward_backward("policy", batch.rows, batch.loss, str(number))
        close(gradients(trainer), wanted, 1e-5)


async def test_cross_entropy_without_weights_counts_every_position(reference):
    tokens, targets = [3, 4, 5], [9, 8, 7]
    _, loss, _ = computed(reference, [(tokens, targets, {"weights": [1.0, 1.0, 1.0]})], FORMULAS["cross_entropy"])
    async with networks() as trainer:
        batch = read_batch(batch_message([datum(tokens, targets)]), VOCABULARY, 100, TinkerLimits())
        report = await trainer.forward_backward("policy", batch.rows, batch.loss, "1")
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-5)


async def test_several_targets_of_a_position_are_each_weighed(reference):
    """As a student has that learns a teacher's likeliest tokens: -sum of w p over all targets, and its gradient."""
    draw = np.random.default_rng(3)
    wide = [(tokens, draw.integers(0, VOCABULARY, (len(tokens), 3))) for tokens, _, _ in some_data("cross_entropy")]
    weights = [draw.normal(0, 1, targets.shape) for _, targets in wide]
    columns = [
        (tokens, targets[:, k].tolist(), {"weights": w[:, k]})
        for (tokens, targets), w in zip(wide, weights, strict=True)
        for k in range(3)
    ]
    logprobs, loss, wanted = computed(reference, columns, FORMULAS["cross_entropy"])
    data = [datum(tokens, targets, weights=w) for (tokens, targets), w in zip(wide, weights, strict=True)]
    batch = read_batch(batch_message(data), VOCABULARY, 100, TinkerLimits())
    async with networks() as trainer:
        report = await trainer.forward_backward("policy", batch.rows, batch.loss, "1", logprobs=True)
        close(gradients(trainer), wanted, 1e-5)
    assert report.forward_tokens == len({tuple(t[: i + 1]) for t, _ in wide for i in range(len(t))}) + 3  # once each
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    record = protobuf.parse("ForwardBackwardOutput", output_of(batch, report.logprobs, loss)).loss_fn_outputs[0]
    assert (record.num_datums, list(record.fields["logprobs"].trailing_shape)) == (3, [3])
    found = np.frombuffer(record.fields["logprobs"].data, "<f4")
    expected = [np.stack(logprobs[first : first + 3], axis=1).ravel() for first in (0, 3, 6)]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-5, atol=1e-5)
