"""How long the page waits for what it shows of a large run: 100,000 episodes, one of which has 100,000 tokens.

    python bench/page_reads.py

The run is made in a temporary folder, in about 20 seconds. Each reading is made five times; the table has the first,
for which nothing is in memory but what the operating system has, and the median of the others.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from palestra.config import dump_config, parse_config
from palestra.dashboard.episode import episode_answer, read_reading, read_tokens
from palestra.dashboard.progress import describe_run, read_columns
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import find_episodes, read_group, read_step
from palestra.store import RunStore, open_run_store
from palestra.store.codec import chat_row
from palestra.store.search import EpisodeFilter
from palestra.types.calls import Chat, PolicyVersion, SamplingParams, VersionSpan
from palestra.types.messages import text_message
from palestra.types.records import BatchManifest

GROUPS, SIZE, PER_STEP = 12_500, 8, 8
PROMPT, LONG = 10_000, 90_000  # tokens of the long episode
TIMES = 5


def main() -> None:
    """Make the run, read it, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder))
        long = f"train-{GROUPS - 1:06d}-00"
        reading = read_reading(run, long)
        readings: dict[str, Callable[[], Any]] = {
            "the line of the run": lambda: describe_run(run),
            "all metrics of 1,563 steps": lambda: read_columns(run, -1),
            "the newest 50 of 100,000 episodes": lambda: find_episodes(run, EpisodeFilter(), None, 50),
            "one page of a search that finds nothing": lambda: find_episodes(run, EpisodeFilter(text="zzz"), None, 50),
            "a step of 64 episodes": lambda: read_step(run, 1500),
            "a group of 8": lambda: read_group(run, "train", 100),
            "the episode of 100,000 tokens": lambda: episode_answer(run, read_reading(run, long)),
            "2,000 of its tokens": lambda: read_tokens(run, reading, 0, 50_000, 2000),
        }
        print(f"{'reading':42} {'first':>8} {'others':>8}")
        for name, work in readings.items():
            taken = []
            for _ in range(TIMES):
                started = time.perf_counter()
                work()
                taken.append((time.perf_counter() - started) * 1000)
            print(f"{name:42} {taken[0]:5.0f} ms {statistics.median(taken[1:]):5.0f} ms")


def make_run(folder: Path) -> Run:
    """Write a run of `GROUPS` groups, without playing it."""
    config = parse_config({"name": "large", "steps": 2000, "engine": {"kind": "fake"}})
    (folder / "config.toml").write_text(dump_config(config))
    with open_run_store(folder / "run.db", config.rollout, config.store):
        pass  # the tables
    connection = sqlite3.connect(folder / "run.db")
    connection.executemany(
        "INSERT INTO groups (kind, group_index, step, task_id, size, state) VALUES ('train', ?, ?, ?, ?, 'ready')",
        [(group, group // PER_STEP + 1, f"task-{group}", SIZE) for group in range(GROUPS)],
    )
    rng = np.random.default_rng(0)
    task = json.dumps({"question": "what is " + "x" * 200})
    connection.executemany(
        "INSERT INTO episodes (episode_id, kind, group_index, sample_index, task_id, task_data, state, fence, "
        "attempts, lease_seconds, rewards, metadata) VALUES (?, 'train', ?, ?, ?, ?, 'completed', 1, 1, 60, ?, ?)",
        [
            (name, group, sample, f"task-{group}", task, json.dumps({"agent": float(rng.random())}), "{}")
            for name, group, sample in names()
        ],
    )
    rows = (chat_row(chat(name, name == f"train-{GROUPS - 1:06d}-00", rng)) for name, _, _ in names())
    first = next(rows)
    insert = f"INSERT INTO chats ({', '.join(first)}) VALUES ({', '.join(f':{column}' for column in first)})"
    connection.execute(insert, first)
    connection.executemany(insert, rows)
    connection.commit()
    connection.close()
    with open_run_store(folder / "run.db", config.rollout, config.store) as store:
        asyncio.run(log(store))
    return Run(name="large", folder=folder)


def names() -> Iterator[tuple[str, int, int]]:
    """Yield (episode id, group index, sample index) of all episodes."""
    for group in range(GROUPS):
        for sample in range(SIZE):
            yield f"train-{group:06d}-{sample:02d}", group, sample


def chat(name: str, long: bool, rng: np.random.Generator) -> Chat:
    """Return the only call of an episode."""
    count = LONG if long else 5
    return Chat(
        episode_id=name,
        fence=1,
        index=0,
        time_step=0,
        agent="agent",
        policy="policy",
        parent=None,
        shared=0,
        shared_messages=0,
        new_messages=(text_message("user", "hello"),),
        prompt_tail=np.full(PROMPT if long else 20, 97, np.int32),
        reply=text_message("assistant", "reply"),
        completion_ids=(np.arange(count) % 26 + 97).astype(np.int32),
        logprobs=(-rng.random(count)).astype(np.float32),
        versions=(VersionSpan(PolicyVersion(0, 0), count),),
        finish_reason="stop",
        sampling=SamplingParams(temperature=1.0, max_tokens=16, seed=7),
        request_digest="digest",
        started_at=1.0,
        finished_at=2.0,
    )


async def log(store: RunStore) -> None:
    """Write manifests, metrics and events."""
    for step in range(1, -(-GROUPS // PER_STEP) + 1):
        first = (step - 1) * PER_STEP
        members = [
            f"train-{group:06d}-{sample:02d}"
            for group in range(first, min(first + PER_STEP, GROUPS))
            for sample in range(SIZE)
        ]
        manifest = BatchManifest(
            step=step,
            versions={"policy": PolicyVersion(0, step - 1)},
            episode_ids=tuple(members),
            seed=0,
            config_digest="digest",
        )
        await store.log.commit_manifest(manifest)
        row = {
            "step": float(step),
            "train/reward_mean": step / 1600,
            "time/step_seconds": 3.0,
            "wall_seconds": 3.0 * step,
        }
        await store.log.put_metrics(step, row | {f"train/number_{place}": float(step * place) for place in range(40)})
        await store.log.add_event("step", row)


if __name__ == "__main__":
    main()
