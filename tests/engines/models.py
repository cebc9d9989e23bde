"""Tiny models that vLLM's build for CPUs can serve, and jobs that are played on them."""

from __future__ import annotations

import json
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from palestra.config import JobConfig
from palestra.engine.pool.manager import InferenceManager
from palestra.models.catalog import quiet_transformers
from palestra.models.causal_lm import load_tokenizer
from palestra.pictures.blobs import StoredPictures
from palestra.runtime.parts import pooled_parts
from palestra_engines.external.engine import ExternalEngine
from palestra_engines.external.served_policy import ExternalPolicy

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers" / "vllm" / "bin" / "python"
STOP, STOPS = 258, [256, 258]  # the end of a turn; all tokens that end a reply


def vllm_python() -> Path:
    """Return the interpreter that has vLLM, or skip the test where `make vllm` has not installed it."""
    if not PYTHON.exists():
        pytest.skip("`make vllm` has installed no vLLM")
    return PYTHON


def require_torchvision() -> None:
    """Skip the test where vLLM's interpreter has no torchvision, of which no build fits its build for CPUs."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torchvision') is None)"
    if subprocess.run([vllm_python(), "-c", look], check=False).returncode:
        pytest.skip("vLLM has no torchvision, which it needs for this family")


def write_model(folder: Path, **changes) -> Path:
    """Write a tiny model with a head that is tied to its embedding, and the tokenizer of tiny-random."""
    tokenizer = load_tokenizer("tiny-random")
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**(shape | changes))).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def job_of(model: Path | str, run: Path, policy=None, **engine) -> JobConfig:
    settings = {
        "kind": "vllm",
        "python": str(vllm_python()),
        "dtype": "float32",
        "max_batch": 16,
        "threads": 2,
    } | engine
    return JobConfig.model_validate(
        {
            "run_dir": str(run),
            "policies": {"policy": {"model": str(model), "max_context": 2048} | (policy or {})},
            "engine": settings,
        }
    )


@asynccontextmanager
async def started(model: Path, run: Path, policy=None, pictures: StoredPictures | None = None, **engine):
    """The engine of a job, whose servers are ready."""
    config = job_of(model, run, policy, **engine)
    parts = await pooled_parts(config, {}, pictures)
    try:
        yield parts.engine
    finally:
        await parts.engine.close()
        await parts.trainer.close()


def served(pool: InferenceManager) -> ExternalPolicy:
    """What the pool's first worker has of the policy, and of its server."""
    engine = pool._workers[0].engine
    assert isinstance(engine, ExternalEngine)
    return engine._policies["policy"]


def unknown_architecture(folder: Path) -> Path:
    """Write a tiny model that transformers can load, and vLLM can not."""
    made = write_model(folder / "unknown")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    return made
