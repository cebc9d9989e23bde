"""What computes a job is kept with its run, and a deterministic one goes on only with the same."""

from __future__ import annotations

import orjson
import pytest

import palestra
from palestra.config import JobConfig
from palestra.doctor.examination import examine
from palestra.errors import ConfigError
from palestra.models import device
from palestra.models.numerics import numerics
from palestra.runtime import local
from palestra.runtime.early_checks import note_numerics, numerics_of
from palestra.runtime.engine_process import EngineOrder, _load
from palestra.store import open_run_store
from palestra.store.run_log import NUMERICS
from palestra_cpu import extension
from palestra_cpu.cpu_kernels import CompiledKernels
from palestra_sharded.rank import Rank, RankOrder

COMPILED = {"processor": "p", "torch": "2", "kernels": "compiled by cc", "kernels_problem": ""}
PLAIN = COMPILED | {"kernels": "torch's operators", "kernels_problem": "no compiler"}


async def test_only_a_deterministic_run_refuses_another_computation(tmp_path):
    config = JobConfig(name="a")
    with open_run_store(tmp_path / "run.db", config.rollout) as store:
        first = await note_numerics(store.log, COMPILED, deterministic=True)
        assert first == {"text": "computes on p, compiled by cc, torch 2", "problem": ""}
        assert await note_numerics(store.log, COMPILED, deterministic=True) == first
        with pytest.raises(ConfigError, match=r"\(no compiler"):
            await note_numerics(store.log, PLAIN, deterministic=True)
        assert orjson.loads(await store.log.fact(NUMERICS)) == COMPILED
        changed = await note_numerics(store.log, PLAIN, deterministic=False)
        assert changed["problem"] == "no compiler"
        assert "before: kernels compiled by cc" in changed["text"]
        assert orjson.loads(await store.log.fact(NUMERICS)) == PLAIN
        assert [event.kind for event in await store.log.events(0)] == ["numerics"] * 3


def test_an_inference_worker_and_a_rank_refuse_to_compute_otherwise_than_the_job(tmp_path):
    config = JobConfig(name="a", model="tiny-random", deterministic=True, engine={"dtype": "float32", "device": "cpu"})
    other = numerics(kernels=False) | {"processor": "of another machine"}
    with pytest.raises(ConfigError, match=r"processor.*another"):
        _load(EngineOrder(config=config, weights={}, pictures=None, number=0, numerics=other))
    rank = RankOrder(number=0, meeting=None, config=config.trainer, threads=None, deterministic=True, numerics=other)
    with pytest.raises(ConfigError, match=r"processor.*another"):
        Rank().begin(rank)


def test_kernels_are_looked_at_where_bfloat16_is_computed_on_a_cpu(monkeypatch):
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(extension, "compiled_kernels", lambda: CompiledKernels(None))
    of = {
        dtype: numerics_of(
            JobConfig(name="a", engine={"dtype": dtype, "device": "cpu"}, trainer={"dtype": dtype, "device": "cpu"})
        )
        for dtype in ("bfloat16", "float32")
    }
    assert "kernels" in of["bfloat16"]
    assert "kernels" not in of["float32"]
    assert numerics_of(JobConfig(name="a", engine={"kind": "fake"})) == {}


@pytest.mark.slow
def test_a_deterministic_run_is_not_resumed_where_it_would_get_other_weights(tmp_path, monkeypatch):
    def rollout(task, endpoint):
        return 0.5

    def train(steps, resume):
        config = JobConfig(
            name="a", model="tiny-random", run_dir=tmp_path / "run", steps=steps, deterministic=True,
            rollout={"group_size": 2, "groups_per_step": 1}, evaluation={"every_steps": 0}, server={"port": 0},
        )  # fmt: skip
        return palestra.train(rollout, [{"prompt": "a"}], config, quiet=True, resume=resume)

    train(1, resume=False)
    assert examine(tmp_path / "run").numerics == numerics(kernels=True) | local.threads_of(
        JobConfig(name="a", model="tiny-random")
    )
    found = local.numerics_of
    monkeypatch.setattr(local, "numerics_of", lambda config: found(config) | {"kernels": "made by another compiler"})
    with pytest.raises(ConfigError, match="kernels"):
        train(2, resume=True)
    monkeypatch.undo()
    train(2, resume=True)
