"""What it costs to look at a large run: CPU and memory of each reading, of 10,000 calls and of 1,000,000.

    python bench/large_run.py [--calls 1000000] [--folder FOLDER]

The rows are inserted directly, in a temporary folder; the larger run takes 1.5 GB and a minute. A step has 100 episodes
of five calls; the last episode has one call of 100,000 tokens. Each reading is made six times by one process, which
keeps what it has read: the table has the first, and the median of the others. Commands are processes of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil

from palestra.config import JobConfig, dump_config, parse_config
from palestra.dashboard.conversation import read_call
from palestra.dashboard.episode import episode_answer, read_reading, read_tokens
from palestra.dashboard.progress import describe_run, read_columns
from palestra.dashboard.reader import read_findings
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import find_episodes, read_events_before, read_group, read_slow_calls, read_step
from palestra.learner.metrics import metric_tables
from palestra.store import open_run_store
from palestra.store.codec import chat_row
from palestra.store.search import EpisodeFilter
from palestra.store.tasks import SPLIT
from palestra.trainer import checkpoint
from palestra.types.calls import Chat, PolicyVersion, SamplingParams, VersionSpan
from palestra.types.messages import text_message
from palestra_inspect.top_view import view_of

GROUPS, SIZE, CALLS = 10, 10, 5  # of a step, of a group, of an episode
VALIDATE, HELD_OUT = 10, 16  # steps between two evaluations, and their episodes
PROMPT, LONG = 10_000, 90_000  # tokens of the last episode
STEP, CALL = 60.0, 0.5  # seconds
BEGAN = 1.8e9  # Unix seconds
TIMES = 6
TASK = json.dumps({"question": "what is " + "x" * 200})
KEY = "k" * 40


def main() -> None:
    """Make the runs, read them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the runs are, or are made, and stay")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        parent = arguments.folder or Path(temporary)
        runs = [run_of(parent / str(calls), calls) for calls in (arguments.calls // 100, arguments.calls)]
        print(f"{'CPU of the first reading, and of others':42}" + "".join(f"{run.name + ' calls':>20}" for run in runs))
        for name, work in READINGS.items():
            print(f"{name:42}" + "".join(measured(work, run) for run in runs), flush=True)
        print(f"{'CPU and memory of a process':42}")
        for name, command in COMMANDS.items():
            print(f"{name:42}" + "".join(of_process(command(run), run) for run in runs), flush=True)


def run_of(folder: Path, calls: int) -> Run:
    """Return the run in a folder, which is made if there is none."""
    if not folder.exists():
        folder.mkdir(parents=True)
        make_run(folder, calls)
    return Run(name=f"{calls:,}", folder=folder)


def steps_of(run: Run) -> int:
    """Return how many steps a run has."""
    return int(run.name.replace(",", "")) // (GROUPS * SIZE * CALLS)


def long_of(run: Run) -> str:
    """Return the id of the long episode."""
    return f"train-{steps_of(run) * GROUPS - 1:06d}-{SIZE - 1:02d}"


def filtered(**wanted: Any) -> Callable[[Run], Any]:
    """Return a search for episodes."""
    return lambda run: find_episodes(run, EpisodeFilter(**wanted), None, 50)


READINGS: dict[str, Callable[[Run], Any]] = {
    "palestra top, a look": lambda run: view_of([run], 100, BEGAN),
    "the line of the run": describe_run,
    "metrics of all steps": lambda run: read_columns(run, -1),
    "metrics of the newest step": lambda run: read_columns(run, steps_of(run) - 1),
    "a step": lambda run: read_step(run, steps_of(run) // 2),
    "a group": lambda run: read_group(run, "train", 7),
    "the newest episodes": filtered(),
    "validation episodes": filtered(kind="validation"),
    "discarded episodes": filtered(state="discarded"),
    "episodes of a step": filtered(step=3),
    "a page of a search that finds nothing": filtered(text="zzz"),
    "an episode": lambda run: episode_answer(run, read_reading(run, "train-000003-01")),
    "a call": lambda run: read_call(run, "train-000003-01", 2),
    "an episode of 100,000 tokens": lambda run: episode_answer(run, read_reading(run, long_of(run))),
    "2,000 of its tokens": lambda run: read_tokens(run, read_reading(run, long_of(run)), 0, 50_000, 2000),
    "the slowest calls": read_slow_calls,
    "the newest events": lambda run: read_events_before(run, None, 100),
    "findings": read_findings,
}
COMMANDS: dict[str, Callable[[Run], list[str]]] = {
    "palestra doctor": lambda run: ["doctor", str(run.folder)],
    "palestra episodes": lambda run: ["episodes", str(run.folder)],
    "palestra top --once": lambda run: ["top", "--once", str(run.folder)],
    "palestra run --resume, until it gathers": lambda run: ["run", str(run.folder / "config.toml"), "--resume"],
}


def measured(work: Callable[[Run], Any], run: Run) -> str:
    """Return the milliseconds of CPU of the first reading, and the median of the others, as text."""
    taken = []
    for _ in range(TIMES):
        started = time.process_time()
        work(run)
        taken.append((time.process_time() - started) * 1000)
    return f"{taken[0]:9.0f} {statistics.median(taken[1:]):7.0f} ms"


def of_process(command: list[str], run: Run) -> str:
    """Return the CPU and the most memory of a command, as text; a job is ended when it gathers."""
    with (run.folder.parent / "log").open("w+b") as log:
        process = psutil.Popen(
            [sys.executable, "-c", "from palestra.cli.main import command; command()", *command],
            stdout=log,
            stderr=log,
            env=os.environ | {"PALESTRA_API_KEY": KEY},
        )
        seconds = memory = 0.0
        with httpx2.Client(headers={"authorization": f"Bearer {KEY}"}) as http:
            while process.poll() is None:
                try:
                    memory = max(memory, process.memory_info().rss / 2**20)
                    seconds = sum(process.cpu_times()[:2])
                except psutil.Error:
                    break
                if command[0] == "run" and gathers(http, Path(log.name)):
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.02)
        process.wait()
    return f"{seconds:9.2f} s {memory:5.0f} MiB"


def gathers(http: httpx2.Client, log: Path) -> bool:
    """Return whether the job that writes a log waits for its episodes."""
    found = re.search(r"data plane at (http://[\w.:]+)", log.read_text(errors="replace"))
    return found is not None and "gathering" in http.get(f"{found[1]}/status").json()["phase"]


def make_run(folder: Path, calls: int) -> None:
    """Write a run of so many calls, and the folder of its newest checkpoint, without playing it."""
    steps = calls // (GROUPS * SIZE * CALLS)
    rollout = {"groups_per_step": GROUPS, "group_size": SIZE}
    config = parse_config(
        {
            "name": "large",
            "steps": steps + 10,
            "run_dir": str(folder),
            "engine": {"kind": "fake"},
            "rollout": rollout,
            "server": {"port": 0},
        }
    )
    (folder / "config.toml").write_text(dump_config(config))
    with open_run_store(folder / "run.db", config.rollout):
        pass  # the tables
    connection = sqlite3.connect(folder / "run.db")
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA journal_mode=OFF")
    connection.execute("PRAGMA cache_size=-200000")
    for table, rows in rows_of(config, steps).items():
        first = next(rows)
        insert = f"INSERT INTO {table} ({', '.join(first)}) VALUES ({', '.join('?' * len(first))})"
        connection.executemany(insert, (tuple(row.values()) for row in itertools.chain([first], rows)))
        connection.commit()
    connection.close()
    state = {
        "step": steps,
        "wall_seconds": STEP * steps,
        "config_digest": config.digest(),
        "incarnation": 0,
        "n": steps,
    }
    checkpoint.write(folder / "checkpoints", steps, lambda path: (path / "weights.txt").write_text("1"), state, 2)


def rows_of(config: JobConfig, steps: int) -> dict[str, Iterator[dict[str, Any]]]:
    """Return the rows of each table."""
    return {
        "meta": iter(
            {"key": key, "value": value}
            for key, value in {"tasks_sealed": "yes", "config_digest": config.digest(), "incarnation": "0"}.items()
        ),
        "tasks": (
            {"place": number * SPLIT + place, "split": split, "task_id": f"task-{place}", "data": TASK}
            for number, (split, count) in enumerate((("train", 300), ("validation", HELD_OUT)))
            for place in range(count)
        ),
        "groups": (
            {
                "kind": kind,
                "group_index": group,
                "step": step,
                "task_id": f"task-{group}",
                "size": size,
                "state": "ready",
            }
            for kind, group, step, size in groups(steps)
        ),
        "episodes": (episode for episode in episodes(steps)),
        "chats": chats(steps),
        "manifests": (manifest(config, step) for step in range(1, steps + 1)),
        "metric_rows": ({"step": step, "data": json.dumps(metrics(step))} for step in range(steps + 1)),
        "events": events(steps),
    }


def groups(steps: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield kind, index, step and size of all groups."""
    for step in range(1, steps + 1):
        for place in range(GROUPS):
            yield "train", (step - 1) * GROUPS + place, step, SIZE
    for step in range(0, steps + 1, VALIDATE):
        for place in range(HELD_OUT):
            yield "validation", step // VALIDATE * HELD_OUT + place, step, 1


def episodes(steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of all episodes, of which one in a thousand was discarded, and one in a hundred played twice."""
    for kind, group, step, size in groups(steps):
        for sample in range(size):
            number = group * size + sample
            lost = kind == "train" and number % 1000 == 500
            twice = kind == "train" and number % 100 == 50
            ended = BEGAN + STEP * step + sample
            yield {
                "episode_id": f"{kind}-{group:06d}-{sample:02d}",
                "kind": kind,
                "group_index": group,
                "sample_index": sample,
                "task_id": f"task-{group}",
                "task_data": TASK,
                "state": "discarded" if lost else "completed",
                "fence": 2 if twice else 1,
                "attempts": 2 if twice else 1,
                "lease_seconds": 60.0,
                "worker_id": f"worker-{number % 32}",
                "claim_request_id": f"{kind}-{number}",
                "rewards": None if lost else json.dumps({"agent": number * 7919 % 1000 / 1000}),
                "metadata": json.dumps({"worker": number % 32}),
                "facts": json.dumps({"termination": "done"}),
                "reason": "ValueError: the answer has no number" if lost or twice else None,
                "claimed_at": ended - 10.0,
                "ended_at": ended,
            }


def chats(steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of all calls."""
    rng = np.random.default_rng(0)
    made = [chat_row(chat(index, 40, 24, rng)) for index in range(CALLS)]
    for episode in episodes(steps):
        for fence in range(1, episode["fence"] + 1):
            for row in made[: 2 if fence < episode["fence"] else CALLS]:
                started = episode["claimed_at"] + row["idx"]
                own = {"episode_id": episode["episode_id"], "fence": fence, "started_at": started}
                yield row | own | {"finished_at": started + CALL + episode["sample_index"] / 10}
    long = {"episode_id": f"train-{steps * GROUPS - 1:06d}-{SIZE - 1:02d}", "fence": 1}
    yield chat_row(chat(CALLS, PROMPT, LONG, rng)) | long | {"started_at": BEGAN, "finished_at": BEGAN + 1}


def chat(index: int, prompt: int, count: int, rng: np.random.Generator) -> Chat:
    """Return a call that begins a conversation."""
    return Chat(
        episode_id="",
        fence=1,
        index=index,
        time_step=index,
        agent="agent",
        policy="policy",
        parent=None,
        shared=0,
        shared_messages=0,
        new_messages=(text_message("system", "You answer in few words."), text_message("user", "what is it? ")),
        prompt_tail=rng.integers(97, 123, prompt, dtype=np.int32),
        reply=text_message("assistant", "the answer is not known"),
        completion_ids=rng.integers(97, 123, count, dtype=np.int32),
        logprobs=(-rng.random(count)).astype(np.float32),
        versions=(VersionSpan(PolicyVersion(0, 0), count),),
        finish_reason="stop",
        sampling=SamplingParams(temperature=1.0, max_tokens=16, seed=7),
        request_digest="0" * 64,
        started_at=1.0,
        finished_at=2.0,
    )


def manifest(config: JobConfig, step: int) -> dict[str, Any]:
    """Return the row of a step's batch."""
    names = [
        f"train-{(step - 1) * GROUPS + group:06d}-{sample:02d}" for group in range(GROUPS) for sample in range(SIZE)
    ]
    versions = json.dumps({"policy": [0, step - 1]})
    own = {"step": step, "episode_ids": json.dumps(names), "seed": "0", "config_digest": config.digest()}
    return own | {"versions": versions}


def metrics(step: int) -> Mapping[str, float]:
    """Return the metrics of a step."""
    names = (metric.name for table in metric_tables().values() for metric in table)
    row = {name: step * place % 97 / 1000 for place, name in enumerate(names) if "validation" not in name}
    row |= {"step": float(step), "train/reward_mean": 0.3 + step % 7 / 20, "train/episodes": 100.0}
    row |= {"rollout/sampled_tokens": 12_000.0 * step, "time/step_seconds": STEP, "wall_seconds": STEP * step}
    return row | ({"validation/reward_mean": 0.4} if step % VALIDATE == 0 else {})


def events(steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of all events: of each step, of some dropped groups and checkpoints, and of few warnings."""
    yield event("running", 0, {"step": 0})
    for step in range(1, steps + 1):
        if step % 3 == 0:
            yield event("group_dropped", step, {"step": step, "group_index": step * GROUPS})
        if step % 200 == 0:
            yield event("warning", step, {"step": step, "code": "reward_collapse", "text": "it falls"})
        yield event("step", step, dict(metrics(step)) | {"step": step})
        if step % VALIDATE == 0:
            yield event("saved", step, {"step": step, "path": "checkpoint", "seconds": 1.0})


def event(kind: str, at: int, data: dict[str, Any]) -> dict[str, Any]:
    """Return the row of an event."""
    return {"at": BEGAN + STEP * at, "kind": kind, "step": data["step"], "data": json.dumps(data)}


if __name__ == "__main__":
    main()
