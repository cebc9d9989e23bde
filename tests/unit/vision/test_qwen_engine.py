"""The engine with models whose tokens have positions in the plane."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.config import TINY_QWEN_VL
from palestra.errors import EngineFailure
from palestra.models.catalog import model_folder
from unit.engine.calling import serving
from unit.vision.seeing import Shown, noise, own_logits, renderer_of, seeing, transformers_model, user
from unit.vision.test_engine import LONG, TURNS, check_ten_turns, continued, reply

NAME = TINY_QWEN_VL


@TURNS
async def test_ten_turns_with_a_picture_in_each_have_the_logprobs_of_transformers(settings):
    await check_ten_turns(NAME, settings)


@pytest.mark.slow
async def test_later_families_as_well(qwen):
    await check_ten_turns(qwen, {"limits": {"PREFILL_CHUNK": 7}})


async def test_replies_decoded_together_have_the_positions_of_their_own_prompts():
    """Behind pictures of several sizes, behind none, and twice behind the same; each as if it were alone."""
    shown = Shown()
    parts = [shown.add(noise(*size)) for size in ((20, 20), (64, 16), (60, 60))]
    renderer = renderer_of(shown, NAME)
    prompts = [renderer.render([user(part, "what")]) for part in parts]
    prompts += [renderer.render([user("what")]), renderer.render([user(parts[2], parts[2])]), prompts[0]]
    async with serving(seeing(shown, name=NAME), limits={"PREFIX_TOKENS": 0}) as engine:
        alone = [await reply(engine, prompt) for prompt in prompts]
        together = await asyncio.gather(*(reply(engine, prompt) for prompt in prompts))
    reference = transformers_model(model_folder(NAME))
    for prompt, (ids, logprobs), (again, beside) in zip(prompts, alone, together, strict=True):
        assert ids == again
        assert np.abs(np.array(logprobs) - beside).max() < 1e-4
        if reference.config.image_token_id in ids:
            continue  # transformers would take it for a picture's
        images = [shown.images[span.digest] for span in prompt.media]
        with torch.no_grad():
            logits = own_logits(reference, [*prompt.ids, *ids], images, NAME)[len(prompt.ids) - 1 : -1]
        logits[:, 258] = -torch.inf  # `min_tokens` takes the stop token away
        wanted = logits.log_softmax(-1)[range(len(ids)), ids].numpy()
        assert np.abs(wanted - beside).max() < 1e-4


async def test_a_kept_prefix_with_a_picture_is_continued_at_the_same_positions():
    shown = Shown()
    renderer = renderer_of(shown, NAME)
    first = renderer.render([user(shown.add(noise(60, 60)), "what")])
    async with serving(seeing(shown, name=NAME)) as engine:
        completion, _ = await reply(engine, first)
        second = continued(first, completion, renderer, user("and", shown.add(noise(30, 60, seed=1))))
        before = engine.load().prefilled_tokens
        ids, kept = await reply(engine, second)
        computed = engine.load().prefilled_tokens - before
    async with serving(seeing(shown, name=NAME), limits={"PREFIX_TOKENS": 0}) as engine:
        again, whole = await reply(engine, second)
    assert computed < len(second.ids) - len(first.ids)
    assert ids == again
    assert np.abs(np.array(kept) - whole).max() < 1e-4


async def test_a_follower_goes_on_with_the_positions_of_its_prompt_when_the_first_is_cancelled():
    shown = Shown()
    prompt = renderer_of(shown, NAME).render([user(*(shown.add(noise(64, 64, seed=n)) for n in range(4)), "what")])
    async with serving(seeing(shown, name=NAME), limits={"PREFILL_CHUNK": 8, "PREFIX_TOKENS": 0}) as engine:
        alone = await reply(engine, prompt)
        await engine.pause()
        first, second = (asyncio.ensure_future(reply(engine, prompt)) for _ in range(2))
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.sleep(0.01)
        first.cancel()
        found = await second
    assert found[0] == alone[0]
    assert np.abs(np.array(found[1]) - alone[1]).max() < 1e-4


async def test_a_picture_that_is_not_there_fails_its_own_request_alone():
    shown = Shown()
    part, gone = shown.add(noise(20, 20)), shown.add(noise(20, 20, seed=1))
    renderer = renderer_of(shown, NAME)
    good, bad = (renderer.render([user(each)]) for each in (part, gone))
    del shown.images[gone.digest]
    async with serving(seeing(shown, name=NAME)) as engine:
        await engine.pause()
        asked = [asyncio.ensure_future(reply(engine, prompt)) for prompt in (good, bad, good)]
        await asyncio.sleep(0)
        await engine.resume()
        first, failed, last = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(failed, EngineFailure)
    assert first == last


async def test_a_placeholder_that_is_sampled_has_the_position_of_text():
    shown = Shown()
    model = seeing(shown, name=NAME)
    renderer, token = renderer_of(shown, NAME), model.vision.image_token
    always = replace(LONG, logit_bias=((token, 100.0),), max_tokens=3, min_tokens=0)
    async with serving(model) as engine:
        prompt = renderer.render([user(shown.add(noise(60, 60)))])
        completion, _ = await reply(engine, prompt, always)
        again = continued(prompt, completion, renderer, user("and now?"))
        positions = model.positions(again)[:, len(prompt.ids) :]
        start = int(model.positions(prompt).max()) + 1
        assert positions.tolist() == [list(range(start, start + positions.shape[1]))] * 3
        assert len(await engine.score("policy", again)) == len(again.ids) - 1
