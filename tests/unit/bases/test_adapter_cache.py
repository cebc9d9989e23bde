"""Adapters of which an engine has some at the same time: who is loaded, who leaves, who waits, and what fails alone."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from palestra.engine.fake import FakeEngine, digits_script
from palestra.errors import ConfigError, ModelError
from palestra.models.weights import SavedWeights
from palestra.types.calls import PolicyVersion, SamplingParams
from palestra_bases.models import AdapterCache
from palestra_bases.serving import AdapterEngine
from unit.building import engine_request


class Engine:
    """Has the policies that are loaded into it."""

    def __init__(self):
        self.there, self.most, self.gate = set(), 0, asyncio.Event()
        self.gate.set()
        self.removes = asyncio.Event()
        self.removes.set()

    async def load(self, name):
        await self.gate.wait()
        assert name not in self.there, "the engine has it already"
        self.there.add(name)
        self.most = max(self.most, len(self.there))

    async def remove_policy(self, name):
        await self.removes.wait()
        self.there.discard(name)


async def use(cache, engine, name, until=None):
    async with cache.loaded(name, engine.load):
        assert name in engine.there
        if until is not None:
            await until.wait()


async def test_the_one_that_was_used_longest_ago_leaves():
    engine = Engine()
    cache = AdapterCache(engine, 2)
    for name in "abac":
        await use(cache, engine, name)
    assert (engine.there, cache.names, cache.loads) == ({"a", "c"}, ["a", "c"], 3)


async def test_there_are_never_more_than_may_be_and_all_are_served_in_order():
    engine, order = Engine(), []
    cache = AdapterCache(engine, 3)

    async def one(number):
        async with cache.loaded(f"a{number % 20}", engine.load):
            order.append(number)
            await asyncio.sleep(0.001)

    await asyncio.gather(*(one(number) for number in range(200)))
    assert engine.most == 3
    assert order == sorted(order)


async def test_one_without_room_waits_for_the_first_that_is_free():
    engine, over = Engine(), [asyncio.Event() for _ in range(2)]
    cache = AdapterCache(engine, 2)
    using = [asyncio.ensure_future(use(cache, engine, name, each)) for name, each in zip("ab", over, strict=True)]
    waiting = asyncio.ensure_future(use(cache, engine, "c"))
    await asyncio.sleep(0.01)
    assert engine.there == {"a", "b"}
    assert not waiting.done()
    over[1].set()
    await waiting
    assert engine.there == {"a", "c"}
    over[0].set()
    await asyncio.gather(*using)


async def test_a_caller_that_goes_away_while_it_waits_keeps_nobody_from_coming():
    engine, over = Engine(), asyncio.Event()
    cache = AdapterCache(engine, 1)
    using = asyncio.ensure_future(use(cache, engine, "a", over))
    await asyncio.sleep(0)
    gone, other = (asyncio.ensure_future(use(cache, engine, name)) for name in "bc")
    await asyncio.sleep(0.01)
    gone.cancel()
    over.set()
    await asyncio.gather(using, other)
    assert engine.there == {"c"}


async def test_one_that_is_removed_while_it_is_loaded_does_not_stay_in_the_engine():
    engine = Engine()
    engine.gate.clear()
    cache = AdapterCache(engine, 4)

    async def briefly():
        async with cache.loaded("a", engine.load):
            pass

    using = asyncio.ensure_future(briefly())
    await asyncio.sleep(0)
    removing = asyncio.ensure_future(cache.remove("a"))
    await asyncio.sleep(0)
    engine.gate.set()
    await asyncio.gather(using, removing)
    assert engine.there == set()


@pytest.mark.parametrize("turns", [1, 2, 5])
async def test_a_caller_that_goes_away_while_it_makes_room_leaves_no_adapter_behind(turns):
    engine = Engine()
    cache = AdapterCache(engine, 1)
    await use(cache, engine, "a")
    engine.removes.clear()
    gone = asyncio.ensure_future(use(cache, engine, "b"))
    for _ in range(turns):
        await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait((gone,))
    again = asyncio.ensure_future(use(cache, engine, "a"))
    await asyncio.sleep(0)
    engine.removes.set()
    await again
    await use(cache, engine, "c")
    assert (engine.there, cache.names, engine.most) == ({"c"}, ["c"], 1)


async def test_one_that_comes_back_while_it_is_removed_is_loaded_again():
    engine = Engine()
    cache = AdapterCache(engine, 4)
    await use(cache, engine, "a")
    removing = asyncio.ensure_future(cache.remove("a"))
    await asyncio.sleep(0)
    await use(cache, engine, "a")
    await removing
    assert (engine.there, cache.names, cache.loads) == ({"a"}, ["a"], 2)


async def test_one_that_can_not_be_loaded_fails_alone_and_takes_no_room():
    engine = Engine()
    cache = AdapterCache(engine, 1)

    async def damaged(name):
        raise ModelError(f"{name} is damaged")

    for _ in range(3):
        with pytest.raises(ModelError, match=r"bad.*damaged"):
            async with cache.loaded("bad", damaged):
                pass
    await use(cache, engine, "good")
    assert cache.names == ["good"]


# The engine of jobs.


@pytest.fixture
async def jobs():
    fake = FakeEngine(digits_script(3, 258))
    cache = AdapterCache(fake, 2)
    yield AdapterEngine(fake, cache), cache, fake
    await fake.close()


async def reply(engine, policy):
    request = engine_request(
        np.arange(5, dtype=np.int32), SamplingParams(temperature=1.0, max_tokens=4, seed=1), policy
    )
    async with contextlib.aclosing(engine.generate(request)) as pieces:
        return [token async for piece in pieces for token in piece.ids]


async def test_adapters_of_jobs_are_loaded_again_when_they_are_sampled_from(jobs):
    engine, cache, fake = jobs

    async def load(name):
        await fake.add_policy(name, "policy", PolicyVersion(0, 0), None)

    for name in "abc":
        await engine.add_adapter(name, load)
    assert (cache.names, cache.loads) == (["b", "c"], 3)
    assert await reply(engine, "a") == await reply(engine, "policy")
    assert (cache.names, cache.loads) == (["c", "a"], 4)
    await engine.score(
        "b", engine_request(np.arange(3, dtype=np.int32), SamplingParams(temperature=1.0, max_tokens=1, seed=1)).prompt
    )
    assert (cache.names, cache.loads) == (["a", "b"], 5)
    await engine.add_policy("a@0", "a", PolicyVersion(0, 0), None)
    assert await reply(engine, "a@0")
    for name in ("a", "b", "c", "a@0"):
        await engine.remove_policy(name)
    assert cache.names == []


async def test_an_adapter_that_is_not_trained_gets_no_other_weights(jobs, tmp_path):
    engine, _, fake = jobs

    async def load(name):
        await fake.add_policy(name, "policy", PolicyVersion(0, 0), None)

    await engine.add_adapter("a", load)
    with pytest.raises(ConfigError, match="never trained"):
        await engine.sync_weights("a", PolicyVersion(0, 1), SavedWeights(tmp_path))
    with pytest.raises(ConfigError, match="never trained"):
        await engine.add_policy("b", "a", PolicyVersion(0, 1), SavedWeights(tmp_path))
