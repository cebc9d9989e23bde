from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.engine.base import EngineRequest
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.errors import ConfigError, EngineFailure
from palestra.models.catalog import model_folder
from palestra.models.loading import LoadedModels
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, TokenSequence
from palestra_bases.models import SharedModelOptions, SharedModels
from unit.engine.calling import DRAWN, serving
from unit.vision.seeing import (
    NAME,
    Shown,
    noise,
    own_logits,
    renderer_of,
    seeing,
    seeing_once,
    transformers_model,
    user,
)

LONG = replace(DRAWN, max_tokens=12, min_tokens=12)


async def reply(engine, prompt: TokenSequence, sampling=LONG) -> tuple[list[int], list[float]]:
    asked = EngineRequest(policy="policy", prompt=prompt, sampling=sampling)
    pieces = [piece async for piece in engine.generate(asked)]
    return [i for piece in pieces for i in piece.ids], [p for piece in pieces for p in piece.logprobs]


def continued(before: TokenSequence, completion: list[int], renderer, message) -> TokenSequence:
    """The prompt after a reply, with the exact tokens of both."""
    ids = np.concatenate((before.ids, np.array(completion, np.int32)))
    tail = renderer.extend(lambda: before.ids, ids[len(before.ids) :], [message])
    moved = tuple(span._replace(start=span.start + len(ids)) for span in tail.media)
    return TokenSequence(np.concatenate((ids, tail.ids)), (*before.media, *moved))


async def conversation(
    engine, shown: Shown, turns: int, name: str = NAME
) -> list[tuple[TokenSequence, list[int], list[float]]]:
    renderer, calls = renderer_of(shown, name), []
    prompt = renderer.render([user("0", shown.add(noise(30, 40)))])
    for turn in range(1, turns + 1):
        sampling = replace(LONG, seed=turn, max_tokens=6, min_tokens=6, logit_bias=((_placeholder(name), -100.0),))
        completion, logprobs = await reply(engine, prompt, sampling)
        calls.append((prompt, completion, logprobs))
        picture = shown.add(noise(10 + 17 * (turn % 3), 64 - 9 * turn % 50, seed=turn % 4))
        prompt = continued(prompt, completion, renderer, user(f"{turn}", picture))
    return calls


def _placeholder(name: str = NAME) -> int:
    return seeing_once(name).vision.image_token


TURNS = pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"limits": {"PREFILL_CHUNK": 7, "PREFIX_TOKENS": 0}}, marks=pytest.mark.slow),
        pytest.param({"deterministic": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)


@TURNS
async def test_ten_turns_with_a_picture_in_each_have_the_logprobs_of_transformers(settings):
    await check_ten_turns(NAME, settings)


async def check_ten_turns(name: str, settings) -> None:
    """One token, the placeholder, is never sampled: transformers would take one in a reply for a picture's."""
    shown = Shown()
    async with serving(seeing(shown, name=name), **settings) as engine:
        calls = await conversation(engine, shown, 10, name)
        scored = await engine.score("policy", calls[-1][0])
    last, completion, _ = calls[-1]
    assert len(last.media) == 10
    with torch.no_grad():
        images = [shown.images[span.digest] for span in last.media]
        model = transformers_model(model_folder(name))
        logits = own_logits(model, [*last.ids.tolist(), *completion], images, name).double()
    plain = logits.log_softmax(-1)[range(len(last.ids) - 1), last.ids[1:].tolist()]
    assert np.abs(np.array(scored) - plain.numpy()).max() < 1e-4
    logits[:, 258] = -torch.inf  # `min_tokens` takes the stop token away
    logits[:, _placeholder(name)] -= 100.0
    biased = logits.log_softmax(-1).numpy()
    for prompt, sampled, logprobs in calls:
        first = len(prompt.ids) - 1
        wanted = biased[range(first, first + len(sampled)), sampled]
        assert np.abs(wanted - logprobs).max() < 1e-4


async def test_a_picture_passes_through_the_tower_once_whatever_refers_to_it():
    shown = Shown()
    part = shown.add(noise(60, 60))
    renderer, model = renderer_of(shown), seeing(shown)
    async with serving(model, limits={"PREFIX_TOKENS": 0, "PREFILL_CHUNK": 16}) as engine:
        prompts = [renderer.render([user(f"{n}", part)]) for n in range(8)]
        await asyncio.gather(*(reply(engine, prompt) for prompt in prompts))
        assert model.vision.computed == 1
        await engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(list(model.own_weights())))
        await reply(engine, prompts[0])
        assert model.vision.computed == 1  # its tower is frozen


async def test_new_weights_of_the_tower_are_used():
    shown = Shown()
    part = shown.add(noise(60, 60))
    model, prompt = seeing(shown, trained=True), renderer_of(shown).render([user(part)])
    async with serving(model) as engine:
        before = await engine.score("policy", prompt)
        new = {name: weight.clone() * (1.5 if "connector" in name else 1.0) for name, weight in model.own_weights()}
        await engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(list(new.items())))
        after = await engine.score("policy", prompt)
    assert model.vision.computed == 2
    first = prompt.ids.tolist().index(model.vision.image_token)
    assert before[:first] == after[:first]
    assert max(abs(a - b) for a, b in zip(before[first:], after[first:], strict=True)) > 1e-5


async def test_another_picture_of_the_same_size_gives_other_logprobs_and_the_same_one_equal_ones():
    shown = Shown()
    one, other = shown.add(noise(60, 60)), shown.add(noise(60, 60, seed=1))
    renderer, model = renderer_of(shown), seeing(shown)
    async with serving(model) as engine:
        scores = [await reply(engine, renderer.render([user(part)])) for part in (one, other, one)]
    assert scores[0][1] == pytest.approx(scores[2][1], abs=1e-5)
    assert scores[0][1] != pytest.approx(scores[1][1], abs=1e-5)


@pytest.mark.slow
async def test_a_deterministic_engine_gives_the_same_bits_beside_other_pictures():
    shown = Shown()
    parts = [shown.add(noise(20 + n, 60, seed=n)) for n in range(6)]
    renderer = renderer_of(shown)
    prompts = [renderer.render([user(part, "what")]) for part in parts]
    async with serving(seeing(shown), deterministic=True) as engine:
        alone = [await reply(engine, prompt) for prompt in prompts]
        together = await asyncio.gather(*(reply(engine, prompt) for prompt in prompts))
    assert alone == together


async def test_a_picture_that_is_not_there_fails_its_own_request_alone():
    shown = Shown()
    part, gone = shown.add(noise(20, 20)), shown.add(noise(20, 20, seed=1))
    renderer = renderer_of(shown)
    good, bad = (renderer.render([user(each)]) for each in (part, gone))
    del shown.images[gone.digest]
    async with serving(seeing(shown)) as engine:
        await engine.pause()
        asked = [asyncio.ensure_future(reply(engine, prompt)) for prompt in (good, bad, good)]
        await asyncio.sleep(0)
        await engine.resume()
        first, failed, last = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(failed, EngineFailure)
    assert first == last
    assert len(first[0]) == 12


async def test_a_placeholder_that_is_sampled_is_a_token_like_any_other():
    shown = Shown()
    part = shown.add(noise(20, 20))
    renderer, token = renderer_of(shown), _placeholder()
    always = replace(LONG, logit_bias=((token, 100.0),), max_tokens=3, min_tokens=0)
    async with serving(seeing(shown)) as engine:
        prompt = renderer.render([user(part)])
        completion, _ = await reply(engine, prompt, always)
        assert completion == [token] * 3
        again = continued(prompt, completion, renderer, user("and now?"))
        assert len(await engine.score("policy", again)) == len(again.ids) - 1


@pytest.mark.slow
async def test_models_that_never_change_share_their_weights_and_see():
    """As in a job that only serves, or a frozen policy beside another."""
    shown = Shown()
    prompt = renderer_of(shown).render([user(shown.add(noise(50, 30)), "what")])
    models = LoadedModels(pictures=shown)
    one, other = (models.frozen(NAME, torch.float32, torch.device("cpu"))[0] for _ in range(2))
    weights = [
        dict(model.named_parameters())["model.connector.modality_projection.proj.weight"] for model in (one, other)
    ]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    policies = {name: PolicyModel(model=model, stop_ids=frozenset()) for name, model in {"a": one, "b": other}.items()}
    engine = EmbeddedEngine(policies, EmbeddedEngineConfig(threads=1, dtype="float32", max_batch=4))
    try:
        scores = [await engine.score(name, prompt) for name in policies]
    finally:
        await engine.close()
    async with serving(seeing(shown)) as alone:
        assert scores == [await alone.score("policy", prompt)] * 2


def test_a_base_server_refuses_models_that_see():
    with pytest.raises(ConfigError, match=r"tiny-random-vision.*base"):
        SharedModels(SharedModelOptions(models=(NAME,)))
