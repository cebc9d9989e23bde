"""A student learns from a model that another Palestra serves as it does from a frozen policy of its own job."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.trainer.test_torch_trainer import batch_of_two_groups

import palestra
from palestra import JobConfig
from palestra.config import TeacherServerConfig, TrainerConfig, parse_config
from palestra.errors import ConfigError, TeacherFailed
from palestra.learner.teacher import ServedTeacher
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import select_renderer
from palestra.runtime.local import local_job
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.torch_trainer import TorchTrainer

TASKS = [{"id": f"t{number}", "prompt": f"{number} + 2 ="} for number in range(4)]
FLOAT32 = {"dtype": "float32", "threads": 1}


@pytest.fixture(autouse=True)
def without_retries(monkeypatch):
    monkeypatch.setattr("palestra.learner.teacher.RETRY_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def steps_by_gradients(monkeypatch):
    """With so large an epsilon a weight moves by its gradient; AdamW's own makes a step of any gradient."""
    monkeypatch.setitem(OptimParams.__init__.__kwdefaults__, "epsilon", 1.0)


@pytest.fixture
def teacher_model(tmp_path) -> Path:
    """Another model than the student's: its matrices are larger."""
    folder = tmp_path / "teacher"
    folder.mkdir()
    for path in Path(model_folder("tiny-random")).iterdir():
        if path.suffix == ".safetensors":
            tensors = {name: tensor * (1.5 if tensor.dim() > 1 else 1.0) for name, tensor in load_file(path).items()}
            save_file(tensors, folder / path.name, metadata={"format": "pt"})
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@asynccontextmanager
async def served(folder: Path, model: Path):
    config = {
        "kind": "inference",
        "run_dir": str(folder),
        "policies": {"big": {"model": str(model), "max_context": 256}},
        "engine": FLOAT32,
        "server": {"port": 0},
    }
    async with local_job(parse_config(config), lambda kind, data: None) as job:
        running = asyncio.ensure_future(job.run())
        yield job
        job.stop()
        await running


def job(folder: Path, algorithm: dict, steps: int = 3, **policies) -> JobConfig:
    student = {"model": "tiny-random", "max_context": 256, "sampling": {"max_tokens": 6}}
    optimizer = {"learning_rate": 0.3}
    return JobConfig.model_validate(
        {
            "run_dir": str(folder),
            "steps": steps,
            "policies": {"student": student | {"optimizer": optimizer}} | policies,
            "rollout": {"group_size": 4, "groups_per_step": 2},
            "algorithm": {"name": "distill"} | algorithm,
            "evaluation": {"every_steps": 0},
            "checkpoint": {"every_steps": 1},
            "engine": FLOAT32,
            "trainer": FLOAT32,
        }
    )


async def train(config: JobConfig, **more) -> palestra.TrainResult:
    arguments = {"reward": lambda task, answer: 0.0, "tasks": TASKS, "config": config, "quiet": True} | more
    return await asyncio.to_thread(lambda: palestra.train(**arguments))


def weights(result: palestra.TrainResult) -> dict[str, torch.Tensor]:
    return load_file(next(result.checkpoint.glob("*.safetensors")))


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights."""
    return float(torch.cat([(one[name].float() - two[name].float()).flatten() for name in one]).norm())


def address(job, **more) -> dict:
    return {"teacher_server": {"url": job.url, "key_variable": "TEACHERS_KEY"} | more}


async def test_a_server_finds_of_each_token_what_the_trainers_copy_does(tmp_path, teacher_model, monkeypatch):
    rows, trainer = batch_of_two_groups(), TorchTrainer(TrainerConfig(threads=1, dtype="float32"), 2)
    rows = [replace(row, temperatures=np.ones_like(row.temperatures)) for row in rows]
    student = SimpleNamespace(renderer=select_renderer(load_tokenizer("tiny-random")))
    try:
        await trainer.create("policy", PolicySpec(model="tiny-random", teacher=str(teacher_model)))
        wanted = (await trainer.forward("policy", rows, {"teacher_logprobs"}))["teacher_logprobs"]
    finally:
        await trainer.close()
    async with served(tmp_path / "server", teacher_model) as server:
        monkeypatch.setenv("TEACHERS_KEY", server.api_key)
        asked = ServedTeacher(TeacherServerConfig(url=server.url, key_variable="TEACHERS_KEY"), student)
        await asked.check()
        assert asked.unanswerable(rows) == {}
        found = await asked.logprobs(rows)
        await asked.close()
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, two, atol=2e-5)


@pytest.mark.slow
async def test_a_served_teacher_teaches_what_a_frozen_policy_does(tmp_path, teacher_model, monkeypatch):
    big = {"model": str(teacher_model), "frozen": True, "max_context": 256}
    frozen = await train(job(tmp_path / "frozen", {}, big=big))
    async with served(tmp_path / "server", teacher_model) as server:
        monkeypatch.setenv("TEACHERS_KEY", server.api_key)
        found = await train(job(tmp_path / "served", address(server)))
    one, two = weights(frozen), weights(found)
    beginning = load_file(next(Path(model_folder("tiny-random")).glob("*.safetensors")))
    assert distance(one, beginning) > 1e-2
    assert distance(one, two) < 1e-4 * distance(one, beginning)
    for a, b in zip(frozen.metrics[1:], found.metrics[1:], strict=True):
        assert a["train/teacher_kl"] == pytest.approx(b["train/teacher_kl"], abs=1e-4)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)
    assert abs(frozen.metrics[1]["train/teacher_kl"]) > 1e-3
    kept = json.dumps((tmp_path / "served/config.toml").read_text())
    assert server.api_key not in kept


@pytest.mark.slow
async def test_a_job_whose_teacher_dies_ends_and_goes_on_from_its_manifest(tmp_path, teacher_model, monkeypatch):
    """The step that failed is trained when the teacher is back, at another address, on the episodes of before."""
    async with served(tmp_path / "whole server", teacher_model) as server:
        monkeypatch.setenv("TEACHERS_KEY", server.api_key)
        wanted = weights(await train(job(tmp_path / "whole", address(server))))
    asked = 0
    async with served(tmp_path / "server", teacher_model) as server:
        monkeypatch.setenv("TEACHERS_KEY", server.api_key)
        engine = server.plane.sessions.context.policies.runtime("big").engine
        score = engine.score

        async def dies(policy, prompt):
            nonlocal asked
            asked += 1
            if asked > 12:  # the check, the first step, and a part of the second
                raise RuntimeError("out of memory")
            return await score(policy, prompt)

        monkeypatch.setattr(engine, "score", dies)
        with pytest.raises(TeacherFailed, match="--resume"):
            await train(job(tmp_path / "job", address(server)))
    checkpoints = sorted(path.name for path in (tmp_path / "job/checkpoints").iterdir())
    assert checkpoints == ["step-000001"]
    async with served(tmp_path / "another server", teacher_model) as server:
        monkeypatch.setenv("TEACHERS_KEY", server.api_key)
        result = await train(job(tmp_path / "job", address(server)), resume=True)
    assert result.state == "completed"
    found = weights(result)
    beginning = load_file(next(Path(model_folder("tiny-random")).glob("*.safetensors")))
    assert distance(found, wanted) < 1e-4 * distance(wanted, beginning)


async def test_a_wrong_key_or_name_is_refused_before_an_episode_is_played(tmp_path, teacher_model, monkeypatch):
    async with served(tmp_path / "server", teacher_model) as server:
        monkeypatch.setenv("TEACHERS_KEY", "wrong")
        with pytest.raises(TeacherFailed, match=r"teacher.*answer"):
            await train(job(tmp_path / "one", address(server)))
        monkeypatch.setenv("TEACHERS_KEY", server.api_key)
        with pytest.raises(ConfigError, match=r"'small'.*big"):
            await train(job(tmp_path / "two", address(server, model="small")))
