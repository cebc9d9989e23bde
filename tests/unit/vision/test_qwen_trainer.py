"""The trainer with models whose tokens have positions in the plane: packed rows, gradients, the engine beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palestra.config import TINY_QWEN_VL
from palestra.models.catalog import model_folder
from palestra.models.loading import LoadedModels
from palestra.trainer.packing import pack
from palestra.trainer.token_forward import flat_hidden, flat_inputs, flat_positions
from palestra.types.calls import PolicyVersion, TokenSequence
from unit.engine.calling import serving
from unit.vision.seeing import Shown, noise, renderer_of, seeing, transformers_model, user
from unit.vision.test_engine import conversation
from unit.vision.test_trainer import LOSS, UPDATE, own_loss, sample_of, some_rows, training

NAME = TINY_QWEN_VL


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["trained", "frozen"])
async def test_gradients_are_those_of_transformers_for_rows_with_pictures_in_common(qwen, vision):
    shown = Shown()
    rows = some_rows(shown, qwen)
    reference = transformers_model(model_folder(qwen))
    reference.zero_grad()
    own_loss(reference, rows, shown, qwen).backward()
    wanted = dict(reference.named_parameters())
    scale = max(float(weight.grad.abs().max()) for weight in wanted.values() if weight.grad is not None)
    async with training(shown, vision, qwen) as mine:
        report = await mine.forward_backward("policy", rows, LOSS, "r")
        model = mine._policies["policy"].model
    assert report.forward_tokens < report.flat_tokens  # the picture that two rows begin with is computed once
    trained = model.own_parameters()
    assert any(".visual." in name for name, _ in trained) == (vision == "trained")
    for name, weight in trained:
        assert (weight.grad - wanted[name].grad).abs().max() < 1e-4 * scale, name
    if vision == "trained":
        towers = [float(wanted[name].grad.abs().max()) for name, _ in trained if ".visual." in name]
        assert max(towers) > 1e-3 * scale


def test_nodes_that_rows_share_have_the_positions_of_each_of_them():
    """Pictures of several sizes, rows that part behind a picture and within a text, and a row without any."""
    shown = Shown()
    parts = [shown.add(noise(*size)) for size in ((60, 60), (64, 16), (20, 60))]
    renderer, model, rows = renderer_of(shown, NAME), seeing(shown, name=NAME), []
    for order in [(0, 1, 2), (0, 1, "x"), (0, 2, 2), ("y",), (1, 0)]:
        prompt = renderer.render([user("look", *(k if isinstance(k, str) else parts[k] for k in order), "so")])
        rows.append(sample_of(prompt, np.arange(len(prompt.ids)) > 20, np.full(len(prompt.ids), -5.0), str(order)))
    with torch.inference_mode():
        (micro,) = pack(rows, 4096)
        ids, places, _ = flat_inputs(micro.trees, model.device)
        positions = flat_positions(model, micro, places)
        together = flat_hidden(model, micro)
        assert len(ids) < sum(len(row.ids) for row in rows)
        for row, (_, offset, path) in zip(rows, micro.samples, strict=True):
            own = model.positions(TokenSequence(row.ids, row.media)).expand(3, -1)
            assert torch.equal(positions[:, path + offset], own)
            (alone,) = pack([row], 4096)
            assert torch.allclose(flat_hidden(model, alone), together[path + offset], atol=1e-5)


@pytest.mark.slow
async def test_one_row_of_ten_turns_has_the_logprobs_that_were_sampled(qwen):
    shown = Shown()
    async with serving(seeing(shown, name=qwen)) as engine:
        calls = await conversation(engine, shown, 10, qwen)
        last, completion, _ = calls[-1]
        ids = np.concatenate((last.ids, np.array(completion, np.int32)))
        scored = [np.nan, *await engine.score("policy", TokenSequence(ids, last.media))]
    trained = np.zeros(len(ids), bool)
    for prompt, sampled, _ in calls:
        trained[len(prompt.ids) : len(prompt.ids) + len(sampled)] = True
    row = sample_of(TokenSequence(ids, last.media), trained, np.array(scored))
    async with training(shown, model=qwen) as mine:
        report = await mine.forward_backward("policy", [row], LOSS, "r")
    assert report.trained_tokens == 60
    assert report.rows == 1
    assert report.metrics["logprob_gap_max"] < 1e-4


@pytest.mark.slow
async def test_in_bfloat16_the_trainer_rounds_pictures_as_the_engine_does(qwen, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)  # no processor computes in float32
    shown = Shown()
    row = some_rows(shown, qwen)[1]
    sampler = LoadedModels(pictures=shown).own(qwen, torch.bfloat16, torch.device("cpu"), "trained")[0]
    async with serving(sampler, dtype="bfloat16") as engine:
        scored = np.array([np.nan, *await engine.score("policy", TokenSequence(row.ids, row.media))])
    async with training(shown, "trained", qwen, dtype="bfloat16") as mine:
        (found,) = (await mine.forward("policy", [row], ["old_logprobs"]))["old_logprobs"]
    async with training(shown, "trained", qwen) as exact:
        (wanted,) = (await exact.forward("policy", [row], ["old_logprobs"]))["old_logprobs"]
    trained = row.loss_mask
    gap, rounding = np.abs(found - scored)[trained].max(), np.abs(wanted - scored)[trained].max()
    assert gap < 0.3 * rounding
    assert 0 < rounding < 0.05


@pytest.mark.slow
async def test_new_weights_of_the_tower_reach_the_engine(qwen):
    shown = Shown()
    rows = some_rows(shown, qwen)
    sampler = LoadedModels(pictures=shown).own(qwen, torch.float32, torch.device("cpu"), "trained")[0]
    prompt, trained = TokenSequence(rows[1].ids, rows[1].media), rows[1].loss_mask
    async with training(shown, "trained", qwen) as mine, serving(sampler) as engine:
        before = await engine.score("policy", prompt)
        await mine.forward_backward("policy", rows, LOSS, "r")
        await mine.optim_step("policy", UPDATE, "s")
        await engine.sync_weights("policy", PolicyVersion(0, 1), await mine.weights("policy"))
        after = await engine.score("policy", prompt)
        (found,) = (await mine.forward("policy", [rows[1]], ["old_logprobs"]))["old_logprobs"]
    assert np.abs(found - np.array([np.nan, *after]))[trained].max() < 1e-4
    assert np.abs(found - np.array([np.nan, *before]))[trained].max() > 1e-3
