"""What a job reads of models that servers sample from, and what it refuses before a server is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from palestra.config import JobConfig
from palestra.engine.driver import EngineJob
from palestra.errors import ConfigError, ModelError, PalestraError
from palestra.models.adapter_files import write_matrices
from palestra.models.catalog import model_folder
from palestra_engines.external.served_models import ServedModel, read_served_models
from palestra_engines.vllm.driver import VllmDriver


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(model_folder("tiny-random"), made)
    return made


def copied(folder: Path, to: Path, **changes) -> Path:
    """The model with other values in its configuration."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def job_of(model: Path, policy=None, **more) -> JobConfig:
    engine = {"kind": "vllm", "python": "/venv/bin/python"} | more.pop("engine", {})
    return JobConfig.model_validate(
        {"policies": {"p": {"model": str(model)} | (policy or {})}, "engine": engine} | more
    )


def read_models(config: JobConfig) -> list[ServedModel]:
    return read_served_models(EngineJob(config=config), VllmDriver().images)


def refused(config: JobConfig) -> str:
    with pytest.raises(PalestraError) as raised:
        read_models(config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_model_that_only_the_server_has_is_refused_before_the_server_is_started(folder, tmp_path):
    """vLLM may have models of its own, which transformers does not know."""
    unknown = copied(folder, tmp_path / "unknown", model_type="only_in_vllm")
    assert "can't be trained" in refused(job_of(unknown))
    assert "only_in_vllm" in refused(job_of(unknown))
    fixed = copied(folder, tmp_path / "fixed", model_type="gpt_bigcode", architectures=["GPTBigCodeForCausalLM"])
    read_models(job_of(folder))
    assert read_models(job_of(fixed, kind="inference"))  # nothing is trained


def test_another_tokenizer_is_refused(folder, tmp_path):
    small = copied(folder, tmp_path / "small", vocab_size=100)
    assert "has 259 tokens, and its weights 100" in refused(job_of(small))


def test_a_context_that_the_model_does_not_have_is_refused(folder):
    assert "max_context is 100000000" in refused(job_of(folder, {"max_context": 100_000_000}))


@pytest.mark.parametrize(
    "engine", [{"kind": "vllm", "python": "/venv/bin/python"}, {"kind": "sglang", "url": "http://a:30000"}]
)
def test_vision_of_a_model_that_reads_text_only_is_refused_before_a_server_is_started(engine, folder):
    policies = {"p": {"model": str(folder), "vision": "trained"}}
    said = refused(JobConfig.model_validate({"policies": policies, "engine": engine}))
    assert said.startswith("vision is 'trained', and")
    assert said.endswith("reads text only; leave `vision` out")


def test_missing_files_are_named(folder, tmp_path):
    empty = copied(folder, tmp_path / "empty")
    for path in empty.glob("*.safetensors"):
        path.unlink()
    assert "has no model*.safetensors" in refused(job_of(empty))


def test_an_adapter_is_read_with_its_base(folder, tmp_path):
    saved, policy = tmp_path / "adapter", {"adapter": {"rank": 3}}
    (plain,) = read_models(job_of(folder, policy))
    assert (plain.adapter.rank, plain.first_adapter) == (3, None)
    layer = next(name for name in plain.files.shapes if name.endswith("q_proj.weight")).removesuffix(".weight")
    out, width = plain.files.shapes[f"{layer}.weight"]
    saved.mkdir()
    import torch

    matrices = {f"{layer}.lora_A.weight": torch.ones(3, width), f"{layer}.lora_B.weight": torch.ones(out, 3)}
    write_matrices(saved, plain.adapter, str(folder), ["q_proj"], matrices)
    for given in ({"adapter": {"rank": 3}}, {"frozen": True}):
        other = {"model": str(folder), "frozen": "frozen" not in given}
        more = {"policies": {"p": {"model": str(saved)} | given, "q": other}}
        config = JobConfig.model_validate({"engine": {"kind": "vllm", "python": "/venv/bin/python"}} | more)
        found = read_models(config)[0]
        assert found.files.folder == plain.files.folder
        assert (found.adapter.rank, found.first_adapter) == (3, saved)
    with pytest.raises(ConfigError, match=r"engine.kind.*'vllm'.*set"):
        read_models(job_of(saved))


def test_a_damaged_file_is_named(folder, tmp_path):
    broken = copied(folder, tmp_path / "broken")
    next(broken.glob("*.safetensors")).write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(ModelError, match="be read"):
        read_models(job_of(broken))


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"speculators_config": {"verifier": {"name_or_path": "/secret"}}},
        {"speculators_model_type": "eagle3"},
        {"text_config": {"draft": [{"name_or_path": "s3://bucket/key"}]}},
    ],
)
def test_a_model_that_names_another_one_is_refused(folder, tmp_path, elsewhere):
    """vLLM would load that one: any folder of its machine, or an address."""
    said = refused(job_of(copied(folder, tmp_path / "made", **elsewhere)))
    assert "names another model in its config.json (" in said
    assert said.endswith("name a model with its own weights")
