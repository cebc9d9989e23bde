"""Another model behind the address of an engine is found before it is trained on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from palestra.config import JobConfig, PolicyConfig
from palestra.engine.base import SAMPLE_TEXT
from palestra.errors import ConfigError
from palestra.grammars.pool import Grammars
from palestra.learner.evaluation import check_engine
from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import select_renderer
from palestra.runtime.local import local_job
from palestra.session import PolicyRuntime
from unit.engine.engine_servers import KEY, ScriptedVllm, listening, of_tiny_random


class Trainer:
    """Says of every token but the first the same log-probability."""

    def __init__(self, logprob):
        self.logprob = logprob

    async def forward(self, policy, batch, outputs):
        (row,) = batch
        assert (policy, set(outputs)) == ("policy", {"old_logprobs"})
        return {"old_logprobs": [np.where(row.loss_mask, np.float32(self.logprob), np.float32("nan"))]}


class Engine:
    """Says of every token but the first a log-probability, and notes the text."""

    def __init__(self, logprobs):
        self.logprobs, self.asked = logprobs, None

    async def scores(self, policy, prompt):
        self.asked = prompt.ids
        return [[self.logprobs(place) for place in range(len(prompt.ids) - 1)]]


def runtime_of(engine, **policy) -> PolicyRuntime:
    renderer = select_renderer(load_tokenizer("tiny-random"))
    config = PolicyConfig.model_validate({"model": "tiny-random"} | policy)
    return PolicyRuntime(name="policy", config=config, renderer=renderer, engine=engine, grammars=Grammars())


@pytest.mark.parametrize("logprobs", [lambda place: -2.0, lambda place: -2.0 + 0.2 * (-1) ** place])
async def test_rounding_is_no_other_model(logprobs):
    engine = Engine(logprobs)
    await check_engine(engine, Trainer(-2.0), runtime_of(engine))
    assert load_tokenizer("tiny-random").decode(engine.asked) == SAMPLE_TEXT


@pytest.mark.parametrize(
    ("logprobs", "gap"),
    [
        (lambda place: -3.0, "1.00"),
        (lambda place: -2.0 + 0.5 * (-1) ** place, "0.50"),
        (lambda place: float("nan"), "nan"),
    ],
)
async def test_other_probabilities_are_another_model(logprobs, gap):
    engine = Engine(logprobs)
    with pytest.raises(ConfigError, match=rf"{gap}.*nats"):
        await check_engine(engine, Trainer(-2.0), runtime_of(engine))


async def test_the_text_is_not_longer_than_the_context():
    engine = Engine(lambda place: -2.0)
    await check_engine(engine, Trainer(-2.0), runtime_of(engine, max_context=16))
    assert len(engine.asked) == 15


# A job


@asynccontextmanager
async def job_on(folder, *servers: ScriptedVllm, workers=None):
    """A job on servers that run already, beside embedded workers if there are `workers` to begin the list with."""
    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(listening(server)) for server in servers]
        engine = {"kind": "vllm", "url": [f"http://127.0.0.1:{port}" for port in ports], "key_variable": "SERVERS_KEY"}
        config = JobConfig.model_validate(
            {
                "run_dir": str(folder / "run"),
                "server": {"port": 0},
                "steps": 1,
                "policies": {"policy": {"model": "tiny-random", "max_context": 64}},
                "trainer": {"threads": 1, "dtype": "float32"},
                "engine": engine if workers is None else {"workers": [*workers, engine]},
                "rollout": {"group_size": 2, "groups_per_step": 1},
            }
        )
        async with local_job(config, lambda kind, data: None) as job:
            yield job


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("SERVERS_KEY", KEY)
    return of_tiny_random(ScriptedVllm())


async def test_a_job_ends_before_its_first_episode_where_the_server_has_another_model(server, tmp_path):
    server.score = lambda token: -1.0
    async with job_on(tmp_path, server) as job, asyncio.timeout(60):
        with pytest.raises(ConfigError, match=r"engine\.url.*another"):
            await job.run()
        assert job.progress.state == "failed"
        assert set(server.read), "its weights are the job's, so that only their use can differ"


async def test_a_job_goes_on_where_the_server_has_its_model_and_looks_once(server, tmp_path):
    scored = []
    server.score = lambda token: scored.append(token) or -float(np.log(259))
    async with job_on(tmp_path, server) as job, asyncio.timeout(60):
        running = asyncio.create_task(job.run())
        while job.progress.phase != "waiting for tasks":
            await asyncio.sleep(0.01)
        assert len(scored) == len(SAMPLE_TEXT.encode()[:63]) - 1
        job.stop()
        await running


async def test_each_of_several_servers_is_looked_at(server, tmp_path):
    other = of_tiny_random(ScriptedVllm())
    other.score = lambda token: -1.0
    async with job_on(tmp_path, server, other) as job, asyncio.timeout(60):
        with pytest.raises(ConfigError, match=r"engine\.url.*another"):
            await job.run()


@pytest.mark.slow
async def test_a_server_beside_embedded_workers_is_looked_at(server, tmp_path):
    server.score = lambda token: -1.0
    async with job_on(tmp_path, server, workers=[{"threads": 1}]) as job, asyncio.timeout(100):
        with pytest.raises(ConfigError, match=r"engine\.url.*another"):
            await job.run()
