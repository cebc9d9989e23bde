"""The checks and measurements of a GPU, in a dry run on a CPU with tiny models: there is no GPU here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines.models import vllm_python

from palestra.models.causal_lm import load_causal_lm, load_tokenizer

GPU = Path(__file__).parents[3] / "bench/gpu.py"


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, GPU, *map(str, options)], capture_output=True, text=True, timeout=880)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = run("--out", tmp_path / "gpu.json")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "needs a CUDA device" in done.stderr
    assert not (tmp_path / "gpu.json").exists()


def test_the_table_has_every_question_and_says_which_was_not_asked(tmp_path):
    answers = {"a card": {"questions": {"shared": {"date": "2026-11-28", "found": {"times": 2.5}, "problem": "late"}}}}
    (tmp_path / "gpu.json").write_text(json.dumps(answers | {"dry run on a CPU": answers["a card"]}))
    lines = run("--table", "--out", tmp_path / "gpu.json").stdout.splitlines()
    listed = run("--list").stdout.splitlines()
    assert len(lines) == 2 + len(listed)
    assert [line for line in lines[2:] if "| not run |" not in line] == [
        line
        for line in lines
        if line.startswith("| `shared`") and line.endswith("| a card, 2026-11-28 | times: 2.5; late |")
    ]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_dry_run_answers_every_question_that_needs_no_vllm(tmp_path):
    done = run("--dry-run", "--seconds", 150, "--out", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    (asked,) = json.loads((tmp_path / "gpu.json").read_text()).values()
    assert len(asked["questions"]) == 16
    found = {name: answer["found"] for name, answer in asked["questions"].items()}
    assert found["equal"]["equal"]
    assert found["killed"]["right"]
    assert found["correctness"]["equal ids"] == 1.0


@pytest.mark.engines
@pytest.mark.timeout(560)
def test_a_dry_run_compares_vllm_as_the_engine_of_a_job_with_the_trainer(tmp_path):
    out = tmp_path / "gpu.json"
    done = run("served", "--dry-run", "--vllm", vllm_python(), "--seconds", 500, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    (asked,) = json.loads(out.read_text()).values()
    found = asked["questions"]["served"]["found"]
    assert max(found["gap"], found["gap after new weights"]) < 0.05
    assert found["gap to the weights before"] > 2 * found["gap after new weights"]


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
