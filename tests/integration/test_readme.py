"""Every Python snippet of README.md runs as it stands, against a job with a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers import SCRIPTED, Job, environment

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
TINY = """palestra.JobConfig.model_validate({
    "steps": 1,
    "policies": {"policy": {"model": "tiny-random", "max_context": 512, "sampling": {"max_tokens": 8}}},
    "rollout": {"group_size": 2, "groups_per_step": 1},
    "engine": {"threads": 1}, "trainer": {"threads": 1},
})"""


def executed(text: str, folder: Path) -> str:
    (folder / "snippet.py").write_text(text)
    command = [sys.executable, "snippet.py"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_word(word: str) -> str:
    (snippet,) = (text for text in SNIPPETS if word in text)
    return snippet


WAYS = ("reward=reward", "train(rollout", "environment=Gomoku", "Client(")


def test_the_readme_has_the_four_ways():
    assert [sum(word in text for text in SNIPPETS) for word in WAYS] == [1, 1, 1, 1]
    assert len(SNIPPETS) == 4


def test_the_first_script_has_at_most_15_lines():
    lines = [line for line in with_word(WAYS[0]).splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_snippet_with_a_client(tmp_path):
    snippet = with_word("Client(")
    with Job(tmp_path, SCRIPTED, tasks=(), validation=()) as job:
        server = job.start()
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "job").symlink_to(job.run_dir)
        assert "http://127.0.0.1:7411" in snippet
        executed(snippet.replace("http://127.0.0.1:7411", job.url), tmp_path)
        assert server.wait() == 0
        assert {row["state"] for row in job.query("SELECT state FROM episodes")} == {"completed"}
        assert list(job.manifests()) == [1, 2, 3]


@pytest.mark.parametrize("word", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:3])])
def test_the_snippets_that_train_in_one_process(tmp_path, word):
    snippet, count = re.subn(r"palestra\.JobConfig\(steps=\d+\)|steps=20(?=,\n)", in_small, with_word(word))
    assert count == 1
    snippet = snippet.replace('"SmolLM2-135M-Instruct"', '"tiny-random"')
    said = executed(snippet, tmp_path)
    assert "step 1/1" in said
    assert (tmp_path / "runs" / "job" / "checkpoints" / "step-000001" / "model.safetensors").exists()


def in_small(found: re.Match[str]) -> str:
    """What stands in a test's script for the settings of the README's."""
    return TINY if found[0].startswith("palestra") else 'steps=1, rollout={"group_size": 2, "groups_per_step": 1}'
