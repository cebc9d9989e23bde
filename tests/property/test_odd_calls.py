"""Whatever a job sends to its base server, it is answered, the server writes no traceback, and others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bases import served
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import engine_request, make_sample

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.engine.fake import FakeEngine, digits_script
from palestra.errors import InvalidRequest, ModelError, PalestraError
from palestra.process.channel import Beat, Call, Cancel, Result, raw
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.fake import FakeTrainer
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from palestra_bases.base import SamplerSpec
from palestra_bases.protocol import event, pack_messages

IDS = np.arange(4, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=20, seed=3)
ROWS = [make_sample([1, 2, 3, 4], [2, 3])]
POLICY = PolicySpec(model="given")
VERSION = PolicyVersion(0, 1)
CALLS: dict[str, list[Any]] = {
    "engine.generate": [{"policy": "p", "prompt": TokenSequence(IDS), "sampling": SAMPLING, "streamed": True}],
    "base.describe": [],
    "base.sample": ["q", {"model": "given", "adapter": {"rank": 4}}],
    "trainer.weights": ["p"],
    "trainer.begin_incarnation": ["p", 1],
    "engine.sync_weights": ["p", VERSION, {"policy": "p", "number": 1}],
    "engine.add_policy": ["r", "p", VERSION, None],
    "engine.remove_policy": ["r"],
    "engine.score": ["p", TokenSequence(IDS)],
    "engine.close": [],
    "engine.pause": [],
    "engine.version": ["p"],
    "engine.load": [],
    "engine.failure": [],
    "engine._named": ["p"],
    "trainer.close": [],
    "trainer.version": ["p"],
    "base.close": [],
    "stranger.save": ["p"],
    "trainer.create": ["s", POLICY],
    "trainer.forward": ["p", ROWS, ["old_logprobs"]],
    "trainer.forward_backward": ["p", ROWS, LossSpec.of(PPOClipLoss()), "g", False],
    "trainer.optim_step": ["p", OptimParams(learning_rate=1e-3), "u", "policy"],
    "trainer.untrainable": ["p", ROWS, "t"],
    "trainer.save": ["p", "run", {"step": 1}, "s"],
    "trainer.save_weights": ["p", "run/pool", 1, "w"],
    "trainer.load": ["p", "run", 1],
}
NUMBERS = [0, -1, 2**31, 2**63, -(2**63), 0.5, float("nan"), float("inf")]
TEXTS = ["", "x", "p", "\0", "/", "..", "x" * 5000]
OTHERS = [
    None,
    True,
    [],
    [[]],
    {},
    b"x",
    msgspec.msgpack.Ext(5, b"x"),
    msgspec.msgpack.Ext(-1, bytes(4)),
    ["<i4", [2**62], b""],
    {"path": "/etc/passwd"},
    {"folder": "/etc"},
    [1, 2],
    {"model": "given"},
    np.ones((2, 2), np.int32),
]
ODD = st.sampled_from([*NUMBERS, *TEXTS, *OTHERS])


def tree_of(value: Any) -> Any:
    """A message's arguments as lists and tables with arrays, so that any value can be put into any place."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        return {name: tree_of(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: tree_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [tree_of(one) for one in value]
    return value


def places(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [here, *(place for key, one in inner for place in places(one, (*here, key)))]


@st.composite
def odd_calls(draw: Any) -> tuple[str, Any]:
    do = draw(st.sampled_from(sorted(CALLS)))
    tree = {"with": tree_of(copy.deepcopy(CALLS[do]))}
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from(places(tree)[1:]))
        inner: Any = tree
        for key in path:
            inner = inner[key]
        inner[last] = draw(ODD)
    return do, tree["with"]


async def play(folder: Path, calls: list[tuple[str, Any]]) -> None:
    engine, trainer = FakeEngine(digits_script(12, 258), piece_tokens=1), FakeTrainer(2)
    (folder / "run").mkdir()
    async with served(engine, trainer, folder) as base:
        good, _ = await base.job("ben")
        await good.sample("policy", SamplerSpec(model="given"))
        link = await base.link("ada")
        await link.remote.call("base.sample", "p", {"model": "given"})
        await link.remote.call("trainer.create", "p", POLICY)
        for do, given in calls:
            arguments = given if isinstance(given, list) else [given]
            here = [isinstance(one, str) and one.startswith("run") for one in arguments]
            arguments = [str(folder / one) if own else one for one, own in zip(arguments, here, strict=True)]
            try:
                if do == "engine.generate":
                    async for _ in link.remote.stream(do, *arguments):
                        pass
                else:
                    await link.remote.call(do, *arguments)
            except PalestraError as error:
                if error.http_status >= 500 and not isinstance(error, ModelError):  # files that are missing
                    raise AssertionError(f"{do} {arguments}") from error
        request = engine_request(IDS, SAMPLING)
        assert [token async for piece in good.generate(request) for token in piece.ids]


@examples(20, 500, deadline=None)
@given(calls=st.lists(odd_calls(), min_size=1, max_size=8))
def test_odd_calls_are_answered(calls):
    failed: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = failed.append  # type: ignore[method-assign]
    logging.getLogger("palestra").addHandler(handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(play(Path(folder), calls))
    finally:
        logging.getLogger("palestra").removeHandler(handler)
    assert not failed


MESSAGES = [
    Cancel(7),
    Beat(),
    Result(1, raw(None)),
    event("stranger", None),
    Call(2**63, "base.describe", raw(())),
    Call(9, "base.describe", raw({})),
    Call(9, "", raw(())),
    Call(9, "engine.generate", raw(7)),
    Call(9, "base.sample", msgspec.Raw(b"\x92\xa1p\x81\xa5model\xa3\xed\xa0\x80")),
]


@pytest.mark.parametrize("message", [pack_messages(one) for one in MESSAGES] + [b"", b"\x90", b"\x91" * 9999], ids=repr)
async def test_an_odd_message_costs_its_sender_alone(tmp_path, message, caplog):
    engine, trainer = FakeEngine(digits_script(12, 258)), FakeTrainer(2)
    async with served(engine, trainer, tmp_path) as base:
        good, _ = await base.job("ben")
        await good.sample("policy", SamplerSpec(model="given"))
        stranger = await base.link("ada")
        await stranger._connection.send(message)
        with contextlib.suppress(PalestraError):
            await stranger.remote.call("base.describe")  # is answered after the message
        request = engine_request(IDS, SAMPLING)
        assert [token async for piece in good.generate(request) for token in piece.ids]
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_two_replies_of_one_id_end_the_connection(tmp_path):
    engine = FakeEngine(digits_script(12, 258), piece_tokens=1, piece_delay_seconds=0.01)
    async with served(engine, FakeTrainer(2), tmp_path) as base:
        link = await base.link()
        await link.remote.call("base.sample", "p", {"model": "given"})
        call = Call(99, "engine.generate", raw(CALLS["engine.generate"]))
        await link._connection.send(pack_messages(call, call))
        with pytest.raises(InvalidRequest, match="99"):
            raise await asyncio.wait_for(link.failure(), 30)
