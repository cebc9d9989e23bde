"""Twin values of actions, the copy that follows them, and the choices of a grammar."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import TwinValueLoss
from palestra.errors import ConfigError
from palestra.tokens import choice_rows
from palestra.trainer.base import OptimParams
from palestra.types.calls import SamplingParams
from palestra.types.records import TrainSample
from unit.building import make_chat
from unit.trainer.networks import networks, transformers_model
from unit.trainer.test_critic import critic_of, critic_state, same
from unit.trainer.test_torch_trainer import batch_of_two_groups, close

TWIN = LossSpec.of(TwinValueLoss())
OUTPUTS = ("action_values", "target_action_values")
MOVES = 'start: "0" | "1" | "23" | "24"\n'


def batch() -> list[TrainSample]:
    draw = np.random.default_rng(7)
    return [replace(s, returns=draw.normal(size=len(s.ids)).astype(np.float32)) for s in batch_of_two_groups()]


def own_values(net, sample, body) -> torch.Tensor:
    """[N, 2] values after each token of a row, by transformers' own model."""
    hidden = body.model(torch.tensor(sample.ids[None].astype(np.int64))).last_hidden_state[0]
    return hidden @ net._head.weight.T + net._head.bias


async def test_values_are_the_smaller_ones_of_two_different_heads_after_each_token():
    own = transformers_model("sharp")
    async with networks(critic="actions") as trainer:
        net = critic_of(trainer)._net
        found = await trainer.forward("policy", batch(), set(OUTPUTS))
        assert not torch.equal(net._head.weight[0], net._head.weight[1])
        for sample, values, copied in zip(batch(), *(found[name] for name in OUTPUTS), strict=True):
            wanted = own_values(net, sample, own).detach().amin(dim=1).numpy()
            np.testing.assert_allclose(values[sample.loss_mask], wanted[sample.loss_mask], atol=1e-4)
            np.testing.assert_array_equal(copied, values)  # at first both are the same
            assert np.isnan(values[~sample.loss_mask]).all()
        with pytest.raises(ConfigError, match="compute values"):
            await trainer.forward("policy", batch(), {"values"})


async def test_the_gradient_is_that_of_both_squared_errors_written_out():
    own = transformers_model("sharp")
    async with networks(critic="actions") as trainer:
        report = await trainer.forward_backward("policy", batch(), TWIN, "g")
        found = {name: p.grad.clone() for name, p in critic_of(trainer).optimizer.parameters}
        net = critic_of(trainer)._net
        net._head.zero_grad()
        total = torch.zeros(())
        for sample in batch():
            values = own_values(net, sample, own)
            for t in np.flatnonzero(sample.loss_mask):
                error = values[t] - float(sample.returns[t])
                total = total + float(sample.loss_weights[t]) * (error**2).sum() / 2
        total.backward()
        wanted = {f"body.{name}": p.grad for name, p in own.model.named_parameters()}
        wanted |= {f"value_head.{name}": p.grad for name, p in net._head.named_parameters()}
    close(found, wanted, 1e-4)
    assert report.metrics["critic_loss"] == pytest.approx(float(total.detach()), rel=1e-4)


async def test_the_copy_moves_by_its_rate_after_each_update_and_comes_back_from_a_checkpoint(tmp_path):
    async with networks(critic="actions") as trainer:
        critic = critic_of(trainer)
        for number, rate in enumerate((0.25, 1.0, 0.5)):
            before = [p.detach().clone() for _, p in critic._target.named_parameters()]
            await trainer.forward_backward("policy", batch(), TWIN, f"g{number}")
            params = OptimParams(learning_rate=1e-2, target_rate=rate)
            await trainer.optim_step("policy", params, f"u{number}", "critic")
            for old, (_, copy), (_, new) in zip(
                before, critic._target.named_parameters(), critic.optimizer.parameters, strict=True
            ):
                torch.testing.assert_close(copy.detach(), old + rate * (new.detach() - old))
        await trainer.save("policy", tmp_path, {"step": 1}, "s")
        state, copied = critic_state(trainer), [p.detach().clone() for _, p in critic._target.named_parameters()]
        values = await trainer.forward("policy", batch(), set(OUTPUTS))
    async with networks(critic="actions") as other:
        await other.load("policy", tmp_path)
        assert same(critic_state(other), state)
        found = [p.detach() for _, p in critic_of(other)._target.named_parameters()]
        assert all(torch.equal(one, two) for one, two in zip(found, copied, strict=True))
        again = await other.forward("policy", batch(), set(OUTPUTS))
    for name in OUTPUTS:
        for one, two in zip(values[name], again[name], strict=True):
            np.testing.assert_array_equal(one, two)


async def test_an_update_that_is_skipped_leaves_the_copy_as_it_is():
    async with networks(critic="actions") as trainer:
        critic = critic_of(trainer)
        await trainer.forward_backward("policy", batch(), TWIN, "g1")
        await trainer.optim_step("policy", OptimParams(learning_rate=1e-2, target_rate=0.0), "u1", "critic")
        before = [p.detach().clone() for _, p in critic._target.named_parameters()]
        broken = [replace(row, returns=np.full(len(row.ids), np.inf, np.float32)) for row in batch()]
        await trainer.forward_backward("policy", broken, TWIN, "g2")
        report = await trainer.optim_step("policy", OptimParams(learning_rate=1e-2, target_rate=0.5), "u2", "critic")
        assert not report.applied
        found = [p.detach() for _, p in critic._target.named_parameters()]
        assert all(torch.equal(one, two) for one, two in zip(found, before, strict=True))


async def test_choices_are_all_ways_of_sampling_a_reply_and_their_probabilities_add_up_to_one():
    async with networks() as trainer:
        tokenizer = trainer._policies["policy"]._tokenizer
        choices = await trainer.choices("policy", MOVES, 8, 64)
        texts = [tokenizer.decode([t for t in choice if t != tokenizer.eos_token_id]) for choice in choices]
        assert sorted(set(texts)) == ["0", "1", "23", "24"]
        assert all(choice[-1] == tokenizer.eos_token_id for choice in choices)
        assert len(set(choices)) == len(choices)
        params = SamplingParams(temperature=0.7, max_tokens=8, seed=0, grammar=MOVES)
        chat = make_chat(completion=choices[2], prompt=(5, 6, 7), sampling=params)
        rows = choice_rows(chat, choices, "e")
        found = (await trainer.forward("policy", rows, {"old_logprobs"}))["old_logprobs"]
        log_pi = [column[row.loss_mask].sum() for row, column in zip(rows, found, strict=True)]
        assert float(np.exp(log_pi).sum()) == pytest.approx(1.0, abs=1e-5)
        report = await trainer.forward_backward(
            "policy",
            [replace(row, old_logprobs=column) for row, column in zip(rows, found, strict=True)],
            LossSpec(name="importance_sampling"),
            "g",
        )
        # What was not sampled was not recorded: it has no gap between engine and trainer.
        given = rows[2].loss_mask
        gap = np.abs(found[2][given] - chat.logprobs[: int(given.sum())])
        assert report.metrics["logprob_gap_mean"] == pytest.approx(float(gap.mean()), rel=1e-4)
        assert report.metrics["logprob_gap_max"] == pytest.approx(float(gap.max()), rel=1e-4)
        assert report.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


async def test_a_reply_that_is_cut_is_a_choice_and_too_many_are_refused():
    async with networks() as trainer:
        eos = trainer._policies["policy"]._tokenizer.eos_token_id
        assert all(len(choice) == 1 and choice[0] != eos for choice in await trainer.choices("policy", MOVES, 1, 64))
        with pytest.raises(ConfigError, match="3 replies"):
            await trainer.choices("policy", MOVES, 8, 3)
        with pytest.raises(ConfigError, match=r"50.*replies"):
            await trainer.choices("policy", "start: /[0-9]+/\n", 30, 50)
