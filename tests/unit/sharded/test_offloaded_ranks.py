"""Ranks whose weights, gradients and moments are offloaded compute what ranks without offload compute, bit for bit.

A job on CPUs is refused `trainer.cpu_offload`. The program of these ranks leaves that refusal out; see there for what a
CUDA device does besides, which `python bench/gpu.py` is there to check.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from palestra.config import TrainerConfig
from palestra.errors import ConfigError
from palestra.models.device import check_offload
from palestra.process.child import LocalProcess, start_process
from palestra.trainer.base import OptimParams, PolicySpec
from palestra_sharded.processes import RankPlaces
from unit.sharded.ranks import (
    LORA,
    LOSS,
    equal,
    moments,
    names,
    on_the_loop,
    one_process,
    rank_trainer,
    rows,
    same,
    saved_tensors,
    trained,
)

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[3]
SPECS = {
    "full": PolicySpec(model="tiny-random"),
    "lora": PolicySpec(model="tiny-random", adapter=LORA, reference="tiny-random", seed=3),
    "loaded whole": PolicySpec(model="tiny-random-vision"),
}


async def start_offloading(module: str, variables: Mapping[str, str]) -> LocalProcess:
    """Start the program of these tests in the place of that of a rank."""
    assert module == "palestra_sharded.processes"
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return await start_process("unit.sharded.offloading_rank", {**variables, "PYTHONPATH": path})


@pytest.fixture(scope="module")
def offloaded(loop):
    """Two ranks that offload."""
    trainer = rank_trainer(2, places=RankPlaces(start=start_offloading), cpu_offload=True)
    yield trainer
    loop.run(trainer.close())


@pytest.fixture(scope="module")
def plain(loop):
    """Two ranks that do not."""
    trainer = rank_trainer(2)
    yield trainer
    loop.run(trainer.close())


@pytest.mark.parametrize("kind", SPECS)
@on_the_loop
async def test_gradient_norm_update_and_checkpoint_are_those_of_ranks_without_offload(kind, offloaded, plain, tmp_path):
    spec, params = SPECS[kind], OptimParams(learning_rate=1e-3, max_grad_norm=0.1)
    batches = [rows(), rows(3)]  # the second gradient is added to one that is offloaded already
    found = [await trained(trainer, tmp_path / "one", batches, spec, params) for trainer in (offloaded, plain)]
    (name, reports, update, path), (other, wanted, same_update, at) = found
    assert [report.metrics for report in reports] == [report.metrics for report in wanted]
    assert update == same_update
    assert update.grad_norm > 0.1
    same(saved_tensors(path), saved_tensors(at))
    same(moments(path), moments(at))
    same(dict((await offloaded.weights(name)).tensors()), dict((await plain.weights(other)).tensors()))
    if spec.reference:
        numbers = [
            await trainer.forward(one, rows(3), ("reference_logprobs", "old_logprobs"))
            for trainer, one in ((offloaded, name), (plain, other))
        ]
        for key, own in numbers[1].items():
            for pair in zip(numbers[0][key], own, strict=True):
                np.testing.assert_array_equal(*pair)
    await offloaded.remove(name)
    await plain.remove(other)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@on_the_loop
async def test_a_checkpoint_is_continued_with_and_without_offload(adapter, offloaded, tmp_path):
    one, spec = one_process(), PolicySpec(model="tiny-random", adapter=adapter)
    for number, (writer, reader) in enumerate(((one, offloaded), (offloaded, one))):
        name, _, _, path = await trained(writer, tmp_path / f"{number}", [rows()], spec)
        other = next(names)
        await reader.create(other, spec)
        assert (await reader.load(other, path.parent))["step"] == 1
        again = await reader.save(other, tmp_path / "again" / other, {"step": 1}, "s")
        for read in (moments, saved_tensors):
            same(read(again), read(path))
        for trainer, own in ((writer, name), (reader, other)):
            await trainer.forward_backward(own, rows(4), LOSS, "next")
            await trainer.optim_step(own, OptimParams(learning_rate=1e-3), "next u")
        equal(dict((await reader.weights(other)).tensors()), dict((await writer.weights(name)).tensors()))
        await offloaded.remove(name if writer is offloaded else other)
    await one.close()


@on_the_loop
async def test_a_job_on_cpus_is_refused(tmp_path):
    refused = rank_trainer(2, cpu_offload=True)
    with pytest.raises(ConfigError, match=r"CUDA.*CPUs"):
        await refused.create("policy", PolicySpec(model="tiny-random"))
    await refused.close()
    check_offload(TrainerConfig(devices=2, cpu_offload=True), torch.device("cuda"))
