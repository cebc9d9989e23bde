"""The checks and measurements of a GPU, rehearsed on a CPU with a tiny model: there is no GPU here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[3] / "bench/gpu.py"


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, GPU, *map(str, options)], capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = run("--out", tmp_path / "gpu.md")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "needs a CUDA device" in done.stderr
    assert not (tmp_path / "gpu.md").exists()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_rehearsal_runs_every_part_and_writes_the_table(tmp_path):
    done = run("--cpu", "--out", tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSAL" in text
    for table in ("Against the CPU in float32", "Rollout", "Training step", "Largest model"):
        assert f"**{table}" in text
    for row in ("trainer, float32", "engine, float32", "groups", "different prompts", "fits"):
        assert f"| {row}" in text
    assert text.count("right: ") == 3
