"""The checks and measurements of a GPU, rehearsed on a CPU with a tiny model: there is no GPU here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines.models import vllm_python

from palestra.models.causal_lm import load_causal_lm, load_tokenizer

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


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_rehearsal_runs_every_part_and_writes_the_table(tmp_path):
    done = run("--cpu", "--out", tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSAL" in text
    for table in ("Against the CPU in float32", "Rollout", "Training step", "Largest model"):
        assert f"**{table}" in text
    checked = (
        "trainer, float32",
        "engine, float32",
        "attention, all ancestors, float32",
        "attention, 8 tokens",
        "one rank",
    )
    for row in (*checked, "groups", "different prompts", "fits"):
        assert f"| {row}" in text
    assert text.count("right: ") == 8
    assert "WRONG" not in text
    for left_out in ("the gradient of attention is left out", "CPU offload is left out", "vLLM is neither"):
        assert left_out in text


@pytest.mark.engines
@pytest.mark.timeout(560)
def test_a_rehearsal_of_a_shape_checks_vllm_as_the_engine_of_a_job(tmp_path):
    done = run(
        "--cpu", "--model", "64x2x300", "--vllm", vllm_python(), "--out", tmp_path / "gpu.md", "--only", "served"
    )
    text = (tmp_path / "gpu.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert text.startswith("# 64x2x300 on one device")
    assert "| vLLM as the engine of a job" in text
    assert "right: vLLM as the engine of a job" in text


def test_a_model_of_a_shape_has_random_weights_and_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(GPU.parent))
    works = importlib.import_module("gpu_works")
    assert works.is_shape("576x30x49152")
    assert works.is_shape("64x2")
    assert not any(map(works.is_shape, ("SmolLM2-135M-Instruct", "org/64x2", "64", "64x2x", "64x2x3x4")))
    folder = works.write_shape("192x2x300", tmp_path / "model")
    model = load_causal_lm(str(folder), torch.float32)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes["model.embed_tokens.weight"] == (300, 192)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (192, 192)
    assert "model.layers.2.self_attn.q_proj.weight" not in shapes
    assert load_tokenizer(str(folder)).decode([65, 66])
