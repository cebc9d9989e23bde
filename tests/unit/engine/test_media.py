"""Placeholders of two images have the same ids. Nothing that was computed for one may be used for the other.

The models of the embedded engine read text only, so `generate` refuses media. What compares tokens below it is tried
here: with a text model, which computes the same for both, but says how many tokens it has computed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.core import EngineCore
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.engine.embedded.prefix_cache import PrefixCache
from palestra.engine.embedded.request import RunningRequest
from palestra.errors import InvalidRequest
from palestra.tokens import TokenRun
from palestra.types.calls import MediaSpan, PolicyVersion, SamplingParams, TokenSequence
from unit.building import engine_request
from unit.engine.calling import DRAWN, prompt, reply, serving

ONE = SamplingParams(temperature=1.0, max_tokens=1, seed=3)


def image(digest: str) -> tuple[MediaSpan, ...]:
    return (MediaSpan(10, 5, digest),)


@pytest.fixture
def core(tiny):
    config = EmbeddedEngineConfig(threads=1, dtype="float32")
    policies = {"policy": PolicyModel(model=tiny, stop_ids=frozenset())}
    return EngineCore(policies, PolicyVersion(0, 0), config, False, 2**20)


@torch.inference_mode()
def prefilled(core: EngineCore, *digests: str | None) -> int:
    """How many prompt tokens are computed for requests with the same ids that come at the same time."""
    before = core.load().prefilled_tokens
    for digest in digests:
        asked = engine_request(prompt(40), ONE, media=() if digest is None else image(digest))
        core.scheduler.add(RunningRequest(asked, lambda item: None))
    while not core.scheduler.idle:
        core.step()
    return core.load().prefilled_tokens - before


def test_two_prompts_with_equal_placeholders_and_different_images_never_share(core):
    assert prefilled(core, "cat", "cat", "cat") == 40  # one prompt, computed once
    assert prefilled(core, "cat") == 1  # from the prefix cache, but for its last token
    assert prefilled(core, "dog") == 30  # what comes before the image is in the cache
    assert prefilled(core, "dog", "cat") == 2
    assert prefilled(core, None) == 30  # ids that are no placeholders


def test_images_that_come_at_the_same_time_are_computed_apart(core):
    assert prefilled(core, "cat", "dog", "cat", None) == 3 * 40


def test_the_prefix_cache_tells_images_apart_at_the_first_token_and_in_the_middle():
    ids = np.array([9, 9, 1, 2], np.int32)
    cache = PrefixCache(100)
    images = {"cat": 0, "dog": 0, "ox": 2}
    stored = {digest: TokenRun.of(ids, (MediaSpan(start, 2, digest),)) for digest, start in images.items()}
    keys = {digest: torch.full((1, 2, 1, 4, 1), float(n)) for n, digest in enumerate(stored, 1)}
    for digest, run in stored.items():
        cache.insert(run, keys[digest])
    for digest, run in stored.items():
        found = torch.zeros((1, 2, 1, 4, 1))
        assert cache.copy_into(found, run) == 4
        assert torch.equal(found, keys[digest])
    assert cache.copy_into(torch.zeros((1, 2, 1, 4, 1)), TokenRun.of(ids, (MediaSpan(0, 1, "cat"),))) == 1
    assert cache.copy_into(torch.zeros((1, 2, 1, 4, 1)), TokenRun(ids)) == 2


async def test_an_engine_of_text_models_refuses_media(tiny):
    async with serving(tiny) as engine:
        with pytest.raises(InvalidRequest, match="text only"):
            await anext(engine.generate(engine_request(prompt(40), ONE, media=image("cat"))))
        with pytest.raises(InvalidRequest, match="text only"):
            await engine.score("policy", TokenSequence(prompt(40), image("cat")))
        assert (await reply(engine, prompt(40), DRAWN))[0]
