"""A job that trains an adapter, and all that its checkpoint can be used for afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import palestra
from palestra import JobConfig
from palestra.cli.main import main
from palestra.errors import ConfigError
from palestra.models.catalog import model_folder
from palestra.runtime.local import local_job

# PEFT reads an attribute that this version of transformers warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
TINY = "tiny-random"
TASKS = [{"id": f"t{n}", "text": f"say {n}"} for n in range(6)]
LORA = {"rank": 4, "alpha": 8.0}


def config(folder: Path, adapter: dict[str, Any] | None = LORA, model: str = TINY, **changes: Any) -> JobConfig:
    policy = {"model": model, "max_context": 256, "sampling": {"max_tokens": 8}, "adapter": adapter}
    return JobConfig.model_validate(
        {
            "name": "adapter",
            "steps": 2,
            "deterministic": True,
            "run_dir": folder,
            "server": {"port": 0},
            "policies": {"policy": policy | {"optimizer": {"learning_rate": 3e-2}}},
            "rollout": {"group_size": 3, "groups_per_step": 2},
            "evaluation": {"every_steps": 0},
            "engine": {"threads": 1, "dtype": "float32"},
            "trainer": {"threads": 1, "dtype": "float32"},
        }
        | changes
    )


async def rollout(task, endpoint):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": task["text"]}], max_tokens=8
        )
    text = reply.choices[0].message.content or ""
    return (sum(map(ord, text)) % 7) / 7


def said(model: str | Path, adapter: dict[str, Any] | None = None) -> list[list[int]]:
    """What a model says to each task, greedily."""
    settings = config(Path("unused"), adapter).model_copy(update={"run_dir": None})
    found = palestra.evaluate(rollout, TASKS, settings, model=str(model), trajectories=True, quiet=True)
    return [chat.completion_ids.tolist() for one in found.outcomes for chat in one.trajectory.chats]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "run"
    palestra.train(rollout, TASKS, config(folder), quiet=True)
    return folder


@pytest.fixture(scope="module")
def checkpoint(run) -> Path:
    return run / "checkpoints" / "step-000002"


@pytest.fixture(scope="module")
def learned(checkpoint) -> list[list[int]]:
    """What the checkpoint says."""
    return said(checkpoint)


@pytest.mark.slow
def test_the_checkpoint_is_an_adapter_that_has_learned(run, checkpoint, learned):
    files = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "checkpoint.json"} <= files
    assert not {name for name in files if name.startswith(("model", "config."))}
    written = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["r"], written["lora_alpha"]) == (TINY, 4, 8)
    assert learned != said(TINY)
    assert learned == said(checkpoint, LORA) == said(run)


@pytest.mark.slow
def test_a_merged_export_is_whole_weights_that_say_the_same(run, learned, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "copied")]) == 0
    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    assert "the adapter of tiny-random after step 2" in (printed := capsys.readouterr().out)
    assert "with its adapter merged" in printed
    assert not list((tmp_path / "copied").glob("optimizer-*"))
    ids = torch.arange(3, 40)[None]

    def load(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    with torch.inference_mode():
        whole = load(tmp_path / "merged")(ids).logits
        beside = PeftModel.from_pretrained(load(model_folder(TINY)), tmp_path / "copied").eval()(ids).logits
        base = load(model_folder(TINY))(ids).logits
    torch.testing.assert_close(whole, beside, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole, base, atol=1e-3)
    assert said(tmp_path / "merged") == learned


async def test_it_is_served_and_shares_its_base_with_other_adapters(checkpoint):
    model = {"max_context": 256, "sampling": {"max_tokens": 8}}
    policies = {"one": model | {"model": str(checkpoint)}, "bare": model | {"model": TINY}}
    settings = config(checkpoint.parents[1].parent / "served", kind="inference", policies=policies)
    async with local_job(settings, lambda kind, data: None) as job:
        runners = job.opened.engine._core.policies
        weights = [
            {name: p.data_ptr() for name, p in runners[which].model.named_parameters() if ".lora_" not in name}
            for which in policies
        ]
        assert weights[0] == weights[1]
        assert runners["one"].model.adapter is not None


@pytest.mark.slow
def test_it_is_the_opponent_and_the_beginning_of_another_run(checkpoint, tmp_path):
    opponent = {"model": str(checkpoint), "max_context": 256, "frozen": True}
    policies = config(tmp_path).model_dump(mode="json")["policies"] | {"before": opponent}
    result = palestra.train(rollout, TASKS, config(tmp_path / "beside", policies=policies), quiet=True)
    assert result.checkpoint is not None
    again = palestra.train(rollout, TASKS, config(tmp_path / "again", model=str(checkpoint)), quiet=True)
    written = json.loads((again.checkpoint / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == TINY
    whole = palestra.train(rollout, TASKS, config(tmp_path / "whole", None, model=str(checkpoint)), quiet=True)
    assert (whole.checkpoint / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"adapter\.rank.*8.*4"):
        palestra.train(rollout, TASKS, config(tmp_path / "other", {"rank": 8}, str(checkpoint)), quiet=True)


@pytest.mark.parametrize(
    ("adapter", "match"),
    [({"rank": 40}, "adapter.rank is 40, and the layer .* at most"), ({"targets": ["query"]}, "none of the model's")],
)
def test_an_adapter_that_does_not_fit_ends_the_job_at_its_start(tmp_path, adapter, match):
    with pytest.raises(ConfigError, match=match):
        palestra.train(rollout, TASKS, config(tmp_path / "run", adapter), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_reference_and_a_critic_take_no_further_copy_of_the_weights(tmp_path, algorithm):
    kl = {"coefficient": 0.1}
    result = palestra.train(
        rollout, TASKS, config(tmp_path / "run", algorithm={"name": algorithm, "kl": kl}, steps=1), quiet=True
    )
    row = result.metrics[-1]
    assert row["train/reference_kl_k3"] == pytest.approx(0.0, abs=1e-6)  # the adapter changes nothing before the step
    names = {path.name for path in result.checkpoint.glob("*.safetensors")}
    assert ("critic-weights-0.safetensors" in names) == (algorithm == "ppo")
    assert sum(path.stat().st_size for path in result.checkpoint.glob("*.safetensors")) < 1e6
