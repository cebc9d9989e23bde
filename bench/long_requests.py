"""Long requests: how soon others are answered beside one client that sends them, and what memory the server keeps.

python bench/long_requests.py send URL KEY CASE SECONDS        the client that sends; its last line has its answers
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import httpx2
import psutil
from data_plane import TASKS
from figures import Part
from processes import HERE, KEY, BenchError, Server, palestra_server

TABLE = "`/v1/models` beside one client that sends long requests, fake engine, context of 4,096 tokens"
PAUSE_SECONDS = 0.003  # between two requests of the client whose answers are timed
SETTLE_SECONDS = 1.0  # after the last long request, before memory is read
WORDS = "hello world this is some text "
FUNCTION = {"description": "d" * 40, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"type": "function_call", "name": "f", "arguments": '{"x": 1}'}
NOTHING = "nothing"
# By name: the path, and the body without its model.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "4 MB of content": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": (WORDS * 140_000)[:4_000_000]}]},
    ),
    "10,000 function_call items": ("/v1/responses", {"input": [CALL | {"call_id": f"c{k}"} for k in range(10_000)]}),
    "1,000 required tools": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": FUNCTION | {"name": f"t{k}"}} for k in range(1000)],
            "tool_choice": "required",
        },
    ),
    "128 prompts of 30,000 characters": ("/v1/completions", {"prompt": [(WORDS * 1000)[:30_000]] * 128}),
}


def run(part: Part, quick: bool) -> None:
    """Each case, after the same without any long request."""
    rounds, seconds = (1, 5.0) if quick else (3, 10.0)
    with palestra_server({"rollout": {"lease_seconds": 3600.0}}, TASKS) as server:
        key = _claim(server)
        _beside(server, key, next(iter(CASES)), 1.0)  # warm-up
        for case in (NOTHING, *CASES):
            _add(part, case, [_beside(server, key, case, seconds) for _ in range(rounds)])
    part.notes.append("the client that sends is a process of its own, and waits for each answer before it sends again")


def _add(part: Part, case: str, runs: list[dict[str, Any]]) -> None:
    columns = {name: [run[name] for run in runs] for name in runs[0] if name != "statuses"}
    part.add(TABLE, case, f"python bench/long_requests.py send URL KEY '{case}' SECONDS", **columns)
    statuses: Counter[str] = Counter()
    for found in runs:
        statuses.update(found["statuses"])
    if case != NOTHING:
        part.notes.append(f"{case}: answered with {', '.join(f'{code} x {n}' for code, n in statuses.items())}")


def _claim(server: Server) -> str:
    body = {"worker_id": "bench", "request_id": "bench", "wait_seconds": 30}
    answer = httpx2.post(f"{server.url}/claim_episode", json=body, headers={"authorization": f"Bearer {KEY}"})
    return str(answer.json()["episode"]["api_key"])


def _beside(server: Server, key: str, case: str, seconds: float) -> dict[str, Any]:
    """Time `/v1/models` while another process sends a case for so many seconds."""
    before = _rss(server)
    sender = _sender(server, key, case, seconds)
    deadline, times = time.monotonic() + seconds, []
    with httpx2.Client(headers={"authorization": f"Bearer {key}"}) as http:
        while time.monotonic() < deadline:
            begun = time.perf_counter()
            if http.get(f"{server.url}/v1/models").status_code != 200:
                raise BenchError("/v1/models was not answered")
            times.append(1e3 * (time.perf_counter() - begun))
            time.sleep(PAUSE_SECONDS)
    answers = _answers(sender)
    time.sleep(SETTLE_SECONDS)
    times.sort()
    return {
        "p50__ms": times[len(times) // 2],
        "p99__ms": times[int(len(times) * 0.99)],
        "longest__ms": times[-1],
        "long__requests": sum(answers.values()),
        "RSS__before__MiB": before,
        "RSS__after__MiB": _rss(server),
        "statuses": answers,
    }


def _sender(server: Server, key: str, case: str, seconds: float) -> subprocess.Popen[str] | None:
    """The process that sends; back when it has begun."""
    if case == NOTHING:
        return None
    command = [sys.executable, HERE / "long_requests.py", "send", server.url, key, case, str(seconds)]
    sender = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    sender.stdout.readline()
    return sender


def _answers(sender: subprocess.Popen[str] | None) -> dict[str, int]:
    if sender is None:
        return {}
    out, _ = sender.communicate()
    if sender.returncode != 0:
        raise BenchError(f"the client that sends ended with {sender.returncode}")
    return dict(json.loads(out.splitlines()[-1]))


def _rss(server: Server) -> float:
    return float(psutil.Process(server.pid).memory_info().rss / 2**20)


def _send(url: str, key: str, case: str, seconds: float) -> None:
    path, body = CASES[case]
    data = json.dumps({"model": "policy"} | body).encode()
    statuses: Counter[str] = Counter()
    print("begun", flush=True)
    end = time.monotonic() + seconds
    with httpx2.Client(headers={"authorization": f"Bearer {key}"}, timeout=60) as http:
        while time.monotonic() < end:
            statuses[str(http.post(url + path, content=data).status_code)] += 1
    print(json.dumps(statuses))


if __name__ == "__main__":
    _send(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
