from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LossSpec
from palestra.config import TrainerConfig
from palestra.errors import ModelError
from palestra.models.loading import LoadedModels
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.packing import pack
from palestra.trainer.token_forward import flat_hidden
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import PolicyVersion, TokenSequence
from palestra.types.records import TrainSample
from unit.engine.calling import serving
from unit.vision.seeing import NAME, Shown, noise, own_logits, renderer_of, seeing, transformers_model, user
from unit.vision.test_engine import conversation

CONFIG = TrainerConfig(dtype="float32", micro_batch_tokens=4096, threads=1)
LOSS = LossSpec(name="cross_entropy")
UPDATE = OptimParams(learning_rate=1e-2)


def sample_of(sequence: TokenSequence, trained: np.ndarray, logprobs: np.ndarray, episode: str = "e") -> TrainSample:
    count = len(sequence.ids)
    return TrainSample(
        episode_id=episode,
        policy="policy",
        ids=sequence.ids,
        media=sequence.media,
        loss_mask=trained,
        logprobs=np.where(trained, logprobs, np.nan).astype(np.float32),
        versions=np.zeros((count, 2), np.int32),
        calls=np.where(trained, 0, -1).astype(np.int32),
        temperatures=np.ones(count, np.float32),
        advantages=np.zeros(count, np.float32),
        loss_weights=np.where(trained, 0.5 + np.arange(count) % 3, 0.0).astype(np.float32),
    )


def some_rows(shown: Shown, name: str = NAME) -> list[TrainSample]:
    """Three rows: two begin with the same picture and go on with different ones; another picture of the same size."""
    renderer, rows = renderer_of(shown, name), []
    parts = [shown.add(noise(40, 60, seed=seed)) for seed in range(3)]
    for number, order in enumerate([(0, 1), (0, 2, 2), (1, 0)]):
        prompt = renderer.render([user("look", *(parts[k] for k in order))])
        ids = np.concatenate((prompt.ids, np.arange(40 + number, 50 + number, dtype=np.int32)))
        trained = np.arange(len(ids)) >= len(prompt.ids)
        logprobs = np.full(len(ids), -5.0)
        rows.append(sample_of(TokenSequence(ids, prompt.media), trained, logprobs, f"e{number}"))
    return rows


def own_loss(model, rows, shown: Shown, name: str = NAME) -> torch.Tensor:
    """The cross entropy, -sum(weight * logprob), by transformers' model row for row."""
    total = torch.zeros(())
    for row in rows:
        logits = own_logits(model, row.ids.tolist(), [shown.images[span.digest] for span in row.media], name)
        chosen = logits.log_softmax(-1)[range(len(row.ids) - 1), row.ids[1:].tolist()]
        factor = torch.from_numpy(row.loss_weights)[1:]
        total = total - (chosen * factor).sum()
    return total


@asynccontextmanager
async def training(shown: Shown, vision: str | None = None, model: str = NAME, dtype: str = "float32"):
    made = TorchTrainer(CONFIG.model_copy(update={"dtype": dtype}), 2, LoadedModels(pictures=shown))
    try:
        await made.create("policy", PolicySpec(model=model, vision=vision))
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize("vision", ["trained", "frozen"])
async def test_gradients_are_those_of_transformers_for_rows_with_pictures_in_common(vision):
    shown = Shown()
    rows = some_rows(shown)
    reference = transformers_model()
    reference.zero_grad()
    own_loss(reference, rows, shown).backward()
    wanted = dict(reference.named_parameters())
    scale = max(float(weight.grad.abs().max()) for weight in wanted.values() if weight.grad is not None)
    async with training(shown, vision) as mine:
        report = await mine.forward_backward("policy", rows, LOSS, "r")
        model = mine._policies["policy"].model
    assert report.forward_tokens < report.flat_tokens  # the picture that two rows begin with is computed once
    trained = model.own_parameters()
    assert any("vision_model" in name for name, _ in trained) == (vision == "trained")
    assert any("text_model" in name for name, _ in trained)
    for name, weight in trained:
        assert (weight.grad - wanted[name].grad).abs().max() < 1e-4 * scale, name
    if vision == "frozen":
        assert all(weight.grad is None for name, weight in model.named_parameters() if model.vision.owns(name))
    else:
        assert float(wanted["model.connector.modality_projection.proj.weight"].grad.abs().max()) > 1e-3 * scale


@pytest.mark.parametrize(("vision", "computed"), [("trained", 6), ("frozen", 3)])
async def test_a_picture_is_computed_once_a_pass_or_once_for_all_where_the_tower_is_frozen(vision, computed):
    shown = Shown()
    rows = some_rows(shown)
    async with training(shown, vision) as mine:
        for request in "ab":
            await mine.forward_backward("policy", rows, LOSS, request)
            await mine.optim_step("policy", UPDATE, f"step {request}")
        assert mine._policies["policy"].model.vision.computed == computed


@pytest.mark.slow
async def test_one_row_of_ten_turns_has_the_logprobs_that_were_sampled():
    shown = Shown()
    async with serving(seeing(shown)) as engine:
        calls = await conversation(engine, shown, 10)
        last, completion, _ = calls[-1]
        ids = np.concatenate((last.ids, np.array(completion, np.int32)))
        scored = [np.nan, *await engine.score("policy", TokenSequence(ids, last.media))]
    trained = np.zeros(len(ids), bool)
    for prompt, sampled, _ in calls:
        trained[len(prompt.ids) : len(prompt.ids) + len(sampled)] = True
    row = sample_of(TokenSequence(ids, last.media), trained, np.array(scored))
    async with training(shown) as mine:
        report = await mine.forward_backward("policy", [row], LOSS, "r")
    assert report.trained_tokens == 60
    assert report.rows == 1
    assert report.metrics["logprob_gap_max"] < 1e-4


@pytest.mark.slow
async def test_in_bfloat16_the_trainer_rounds_pictures_as_the_engine_does(monkeypatch):
    """The same weights: rounded in the engine, and rounded in each product of the trainer."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)  # no processor computes in float32
    shown = Shown()
    row = some_rows(shown)[1]
    sampler = LoadedModels(pictures=shown).own(NAME, torch.bfloat16, torch.device("cpu"), "trained")[0]
    async with serving(sampler, dtype="bfloat16") as engine:
        scored = np.array([np.nan, *await engine.score("policy", TokenSequence(row.ids, row.media))])
    async with training(shown, "trained", dtype="bfloat16") as mine:
        (found,) = (await mine.forward("policy", [row], ["old_logprobs"]))["old_logprobs"]
    async with training(shown, "trained") as exact:
        (wanted,) = (await exact.forward("policy", [row], ["old_logprobs"]))["old_logprobs"]
    trained = row.loss_mask
    gap, rounding = np.abs(found - scored)[trained].max(), np.abs(wanted - scored)[trained].max()
    assert gap < 0.3 * rounding
    assert 0 < rounding < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["trained", "frozen"])
async def test_new_weights_reach_the_engine_and_a_checkpoint_gives_them_back(tmp_path, vision):
    shown = Shown()
    rows = some_rows(shown)
    sampler = LoadedModels(pictures=shown).own(NAME, torch.float32, torch.device("cpu"), vision)[0]
    prompt, trained = TokenSequence(rows[1].ids, rows[1].media), rows[1].loss_mask
    async with training(shown, vision) as mine, serving(sampler) as engine:
        await mine.forward_backward("policy", rows, LOSS, "r")
        await mine.optim_step("policy", UPDATE, "s")
        await mine.save("policy", tmp_path, {"step": 1}, "saved")
        before = await engine.score("policy", prompt)
        await engine.sync_weights("policy", PolicyVersion(0, 1), await mine.weights("policy"))
        after = await engine.score("policy", prompt)
    async with training(shown, vision) as again:
        await again.load("policy", tmp_path)
        found = await again.forward("policy", [rows[1]], ["old_logprobs"])
    wanted = np.array([np.nan, *after])[trained]
    assert np.abs(np.array(found["old_logprobs"][0])[trained] - wanted).max() < 1e-4
    assert np.abs(np.array([np.nan, *before])[trained] - wanted).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["trained", "frozen"])
async def test_a_reference_and_a_critic_see_as_well(vision):
    shown = Shown()
    rows = some_rows(shown)
    made = TorchTrainer(CONFIG, 2, LoadedModels(pictures=shown))
    try:
        await made.create("policy", PolicySpec(model=NAME, vision=vision, reference=NAME, critic="states"))
        found = await made.forward("policy", rows, ["old_logprobs", "reference_logprobs", "values"])
        critic = made._policies["policy"]._critic
    finally:
        await made.close()
    for row, own, reference in zip(rows, found["old_logprobs"], found["reference_logprobs"], strict=True):
        assert np.abs(own - reference)[row.loss_mask].max() < 1e-5
    names = [name for name, _ in critic.optimizer.parameters]
    assert any("vision_model" in name for name in names) == (vision == "trained")
    assert any("text_model" in name for name in names)


async def test_rows_with_pictures_are_refused_by_a_text_model():
    shown = Shown()
    row = some_rows(shown)[0]
    row = replace(row, ids=np.minimum(row.ids, 200))
    async with training(shown, model="tiny-random") as mine:
        with pytest.raises(ModelError, match=r"e0.*reads"):
            await mine.forward_backward("policy", [row], LOSS, "r")


def test_the_pictures_of_a_tree_stand_at_the_nodes_of_each_row():
    shown = Shown()
    rows, model = some_rows(shown), seeing(shown)
    with torch.inference_mode():
        (micro,) = pack(rows, 4096)
        together = flat_hidden(model, micro)
        for row, (_, offset, path) in zip(rows, micro.samples, strict=True):
            (alone,) = pack([row], 4096)
            assert torch.allclose(flat_hidden(model, alone), together[path + offset], atol=1e-5)
