"""Policies that are added to a running engine and removed from it: past versions of the one that is trained."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch
from safetensors.torch import save_file

from palestra.errors import EngineFailure, ModelError
from palestra.models.weights import SavedWeights
from palestra.types.calls import PolicyVersion
from unit.engine.calling import FOREVER, prompt, serving
from unit.engine.test_two_policies import CALLS, NEW, OLD, engine_of, replies, reply_of, scaled, weights_of

pytestmark = pytest.mark.ci

THIRD = PolicyVersion(0, 3)


@pytest.mark.slow
async def test_an_added_policy_answers_as_an_engine_of_its_own_and_disturbs_none(tmp_path):
    other = scaled(torch.float32, 1.5)
    save_file({name: p.detach().clone() for name, p in other.named_parameters()}, tmp_path / "model.safetensors")
    async with engine_of({"past": scaled(torch.float32, 1.5)}) as alone:
        expected = [[one[:2] for one in reply] for reply in (await replies(alone, "past"))["past"]]
    async with engine_of({"white": scaled(torch.float32, 1.0)}) as engine:
        before = (await replies(engine, "white"))["white"]
        await engine.add_policy("white@3", "white", THIRD, SavedWeights(tmp_path))
        both = await replies(engine, "white", "white@3")
        assert [[one[:2] for one in reply] for reply in both["white@3"]] == expected
        assert {version for reply in both["white@3"] for *_, version in reply} == {THIRD}
        assert both["white"] == before
        await engine.sync_weights("white", NEW, weights_of(scaled(torch.float32, 0.5)))
        assert (engine.version("white"), engine.version("white@3")) == (NEW, THIRD)
        assert (await replies(engine, "white@3"))["white@3"] == both["white@3"]


@pytest.mark.slow
async def test_without_a_source_it_has_the_present_weights_and_keeps_them():
    async with engine_of({"white": scaled(torch.float32, 1.0)}) as engine:
        before = (await replies(engine, "white"))["white"]
        await engine.add_policy("white@0", "white", OLD, None)
        await engine.sync_weights("white", NEW, weights_of(scaled(torch.float32, 1.5)))
        assert (await replies(engine, "white@0"))["white@0"] == before


async def test_a_removed_policy_is_gone_its_requests_fail_and_what_was_counted_stays():
    async with engine_of({"white": scaled(torch.float32, 1.0)}) as engine:
        await engine.add_policy("white@0", "white", OLD, None)
        running = [asyncio.create_task(reply_of(engine, "white@0", prompt(5, n), FOREVER)) for n in range(20)]
        while not engine.load().running:
            await asyncio.sleep(0.01)
        await engine.remove_policy("white@0")
        for task in running:
            with pytest.raises(EngineFailure, match=r"white@0.*removed"):
                await task
        counted = engine.load()
        assert counted.running == counted.waiting == counted.kv_bytes_used == 0
        assert counted.passes > 0
        with pytest.raises(ModelError, match=r"'white'.*'white@0'"):
            await reply_of(engine, "white@0", *CALLS[0])
        await reply_of(engine, "white", *CALLS[1])
        assert engine.load().passes > counted.passes
        await engine.remove_policy("white@0")  # it is not there, and that is all right
        await engine.add_policy("white@0", "white", OLD, None)
        assert len(await reply_of(engine, "white@0", *CALLS[1])) == 5


async def test_weights_of_another_model_are_refused(tmp_path):
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    async with engine_of({"white": scaled(torch.float32, 1.0)}) as engine:
        with pytest.raises(ModelError, match="weight other"):
            await engine.add_policy("white@1", "white", NEW, SavedWeights(tmp_path))
        with pytest.raises(ModelError, match="not 'white@1'"):
            engine.version("white@1")


async def test_weights_of_a_removed_model_are_freed_without_a_collection_by_chance(tiny):
    gc.disable()
    try:
        async with serving(tiny) as engine:
            await engine.add_policy("past", "policy", PolicyVersion(0, 0), None)
            weight = weakref.ref(next(iter(engine._core.policies["past"].model.model.parameters())))
            await engine.remove_policy("past")
            assert weight() is None
    finally:
        gc.enable()
