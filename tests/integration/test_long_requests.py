"""One long request does not hold up the others. The bound is generous: the machine of a test may be loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from servers import SCRIPTED, Job, Plane

WORDS = "hello world this is some text " * 140_000
FUNCTION = {"description": "d" * 40, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"type": "function_call", "name": "f", "arguments": '{"x": 1}'}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "4 MB of content": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS[:4_000_000]}]}),
    "10,000 calls": ("/v1/responses", {"input": [CALL | {"call_id": f"c{k}"} for k in range(10_000)]}),
    "1,000 tools": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": FUNCTION | {"name": f"t{k}"}} for k in range(1000)],
        },
    ),
    "128 prompts": ("/v1/completions", {"prompt": [WORDS[:30_000]] * 128}),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("long"), SCRIPTED | {"steps": 100}) as job:
        job.start()
        yield job


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_others_are_answered_meanwhile(job, case):
    path, body = CASES[case]
    answers: list[httpx2.Response] = []
    with Plane(job.url) as plane:
        key = plane.claim()["api_key"]
        thread = threading.Thread(
            target=lambda: answers.extend(plane.post(path, {"model": "policy"} | body, key) for _ in range(5))
        )
        thread.start()
        slowest = 0.0
        with httpx2.Client(headers={"authorization": f"Bearer {key}"}) as http:
            while thread.is_alive():
                begun = time.perf_counter()
                assert http.get(f"{job.url}/v1/models").status_code == 200
                slowest = max(slowest, time.perf_counter() - begun)
        thread.join()
        assert {answer.status_code for answer in answers} == {400}
        assert {answer.json()["error"]["code"] for answer in answers} == {"context_overflow"}
        assert slowest < 0.6
