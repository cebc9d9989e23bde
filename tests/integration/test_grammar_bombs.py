"""Schemas that take for ever, against a real server: they are refused, and nobody else waits for them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from servers import KEY, SCRIPTED, TINY, Job, Plane, until

ALL_OF = {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.*"} for i in range(300)]}
DIVISIBLE = {"type": "integer", "multipleOf": 999_983}
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}
DEEP = '{"type":"array","items":' * 400 + "{}" + "}" * 400
ONE_WORD = {"enum": ["green"]}
BOMBS = {"allOf": ALL_OF, "multipleOf": DIVISIBLE, "optional": OPTIONAL}
KINDS = {
    "fake": SCRIPTED | {"server": {"max_waiting_calls": 100}},
    "served": {"kind": "inference", "policies": TINY["policies"], "engine": {"threads": 1}},
}


@contextmanager
def running(folder: Path, kind: str) -> Iterator[tuple[Job, str]]:
    """A real server, and the key to call its model with."""
    none = {} if kind == "fake" else {"tasks": (), "validation": ()}
    with Job(folder, KINDS[kind], **none) as job:
        job.start()
        if kind == "served":
            yield job, KEY
            return
        with Plane(job.url) as plane:
            yield job, plane.claim()["api_key"]


def ask(job: Job, key: str, schema: Any, **more: Any) -> str:
    with openai.OpenAI(base_url=f"{job.url}/v1", api_key=key, max_retries=2, timeout=120) as ai:
        named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        answer = ai.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hello"}],
            response_format=named,
            max_tokens=40,
            **more,
        )
    return str(answer.choices[0].message.content)


def children(job: Job) -> list[psutil.Process]:
    return psutil.Process(job.servers[-1].popen.pid).children(recursive=True)


def compiles(job: Job) -> bool:
    """Whether a process of the job computes."""

    def used() -> dict[int, float]:
        found = {}
        for child in children(job):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[child.pid] = sum(child.cpu_times()[:2])
        return found

    before = used()
    time.sleep(0.3)
    return any(seconds > before.get(pid, 0.0) + 0.05 for pid, seconds in used().items())


@contextmanager
def others_are_answered(job: Job) -> Iterator[list[float]]:
    """How long `/v1/models` takes meanwhile, in seconds."""
    took: list[float] = []
    over = threading.Event()

    def probe() -> None:
        with httpx2.Client(timeout=60) as http:
            while not over.is_set():
                began = time.monotonic()
                assert http.get(f"{job.url}/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
                took.append(time.monotonic() - began)
                over.wait(0.01)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        probing = threads.submit(probe)
        try:
            yield took
        finally:
            over.set()
            probing.result()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fake", "served"])
def test_a_bomb_is_a_400_by_its_bound_and_others_do_not_notice(tmp_path, kind):
    with running(tmp_path, kind) as (job, key):
        assert children(job) == [], "no process for grammars before there is one"
        with others_are_answered(job) as took:
            for schema in BOMBS.values():
                with pytest.raises(openai.BadRequestError, match="response_format") as refused:
                    ask(job, key, schema)
                assert refused.value.status_code == 400
                assert refused.value.response.headers["x-should-retry"] == "false"
                assert refused.value.code == "grammar_refused"
                assert refused.value.param == "response_format"
                assert "state" not in refused.value.message
        assert len(took) > 20
        assert statistics.median(took) < 0.1
        assert max(took) < 2.0  # the machine may be busy; a server that waits for a bomb takes longer than all of it
        assert psutil.Process(job.servers[-1].popen.pid).memory_info().rss < 2**31
        if kind == "served":
            assert json.loads(ask(job, key, ONE_WORD)) == "green", "small schemas are compiled as before"
        left = children(job)
        assert left
        job.servers[-1].kill()
        until(lambda: not any(map(alive, left)), "the processes for grammars end with the server")


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_client_that_goes_away_ends_the_compilation_and_equal_ones_share_it(tmp_path):
    with running(tmp_path, "fake") as (job, key):
        ask(job, key, {"type": "boolean"})
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": "hello"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": ALL_OF}},
        }
        with httpx2.Client(timeout=0.15) as http, pytest.raises(httpx2.TimeoutException):
            http.post(f"{job.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        until(lambda: not compiles(job), "nothing is compiled for a client that is gone")
        assert "Traceback" not in job.servers[-1].output
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            asked = [threads.submit(ask, job, key, ALL_OF) for _ in range(6)]
            compiled = set()
            while not all(one.done() for one in asked):
                compiled.update(child.pid for child in children(job))
                time.sleep(0.005)
        assert len(compiled) == 1, "each compilation ends its process"
        assert all(isinstance(one.exception(), openai.BadRequestError) for one in asked)
        assert "Traceback" not in job.servers[-1].output


@pytest.mark.slow
def test_a_schema_that_is_nested_too_deep_is_refused_and_the_next_is_answered(tmp_path):
    with running(tmp_path, "served") as (job, key):
        with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)) as refused:
            ask(job, key, json.loads(DEEP))
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert json.loads(ask(job, key, {"enum": ["x"]})) == "x"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_tools_have_bounds_too_and_are_named(tmp_path, stream):
    with running(tmp_path, "fake") as (job, key), Plane(job.url) as plane:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": ALL_OF}}}}
        body = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "stream": stream}
        refused = plane.post("/v1/chat/completions", body | {"tools": [tool], "tool_choice": "required"}, key)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "tool_choice"
        assert "MiB" in refused.json()["error"]["message"]
