"""The real vLLM gets whole weights by broadcasts of gloo: what it samples afterwards, and what a lost server costs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from contextlib import asynccontextmanager

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.models import job_of, served, started, vllm_python, write_model
from engines.test_vllm_pool import changed, expected, reply, weights_of
from palestra.engine.driver import EngineJob
from palestra.errors import EngineFailure
from palestra.models.tensor_file import write_weights
from palestra.types.calls import PolicyVersion
from palestra_engines.external.served_models import read_served_models
from palestra_engines.external.workers import EngineServers
from palestra_engines.vllm.api import VllmApi
from palestra_engines.vllm.command import WORKER
from palestra_engines.vllm.driver import VllmDriver
from palestra_engines.vllm.worker.palestra_weight_group import WeightGroup

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560)]
VERSIONS = [PolicyVersion(0, number) for number in range(6)]


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def reference(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture
def in_the_middle(monkeypatch):
    """A list: what is put there is called once, in the middle of the next broadcast."""
    todo, send = [], WeightGroup.send

    def watched(self, weights, layout, sent):
        def each():
            for number, one in enumerate(weights):
                if number == len(layout.names) // 2 and todo:
                    todo.pop()()
                yield one

        send(self, each(), layout, sent)

    monkeypatch.setattr(WeightGroup, "send", watched)
    return todo


def breaks() -> None:
    """Let a broadcast fail; a test calls it in the middle of one."""
    raise RuntimeError("the network is gone")


async def killed(api, version) -> None:
    """Stand for a job that ends after the broadcast, before vLLM is asked to finish the update."""
    raise EngineFailure("killed")


def small_buckets(policy) -> None:
    """Let each layer's weights come in several buckets, which is otherwise so for large models alone."""
    policy.rounds._bucket_bytes = 20_000


async def check(engine, reference, version, calls=3) -> None:
    """Compare replies with the trainer's weights, of which vLLM's own reload would forget the tied head."""
    for ids, logprobs, versions in await asyncio.gather(*(reply(engine, seed, 40) for seed in range(calls))):
        assert set(versions) == {version}
        assert logprobs == pytest.approx(expected(reference, ids), abs=2e-3)


async def test_a_server_gets_all_weights_while_replies_wait_and_again_where_a_broadcast_breaks_off(
    model, reference, tmp_path, in_the_middle
):
    async with started(model, tmp_path / "run", weight_transfer="gloo", threads=1) as engine:
        small_buckets(served(engine))
        running = asyncio.create_task(reply(engine, 9, 600))
        while not engine.load().sampled_tokens:
            await asyncio.sleep(0.01)
        changed(reference)
        await engine.sync_weights("policy", VERSIONS[1], weights_of(reference))
        await check(engine, reference, VERSIONS[1])
        ids, _, versions = await running
        assert len(ids) == 600
        assert versions == sorted(versions)
        assert set(versions) <= {VERSIONS[0], VERSIONS[1]}
        groups = list(served(engine).rounds._groups.values())
        # As the ranks of a trainer give them: in a file.
        changed(reference)
        file = write_weights(weights_of(reference), tmp_path / "weights.safetensors")
        await engine.sync_weights("policy", VERSIONS[2], file)
        await check(engine, reference, VERSIONS[2])
        assert list(served(engine).rounds._groups.values()) == groups
        assert engine.load().moved_bytes == 2 * sum(one.numel() * 4 for _, one in weights_of(reference).named)

        changed(reference)
        in_the_middle.append(breaks)
        await engine.sync_weights("policy", VERSIONS[3], weights_of(reference))
        assert not in_the_middle
        await check(engine, reference, VERSIONS[3])
        assert list(served(engine).rounds._groups.values()) != groups


def computing(worker) -> psutil.Process:
    """The process of a worker's server that computes."""
    children = psutil.Process(worker.process).children(recursive=True)
    return max(children, key=lambda one: one.memory_info().rss)


async def test_one_broadcast_reaches_two_servers_and_one_that_is_killed_or_stopped_costs_the_other_nothing(
    model, reference, tmp_path, in_the_middle
):
    engine = {"replicas": 2, "threads": 1, "weight_transfer": "gloo", "stuck_seconds": 90.0}
    async with started(model, tmp_path / "run", **engine) as pool:
        rounds = served(pool).rounds
        small_buckets(served(pool))
        changed(reference)
        await pool.sync_weights("policy", VERSIONS[1], weights_of(reference))
        assert [len(members) for members in rounds._groups] == [2]
        await check(pool, reference, VERSIONS[1], 6)
        for number, how in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
            hurt, other = pool.load().workers
            in_the_middle.append(lambda how=how, hurt=hurt: computing(hurt).send_signal(how))
            changed(reference)
            await asyncio.wait_for(pool.sync_weights("policy", VERSIONS[number], weights_of(reference)), 240)
            assert not in_the_middle
            await check(pool, reference, VERSIONS[number])
            async with asyncio.timeout(300):
                while any(worker.state != "ready" for worker in pool.load().workers):
                    await asyncio.sleep(0.1)
            assert [worker.restarts for worker in pool.load().workers] == [number - 1, 0]
            assert pool.load().workers[1].process == other.process
            await check(pool, reference, VERSIONS[number], 6)  # the one that was started again has them, too
        changed(reference)
        await pool.sync_weights("policy", VERSIONS[4], weights_of(reference))
        assert [len(members) for members in rounds._groups] == [2]
        await check(pool, reference, VERSIONS[4], 6)


@asynccontextmanager
async def alone(model, run, **engine):
    """The engine of a server that runs already, without the pool that would mend what a failed update leaves."""
    config = job_of(model, run, **engine)
    driver, settings = VllmDriver(), config.engine
    models = await asyncio.to_thread(read_served_models, EngineJob(config=config), driver.images)
    servers = EngineServers(driver, settings, models, 0, config.folder, None, driver.rounds(settings))
    found = servers.engine()
    try:
        yield found
    finally:
        await found.close()


def serve(model, port: int, log) -> subprocess.Popen:
    """Start a server of two workers as the documentation tells users to."""
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "21", "--generation-config", "vllm"]
    command += ["--structured-outputs-config", '{"backend": "guidance"}', "--dtype", "float32", "--enforce-eager"]
    command += ["--weight-transfer-config", '{"backend": "palestra_file"}', "--tensor-parallel-size", "2"]
    command += ["--worker-extension-cls", "palestra_vllm_worker.WorkerExtension"]
    own = {"PYTHONPATH": str(WORKER), "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True)


async def test_the_workers_that_share_a_model_of_a_server_that_runs_already_get_weights_too(
    model, reference, tmp_path, in_the_middle, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (tmp_path / "server.log").open("wb") as log:
        server = serve(model, port, log)
    try:
        async with asyncio.timeout(300):
            while server.poll() is None:
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", port)) == 0:
                        break
                await asyncio.sleep(0.5)
        url = {"python": None, "threads": None, "url": f"http://127.0.0.1:{port}", "weight_transfer": "gloo"}
        async with alone(model, tmp_path / "run", **url) as engine:
            small_buckets(engine._policies["policy"])
            for version in VERSIONS[1:3]:
                changed(reference)
                await engine.sync_weights("policy", version, weights_of(reference))
                await check(engine, reference, version)
            assert engine._policies["policy"].api.ranks == 2
            in_the_middle += [breaks, breaks]
            with pytest.raises(EngineFailure, match=r"version 0\.3"):
                await engine.sync_weights("policy", VERSIONS[3], weights_of(reference))
        # As a job that is killed leaves it, too: paused, with the weights of two versions.
        async with alone(model, tmp_path / "again", **url) as engine:
            await engine.sync_weights("policy", VERSIONS[4], weights_of(reference))
            await check(engine, reference, VERSIONS[4])
            monkeypatch.setattr(VllmApi, "finish_update", killed)
            with pytest.raises(EngineFailure, match="killed"):
                await engine.sync_weights("policy", VERSIONS[5], weights_of(reference))
            monkeypatch.undo()
        async with alone(model, tmp_path / "once more", **url) as engine:
            await engine.sync_weights("policy", VERSIONS[1], weights_of(reference))
            await check(engine, reference, VERSIONS[1])
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
