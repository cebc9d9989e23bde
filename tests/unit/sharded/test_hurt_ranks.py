"""Ranks that are killed or stopped in the middle of a request: it ends whole or not at all, and the next ones go on.

A signal comes from a timer while ranks compute, talk or write; or one rank stands still, another waits for it within a
collective operation, and then the first one is killed. The trainer is deterministic: what follows a loss has the bits
of what was never disturbed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from palestra.errors import TrainerLost
from palestra.process.child import LocalProcess
from palestra.trainer import checkpoint
from palestra.trainer.base import OptimParams, PolicySpec
from palestra_sharded.processes import RankPlaces
from palestra_sharded.trainer import ShardedTrainer
from unit.sharded.forked_ranks import import_everything, start_forked
from unit.sharded.ranks import LOSS, moments, on_the_loop, rank_trainer, rows, same, saved_tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SILENCE = 10.0
NAME, SPEC, PARAMS = "policy", PolicySpec(model="tiny-random"), OptimParams(learning_rate=1e-3, max_grad_norm=0.5)
BATCH = [replace(row, episode_id=f"{row.episode_id} {n}") for n in range(8) for row in rows()]
REQUESTS: dict[str, Callable[[ShardedTrainer, Path], Awaitable[object]]] = {  # of a step, in their order
    "gradient": lambda trainer, folder: trainer.forward_backward(NAME, BATCH, LOSS, "gradient"),
    "update": lambda trainer, folder: trainer.optim_step(NAME, PARAMS, "update"),
    "publication": lambda trainer, folder: trainer.weights(NAME),
    "save": lambda trainer, folder: trainer.save(NAME, folder, {"step": 2}, "save"),
}
MOMENTS = {signal.SIGKILL: (0.02, 0.3, 0.6, 0.9), signal.SIGSTOP: (0.02, 0.5)}  # parts of what a request takes
SAID = {signal.SIGKILL: "rank {} was killed by SIGKILL", signal.SIGSTOP: "rank {} has been silent for"}


@dataclass(frozen=True)
class Undisturbed:
    """A second step that nothing has disturbed.

    Attributes:
        first: folder with the checkpoint of the step before it, which every test begins with.
        second: its own checkpoint.
        weights: that it has published.
        seconds: that each of its requests took.
    """

    first: Path
    second: Path
    weights: dict
    seconds: dict[str, float]


@pytest.fixture(scope="module")
def trainer(loop):
    """Two ranks, which are started again after each loss."""
    import_everything()
    places = RankPlaces(start=start_forked)
    trainer = rank_trainer(2, deterministic=True, places=places, stuck_seconds=SILENCE)
    yield trainer
    loop.run(trainer.close())


@pytest.fixture(scope="module")
def undisturbed(loop, trainer, tmp_path_factory):
    return loop.run(play_undisturbed(trainer, tmp_path_factory.mktemp("undisturbed")))


async def play_undisturbed(trainer, folder) -> Undisturbed:
    first, both = folder / "first", folder / "both"
    await trainer.create(NAME, SPEC)
    for request in REQUESTS.values():  # the first ones take longer
        await request(trainer, first)
    (first / "step-000002").rename(first / "step-000001")
    await trainer.save(NAME, first, {"step": 1}, "first")
    await begin(trainer, first, both)
    seconds = {}
    for name, request in REQUESTS.items():
        start = time.monotonic()
        found = await request(trainer, both)
        seconds[name] = time.monotonic() - start
        if name == "publication":
            weights = dict(found.tensors())
    return Undisturbed(first=first, second=both / "step-000002", weights=weights, seconds=seconds)


async def begin(trainer, first: Path, folder: Path) -> None:
    """Go on from the first step, in a folder that has its checkpoint."""
    shutil.copytree(first, folder)
    await again(trainer, folder)


async def again(trainer, folder: Path) -> int:
    """Start lost ranks again and load the newest checkpoint, as a job does; returns its step."""
    if trainer.is_lost:
        await trainer.renew()
    elif trainer.pids:
        await trainer.remove(NAME)
    await trainer.create(NAME, SPEC)
    return (await trainer.load(NAME, folder))["step"]


async def hurt(trainer, name: str, undisturbed: Undisturbed, folder: Path, victim: int, sent, moment: float) -> bool:
    """Send a signal to a rank during a request, and return whether the request failed; the ranks are lost then."""
    pid = trainer.pids[victim]
    asyncio.get_running_loop().call_later(undisturbed.seconds[name] * moment, os.kill, pid, sent)
    failed = None
    try:
        await asyncio.wait_for(REQUESTS[name](trainer, folder), SILENCE + 30.0)
    except TrainerLost as error:
        failed = error
    await asyncio.wait_for(trainer.lost(), SILENCE + 30.0)
    said = SAID[sent].format(victim)
    assert said in trainer.loss
    if failed is not None:
        assert str(failed).startswith(f"the trainer has ended: {said}")
        assert "\n" not in str(failed)
    with pytest.raises(TrainerLost, match=said):
        await trainer.weights(NAME)
    return failed is not None


async def assert_it_goes_on(trainer, name: str, undisturbed: Undisturbed, folder: Path, failed: bool) -> None:
    """The checkpoints are whole; what is left of the step is done again, and the weights are as if nothing had been."""
    assert all(checkpoint.good(folder, checkpoint.step_of(path)) for path in checkpoint.found(folder))
    step = await again(trainer, folder)
    assert step in ((1, 2) if name == "save" else (1,))
    if name == "save" and not failed:
        assert step == 2, "it was said to be saved"
    for request in REQUESTS.values() if step == 1 else ():
        await request(trainer, folder)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [], "nothing half written is left"
    for read in (saved_tensors, moments):
        same(read(folder / "step-000002"), read(undisturbed.second))
    same(dict((await trainer.weights(NAME)).tensors()), undisturbed.weights)


@pytest.mark.parametrize("sent", MOMENTS, ids=lambda number: number.name)
@pytest.mark.parametrize(
    "name", ["gradient", *(pytest.param(name, marks=pytest.mark.long) for name in REQUESTS if name != "gradient")]
)
@on_the_loop
async def test_a_rank_that_is_hurt_in_the_middle_of_a_request(name, sent, trainer, undisturbed, tmp_path):
    failed = []
    for number, moment in enumerate(MOMENTS[sent]):
        folder = tmp_path / f"{number}"
        await begin(trainer, undisturbed.first, folder)
        for before, request in REQUESTS.items():
            if before == name:
                break
            await request(trainer, folder)
        failed.append(await hurt(trainer, name, undisturbed, folder, number % 2, sent, moment))
        await assert_it_goes_on(trainer, name, undisturbed, folder, failed[-1])
    assert any(failed), "no signal came before the answer"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", REQUESTS)
@on_the_loop
async def test_a_rank_that_dies_while_another_waits_for_it(name, victim, trainer, undisturbed, tmp_path):
    folder = tmp_path / "policy"
    await begin(trainer, undisturbed.first, folder)
    for before, request in REQUESTS.items():
        if before == name:
            break
        await request(trainer, folder)
    other, pid = psutil.Process(trainer.pids[1 - victim]), trainer.pids[victim]
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(REQUESTS[name](trainer, folder))
    await until_it_waits(other, asked)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TrainerLost, match=f"^the trainer has ended: {SAID[signal.SIGKILL].format(victim)}$"):
        await asyncio.wait_for(asked, 30.0)
    await assert_it_goes_on(trainer, name, undisturbed, folder, True)


class Unhurried(LocalProcess):
    """A process of which it takes some seconds to hear how it has ended, as of one on another machine."""

    async def how_ended(self) -> str:
        await asyncio.sleep(3.0)
        return await super().how_ended()


@on_the_loop
async def test_a_rank_that_died_is_named_and_not_the_one_that_has_lost_the_connection_to_it(tmp_path):
    async def start(module, variables):
        process = await start_forked(module, variables)
        return Unhurried(process._process, process.connection)

    import_everything()
    others = rank_trainer(2, places=RankPlaces(start=start), stuck_seconds=60.0)
    try:
        await others.create(NAME, SPEC)
        other, pid = psutil.Process(others.pids[0]), others.pids[1]
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(others.forward_backward(NAME, BATCH, LOSS, "gradient"))
        await until_it_waits(other, asked)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainerLost, match=r"rank 1.*SIGKILL$"):
            await asyncio.wait_for(asked, 30.0)
    finally:
        await others.close()


async def until_it_waits(process: psutil.Process, asked: asyncio.Future) -> None:
    """Return when a process has begun with a request, and then hardly computes for half a second."""
    before, start, idle = sum(process.cpu_times()[:2]), time.monotonic(), False
    while not idle:
        assert time.monotonic() - start < SILENCE / 2, "it computes all the time"
        await asyncio.sleep(0.5)
        now = sum(process.cpu_times()[:2])
        idle, before = now - before <= 0.02 and time.monotonic() - start > 1.0, now
    assert not asked.done()
