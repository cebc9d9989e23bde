"""Every command, with a server, a store and files that hold terminal escapes: none of them reaches the terminal."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from palestra.cli.main import main, parser
from palestra.config import dump_config, parse_config
from palestra.types.records import Task
from unit.building import open_store
from unit.store.playing import claim, end

HOSTILE = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eevil\x7f\x08"
JOB = "job-0123456789abcdef"
FORBIDDEN = [bytes([code]) for code in range(32) if code not in b"\n\t"] + [b"\x7f", "\x9b".encode(), "\u202e".encode()]
VIEW = {
    "job_id": JOB,
    "name": HOSTILE,
    "user": HOSTILE,
    "kind": HOSTILE,
    "priority": HOSTILE,
    "state": "completed",
    "reason": HOSTILE,
    "resources": {},
    "attached": False,
    "created_at": 0.0,
    "changed_at": 0.0,
    "starts": 1,
    "restarts_left": 1,
    "node": HOSTILE,
    "cancel_requested": False,
    "config": {},
    "log_tail": HOSTILE,
}
KEY = {
    "key_id": HOSTILE,
    "label": HOSTILE,
    "revoked_at": None,
    "expires_at": None,
    "secret": HOSTILE,
}
EVENTS = [
    ("state", {"state": HOSTILE, "reason": HOSTILE}),
    ("serving", {"model": HOSTILE}),
    ("served", {"calls": HOSTILE}),
    ("saved", {"step": HOSTILE}),
    ("warning", {"text": HOSTILE}),
    ("step", {"step": 1, "train/reward_mean": 0.5}),
]
STREAM = "".join(f"id: 1.{n}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for n, (kind, data) in enumerate(EVENTS))
ANSWERS: dict[str, object] = {
    "/jobs": {"jobs": [VIEW], "cursor": None},
    f"/jobs/{JOB}": VIEW,
    f"/jobs/{JOB}/rotate-key": {"api_key": HOSTILE},
    f"/jobs/{JOB}/artifacts": [{"path": f"../{HOSTILE}", "bytes": 1, "modified_at": 0.0}],
    "/users": [{"name": HOSTILE, "role": HOSTILE, "removed_at": None}],
    "/keys": [KEY],
    "/tenants": [{"name": HOSTILE, "quota": {HOSTILE: 1.0}}],
}
RUN = f"/dashboard/api/runs/{JOB}"
LINE = {"episode_id": HOSTILE, "task_id": HOSTILE, "state": HOSTILE, "reason": HOSTILE, "worker": HOSTILE}
LINE |= {"metadata": HOSTILE, "players": {HOSTILE: HOSTILE}, "forks": {HOSTILE: 1}, "rewards": {HOSTILE: 1.0, "b": 0.0}}
MESSAGE = {"role": HOSTILE, "name": HOSTILE, "content": [{"text": HOSTILE}, {"image": HOSTILE}], "reasoning": HOSTILE}
MESSAGE |= {"tool_calls": [{"id": "1", "name": HOSTILE, "arguments": HOSTILE}]}
FORK = {"reason": HOSTILE, "text": HOSTILE, "drift": True, "call": 0, "message": 0, "position": 0}
CALL = {"index": 0, "after": None, "agent": HOSTILE, "policy": HOSTILE, "time_step": 0, "prompt_tokens": 1, "reused": 0}
CALL |= {"sampled": 1, "finish_reason": HOSTILE, "stop": HOSTILE, "fork": FORK, "trained": True, "why": HOSTILE}
CALL |= {"versions": [], "mean_logprob": None, "temperature": 1.0, "max_tokens": 1, "seed": "0", "sampling": {}}
CALL |= {"grammar": "", "tools": [], "started_at": 0.0, "seconds": 1.0, "messages": [MESSAGE], "messages_before": 0}
DETAIL = {"run": "r", "line": LINE, "task": {HOSTILE: HOSTILE}, "metadata": {HOSTILE: HOSTILE}, "step_rewards": None}
DETAIL |= {"named_rewards": {HOSTILE: None}, "verdicts": [{"name": HOSTILE, "score": 1.0, "reason": HOSTILE}]}
DETAIL |= {"step": None, "trained": True, "why": HOSTILE, "distinct_tokens": 1, "rows": [], "notes": []}
COLUMNS = {"step": [1.0], f"train/{HOSTILE}/reward_mean": [0.5], "train/reward_mean": [0.5]}
SLOW = {"episode_id": HOSTILE, "call": 0, "agent": HOSTILE, "seconds": 1.0, "ended": 0.0}
ANSWERS |= {
    RUN: {"run": HOSTILE, "title": HOSTILE, "folder": "", "state": HOSTILE, "reason": HOSTILE},
    f"{RUN}/metrics": {
        "run": "r",
        "rows": 1,
        "columns": COLUMNS,
        "units": {},
        "formulas": {},
        "damaged": [],
        "last_event": 0,
    },
    f"{RUN}/episodes": {"run": "r", "episodes": [LINE], "following": None, "looked_at": 1},
    f"{RUN}/episodes/train-000000-00": DETAIL | {"calls": [CALL | {"reply": MESSAGE}]},
    f"{RUN}/calls": {"run": "r", "calls": [SLOW]},
}


class Hostile(BaseHTTPRequestHandler):
    """Answers as the control plane, with escapes in every text; to the key `refused` with an error."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        path, _, _ = self.path.partition("?")
        kind, status = "application/json", 200
        if "refused" in self.headers.get("authorization", ""):
            status, body = 400, json.dumps({"error": {"message": HOSTILE, "code": HOSTILE, "type": HOSTILE}})
        elif path.endswith("/events"):
            kind, body = "text/event-stream", STREAM
        elif path.endswith("/logs"):
            kind, body = "text/plain", HOSTILE + "\n"
        elif self.command == "POST" and (path in ("/jobs", "/users", "/keys", "/tenants") or "/keys/" in path):
            body = json.dumps(VIEW if path == "/jobs" else KEY)
        elif self.command == "PATCH":
            body = json.dumps(ANSWERS["/tenants"][0])
        else:
            body = json.dumps(ANSWERS.get(path, VIEW))
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST = do_DELETE = do_PATCH = answer

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


@pytest.fixture
async def folder(tmp_path):
    """Of a run in whose store a worker has left escapes, and of files that have some."""
    config = parse_config({"name": "hostile", "engine": {"kind": "fake"}, "run_dir": str(tmp_path / "run")})
    with open_store(tmp_path / "run") as store:
        task = Task(task_id=HOSTILE, data={"question": HOSTILE})
        for index, request in enumerate(("first", "second")):
            await store.groups.register("train", index, 1, task, 2)
            episode = await claim(store, request)
            if request == "first":
                await end(store, episode, metadata={HOSTILE: HOSTILE})
            else:
                await store.episodes.abort(episode.episode_id, episode.fence, HOSTILE, True)
        await store.log.add_event("warning", {"text": HOSTILE})
        await store.log.add_event("failed", {"reason": HOSTILE})
    (tmp_path / "run" / "config.toml").write_text(dump_config(config))
    (tmp_path / "job.toml").write_text("steps = 1\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": HOSTILE, "question": HOSTILE}) + "\n")
    (tmp_path / "agent.py").write_text(f"def rollout(task, policy):\n    raise ValueError({HOSTILE!r})\n")
    (tmp_path / "hostile.toml").write_text(f"{json.dumps(HOSTILE)} = 1\n")
    (tmp_path / "sums.toml").write_text('environment = { name = "arithmetic" }\n')
    grid = '[scenarios.a]\njob = "sums.toml"\ntoken_budget = 1\nthreshold = 1\n[algorithms.grpo]\n'
    (tmp_path / "compare.toml").write_text(grid)
    (tmp_path / "hostile_grid.toml").write_text(
        grid.replace("[algorithms.grpo]", f"[algorithms.{json.dumps(HOSTILE)}]")
    )
    return tmp_path


CASES: dict[str, list[list[str]]] = {
    "demo": [],  # nothing of others is in it; its console is that of `run`
    "run": [["hostile.toml"]],
    "check": [
        ["hostile.toml"],
        ["job.toml", "--no-trial", "--set", f"policies.policy.model={HOSTILE}"],
        ["job.toml", HOSTILE],
        ["job.toml", f"--{HOSTILE}"],
    ],
    "completion": [["bash"], [HOSTILE]],
    "train": [["hostile.toml", f"{HOSTILE}.py:f"], ["hostile.toml"]],
    "worker": [["os:getcwd", "--job", JOB, "--control", "refused"]],
    "eval": [
        ["tiny-random", "tasks.jsonl", "--rollout", "agent.py:rollout", "--set", "engine.kind=fake"],
        [HOSTILE, "tasks.jsonl", "--rollout", f"{HOSTILE}.py:f"],
    ],
    "compare": [
        ["hostile.toml"],
        ["hostile_grid.toml"],
        ["compare.toml", "--list", "--only", HOSTILE],
        ["compare.toml", "--no-run", "--page", f"{HOSTILE}.md"],
        [HOSTILE],
    ],
    "matrix": [[HOSTILE], ["--add", HOSTILE], ["--add", f"{HOSTILE}=tiny-random"], ["run", "--add", f"a={HOSTILE}"]],
    "judge": [
        ["check", "tasks.jsonl", "--config", "hostile.toml"],
        ["check", HOSTILE, "--config", "job.toml"],
        [HOSTILE],
    ],
    "live": [["forget", "run", HOSTILE], ["versions", HOSTILE, HOSTILE], [HOSTILE]],
    "harness": [[HOSTILE], ["list", HOSTILE], ["check", HOSTILE]],
    "environments": [[HOSTILE]],
    "algorithms": [[HOSTILE]],
    "episodes": [
        ["run"],
        ["run", "train-000000-00"],
        ["run", "train-000000-00", "--text"],
        ["run", "train-000000-00", "--unfold"],
        ["run", "--json"],
        ["run", "train-000000-00", "--json"],
        [HOSTILE],
        ["run", HOSTILE],
        [JOB],
        [JOB, "--json"],
        [JOB, "train-000000-00"],
        [JOB, "train-000000-00", "--json"],
    ],
    "dashboard": [[HOSTILE], ["run", HOSTILE]],
    "track": [["run", HOSTILE], [HOSTILE, "tensorboard"], ["run", "tensorboard"]],
    "top": [["run", "--once"], [HOSTILE], [JOB, "--once"]],
    "doctor": [["run"], ["run", "--json"], [HOSTILE]],
    "cost": [["run"], ["run", "--episodes", "3"], ["run", "--json"], [HOSTILE], [JOB], [JOB, "--user", HOSTILE]],
    "export": [[JOB, "out"], [HOSTILE, "out"]],
    "rotate-key": [[JOB], [HOSTILE]],
    "seat-key": [["run", HOSTILE], [HOSTILE, "white"]],
    "env": [["serve", HOSTILE], ["serve", "gomoku", "--settings", HOSTILE], ["serve", "gomoku", "--key-file", HOSTILE]],
    "base": [[HOSTILE, "--port", "0"], ["tiny-random", "--tenant", HOSTILE]],
    "tinker": [
        [HOSTILE, "--port", "0"],
        ["tiny-random", "--tenant", HOSTILE],
        ["tiny-random", "--adapter", HOSTILE],
    ],
    "serve": [["--rules", "hostile.toml"]],
    "submit": [["job.toml"], ["job.toml", "--watch"], ["hostile.toml"]],
    "jobs": [[]],
    "logs": [[JOB]],
    "cancel": [[JOB]],
    "users": [[], ["add", HOSTILE], ["role", HOSTILE, "member"]],
    "keys": [[], ["make"], ["revoke", HOSTILE]],
    "tenants": [[], ["add", HOSTILE], ["quota", HOSTILE, "--jobs", "1"]],
}
WITH_CONTROL = {"export", "rotate-key", "submit", "jobs", "logs", "cancel", "users", "keys", "tenants"}


def test_every_command_is_among_them():
    (commands,) = [action for action in parser()._actions if hasattr(action, "choices") and action.choices]
    assert set(commands.choices) == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["known", "refused"])
@pytest.mark.parametrize("command", CASES)
def test_no_command_writes_an_escape_of_others(server, folder, monkeypatch, capfdbinary, command, key):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.excepthook", None)  # a command sets its own
    monkeypatch.setenv("PALESTRA_KEY", key)
    monkeypatch.setenv("PALESTRA_URL", server)
    written = b""
    for words in CASES[command]:
        given = [server if word == "refused" else word for word in words]
        with contextlib.suppress(SystemExit):
            main([command, *given])
        out, error = capfdbinary.readouterr()
        written += out + error
        for byte in FORBIDDEN:
            assert byte not in out + error, (words, out, error)
        local = {HOSTILE, "hostile.toml", "run"} & set(words)  # the control plane is not asked
        refused = command in WITH_CONTROL and key == "refused" and not local
        assert not refused or b"pwned" in error
    assert written or not CASES[command]
