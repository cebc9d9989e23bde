"""A critic of replies: its values and gradient against transformers' own, and the folder that transformers loads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import ValueGradientLoss
from palestra.errors import ConfigError
from palestra.trainer.base import OptimParams
from palestra.trainer.checkpoint import FOLDER_OF_REWARDS, link_model
from palestra.trainer.critic import check_classifier
from unit.trainer.networks import networks, transformers_model
from unit.trainer.test_critic import critic_of, critic_state, same
from unit.trainer.test_torch_trainer import batch_of_two_groups

LOSS = LossSpec.of(ValueGradientLoss())


def set_head(trainer) -> torch.Tensor:
    head = critic_of(trainer)._net._head
    assert head.bias is None
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(5)))
    return head.weight.detach().clone()


def batch() -> list:
    """Rows of which only the last trained token has a target."""
    draw, rows = np.random.default_rng(7), []
    for row in batch_of_two_groups():
        returns = np.full(len(row.ids), np.nan, np.float32)
        last = int(np.flatnonzero(row.loss_mask)[-1])
        returns[last] = draw.normal()
        rows.append(replace(row, returns=returns, loss_mask=row.loss_mask & np.isfinite(returns)))
    return rows


async def test_values_and_gradient_are_those_of_transformers_on_the_same_ids():
    model, rows = transformers_model("sharp"), batch()
    async with networks(critic="replies") as trainer:
        weight = set_head(trainer).requires_grad_(True)
        found = await trainer.forward("policy", rows, {"action_values"})
        await trainer.forward_backward("policy", rows, LOSS, "g")
        gradients = {name: p.grad.clone() for name, p in critic_of(trainer).optimizer.parameters}
    total = torch.zeros(())
    for row, column in zip(rows, found["action_values"], strict=True):
        last = int(np.flatnonzero(row.loss_mask)[-1])
        hidden = model.model(torch.tensor(row.ids[None].astype(np.int64))).last_hidden_state[0, last]
        value = (hidden @ weight.T)[0]
        assert column[last] == pytest.approx(float(value.detach()), abs=1e-4)
        total = total + float(row.loss_weights[last]) * float(row.returns[last]) * value
    total.backward()
    torch.testing.assert_close(gradients["value_head.weight"], weight.grad, rtol=1e-4, atol=1e-5)
    own = {f"body.{name}": parameter for name, parameter in model.model.named_parameters()}
    assert own.keys() == gradients.keys() - {"value_head.weight"}
    for name, parameter in own.items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


async def test_transformers_loads_the_classifier_of_a_checkpoint_and_so_does_the_trainer(tmp_path):
    from transformers import AutoModelForSequenceClassification

    async with networks(critic="replies") as trainer:
        set_head(trainer)
        await trainer.forward_backward("policy", batch(), LOSS, "g")
        await trainer.optim_step("policy", OptimParams(learning_rate=1e-3), "u", "critic")
        path, state = await trainer.save("policy", tmp_path, {"step": 3}, "s"), critic_state(trainer)
        wanted = await trainer.forward("policy", batch(), {"action_values"})
    classifier = AutoModelForSequenceClassification.from_pretrained(path / FOLDER_OF_REWARDS)
    for row, column in zip(batch(), wanted["action_values"], strict=True):
        last = int(np.flatnonzero(row.loss_mask)[-1])
        with torch.no_grad():
            score = classifier(torch.tensor(row.ids[None, : last + 1].astype(np.int64))).logits
        assert score.shape == (1, 1)
        assert float(score) == pytest.approx(float(column[last]), abs=1e-4)
    async with networks(critic="replies") as other:
        assert await other.load("policy", tmp_path) == {"step": 3} | {"incarnation": 0, "n": 0}
        assert same(critic_state(other), state)
    link_model(tmp_path, 3, tmp_path / "model")
    assert not (tmp_path / "model" / FOLDER_OF_REWARDS).exists(), "a policy that begins with these weights has no use"


def test_a_model_without_a_classifier_is_refused():
    class Other:
        config = object()

    with pytest.raises(ConfigError, match="with object"):
        check_classifier(Other())
