"""Calls of one episode from many threads and processes give what the same calls in series give."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caller_process import converse
from servers import HERE, SCRIPTED, Job, Plane, Process, until
from unit.building import rows_of

from palestra.store.browsing import browse
from palestra.store.calls import read_trajectory
from palestra.tokens import TokenTrie
from palestra.types.calls import Chat

BRANCHES = ("north", "south", "north", "east", "north", "west")  # three attempts at one of them
EPISODE = "train-000000-00"
SETTINGS = SCRIPTED | {
    "engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.01},
    "evaluation": {"every_steps": 0},
}


def calls_of(job: Job) -> tuple[Chat, ...]:
    with browse(job.run_dir / "run.db") as connection:
        return read_trajectory(connection, EPISODE).chats


def what_was_made(chats: tuple[Chat, ...]) -> tuple[Any, Any]:
    """The trie and the rows, without the numbers that calls got on arrival."""
    trie = TokenTrie(chats)
    nodes = [
        (node.start, node.ids.tolist(), sorted(s.chat.sampling.seed for s in node.samplings)) for node in trie.nodes()
    ]
    rows = [(row.ids.tolist(), row.loss_mask.tolist(), np.nan_to_num(row.logprobs).tolist()) for row in rows_of(chats)]
    return nodes, rows


@pytest.mark.slow
def test_threads_and_processes_at_once_and_one_after_another(tmp_path: Path):
    made = {}
    for how in ("series", "threads and processes"):
        with Job(tmp_path / how, SETTINGS) as job:
            job.start()
            until(lambda: job.query("SELECT * FROM episodes WHERE episode_id = ?", EPISODE), "the episode")
            with Plane(job.url) as plane:
                episode = plane.claim(EPISODE)

            access = (episode["base_url"], episode["api_key"])
            if how == "series":
                for branch in BRANCHES:
                    converse(*access, branch)
            else:
                command = [sys.executable, HERE / "caller_process.py", *access]
                started = [Process.start([*command, *BRANCHES[i::3]], tmp_path / f"caller-{i}.log") for i in range(3)]
                for process in started:
                    assert process.wait() == 0, process.output
            calls = calls_of(job)
        assert len(calls) == 3 * len(BRANCHES)
        assert {call.index for call in calls} == set(range(len(calls)))
        made[how] = what_was_made(calls)
    assert made["series"] == made["threads and processes"]
