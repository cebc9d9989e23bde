"""What `palestra check` measures in two steps is what the first three steps of the job take, within a factor of 1.5."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from servers import PALESTRA

pytestmark = pytest.mark.slow

JOB = """
name = "estimated"
run_dir = "run"
steps = 3
[policies.policy]
max_context = 512
[policies.policy.sampling]
max_tokens = 32
[rollout]
group_size = 4
groups_per_step = 4
[evaluation]
every_steps = 0
[server]
port = 0
"""
# Most of a step's time is waiting, which takes as long on a busy machine.
SLOW = '[engine]\nkind = "fake"\ndelay_seconds = 1.0\n'
OWN = """
import openai

def rollout(task, endpoint):
    ai = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        reply = ai.chat.completions.create(model=endpoint.model, messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "again"}]
    return float(len(reply) % 2)
"""
JOBS = {
    "one answer": f'{JOB}[environment]\nname = "arithmetic"\n{SLOW}',
    "own rollout": f'{JOB}[tasks]\ntrain = "tasks.jsonl"\n{SLOW}',
    # A model that computes, whose tokens are bytes: the offer of the tool has a thousand.
    "tool": JOB.replace("max_context = 512", 'model = "tiny-random"\nmax_context = 2048')
    + '[environment]\nname = "calculator"\n',
}


def command(folder: Path, *words: str) -> tuple[str, float]:
    """Run a command; return its output, and the most bytes that it and its children had in memory."""
    peak = 0.0
    with (folder / "out.txt").open("w+") as out:
        process = psutil.Popen([str(PALESTRA), *words], cwd=folder, stdout=out, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            try:
                others = sum(child.memory_full_info().pss for child in process.children(recursive=True))
                peak = max(peak, process.memory_info().rss + others)
            except psutil.Error:  # it has ended
                pass
            time.sleep(0.1)
        assert process.returncode == 0
        out.seek(0)
        return out.read(), peak


@pytest.mark.parametrize("kind", JOBS)
def test_two_steps_say_what_three_take(tmp_path, kind):
    (tmp_path / "job.toml").write_text(JOBS[kind])
    tried, run = (), ("run", "job.toml")
    if kind == "own rollout":
        (tmp_path / "tasks.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(64)))
        (tmp_path / "own.py").write_text(OWN)
        tried, run = ("--rollout", "own.py:rollout"), ("train", "own.py:rollout", "--config", "job.toml")
    trial = json.loads(command(tmp_path, "check", "job.toml", "--json", *tried)[0])["trial"]
    _, memory = command(tmp_path, *run)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"]]
    assert (len(trial["rows"]), len(rows)) == (2, 3)
    seconds = [sum(row["time/step_seconds"] for row in each) / len(each) for each in (trial["rows"], rows)]
    estimates = {
        "tokens": (trial["completion_tokens"] / 2, sum(row["rollout/completion_tokens"] for row in rows) / 3),
        "seconds": (seconds[0], seconds[1]),
        "memory": (trial["memory_bytes"], memory),
    }
    # Replies are as long as the job's own: the first step samples the same tokens.
    assert trial["rows"][0]["rollout/completion_tokens"] == rows[0]["rollout/completion_tokens"]
    wrong = {name: pair for name, pair in estimates.items() if not 1 / 1.5 < pair[0] / pair[1] < 1.5}
    assert wrong == {}
