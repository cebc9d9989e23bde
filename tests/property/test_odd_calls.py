"""Whatever a job sends to its base server, it is answered, the server writes no traceback, and others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import served
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import engine_request, make_sample

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.backend.frames import write_frame
from palestra.engine.fake.engine import FakeEngine, digits_script
from palestra.errors import ModelError, PalestraError
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.fake import FakeTrainer
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence

IDS = np.arange(4, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=20, seed=3)
ROWS = [make_sample([1, 2, 3, 4], [2, 3])]
POLICY = PolicySpec(model="given")
CALLS: dict[str, dict[str, Any]] = {
    "generate": {"policy": "p", "prompt": TokenSequence(IDS), "sampling": SAMPLING, "streamed": True},
    "base.describe": {},
    "base.sample": {"policy": "q", "spec": {"model": "given", "adapter": {"rank": 4}}},
    "base.weights": {"policy": "p"},
    "base.begin_incarnation": {"policy": "p", "incarnation": 1},
    "base.sync_weights": {"policy": "p", "version": PolicyVersion(0, 1), "source": {"policy": "p", "number": 1}},
    "base.add_policy": {"name": "r", "like": "p", "version": PolicyVersion(0, 1), "source": None},
    "base.remove_policy": {"name": "r"},
    "base.score": {"policy": "p", "prompt": TokenSequence(IDS)},
    "trainer.create": {"policy": "s", "spec": POLICY},
    "trainer.forward": {"policy": "p", "batch": ROWS, "outputs": ["old_logprobs"]},
    "trainer.forward_backward": {
        "policy": "p",
        "batch": ROWS,
        "loss": LossSpec.of(PPOClipLoss()),
        "request_id": "g",
    },
    "trainer.optim_step": {"policy": "p", "params": OptimParams(learning_rate=1e-3), "request_id": "u"},
    "trainer.untrainable": {"policy": "p", "batch": ROWS, "request_id": "t"},
    "trainer.save": {"policy": "p", "folder": "run", "state": {"step": 1}, "request_id": "s"},
    "trainer.save_weights": {"policy": "p", "folder": "run/pool", "step": 1, "request_id": "w"},
    "trainer.load": {"policy": "p", "folder": "run", "step": 1},
}
NUMBERS = [0, -1, 2**31, 2**63, 10**30, -(10**400), 0.5, float("nan"), float("inf")]
TEXTS = ["", "x", "p", "\ud800", "\0", "/", "..", "x" * 5000]
OTHERS = [
    None,
    True,
    [],
    [[]],
    {},
    {"array": 0},
    {"array": 10**30},
    [1, 2],
    {"model": "given"},
    np.ones((2, 2), np.int32),
]
ODD = st.sampled_from([*NUMBERS, *TEXTS, *OTHERS])


def tree_of(value: Any) -> Any:
    """A message's arguments as JSON with arrays, so that any value can be put into any place."""
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
        await good.sample("policy", CALLS["base.sample"]["spec"])
        link = await base.link("ada")
        await link.call("base.sample", {"policy": "p", "spec": {"model": "given"}})
        await link.call("trainer.create", {"policy": "p", "spec": POLICY})
        for do, arguments in calls:
            if isinstance(arguments, dict) and arguments.get("folder") in ("run", "run/pool"):
                arguments["folder"] = str(folder / arguments["folder"])
            try:
                if do == "generate":
                    async for _ in link.generate(arguments):
                        pass
                else:
                    await link.call(do, arguments)
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


HEADERS = [
    {"cancel": []},
    {"cancel": 10**30},
    {"id": 1, "oldest": "x", "do": "base.describe", "with": {}},
    {"id": 10**30, "do": "base.describe", "with": {}},
    {"id": float("nan"), "do": "base.describe", "with": {}},
    {"id": 1, "do": [], "with": {}},
    {"id": 1, "do": "generate", "with": []},
]


@pytest.mark.parametrize("header", HEADERS, ids=str)
async def test_an_odd_header_costs_its_sender_alone(tmp_path, header, caplog):
    engine, trainer = FakeEngine(digits_script(12, 258)), FakeTrainer(2)
    async with served(engine, trainer, tmp_path) as base:
        good, _ = await base.job("ben")
        await good.sample("policy", CALLS["base.sample"]["spec"])
        stranger = await base.link("ada")
        stranger._outbox.put_nowait(write_frame(header))
        with contextlib.suppress(PalestraError):
            await stranger.call("base.describe", {})  # is answered after the header
        request = engine_request(IDS, SAMPLING)
        assert [token async for piece in good.generate(request) for token in piece.ids]
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
