"""Recipes of Tinker's cookbook, unmodified but for URL, key, model and data, against `palestra tinker`."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from servers import PALESTRA, environment, free_port

from libraries.child import missing, run
from palestra.models.catalog import model_folder

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(missing(), reason="no .venv-peers/libraries; `make libraries` makes it"),
]
MODEL = "Qwen/Qwen3-8B-Base"  # a name that the cookbook knows a renderer of; here a folder with SmolLM2
SAME = [f"model_name={MODEL}", "log_path=log"]
COMMON = ["renderer_name=role_colon", "lora_rank=8", "behavior_if_log_dir_exists=delete"]


def with_model(folder: Path) -> Path:
    """Give a folder the model by the name that tokenizer and server alike read as a path."""
    (folder / MODEL).parent.mkdir()
    (folder / MODEL).symlink_to(model_folder("SmolLM2-135M-Instruct"))
    return folder


def with_gsm8k(folder: Path) -> None:
    """Let a folder stand in for the data set of the hub: `load_dataset` takes one of its name first."""
    own = folder / "openai/gsm8k"
    own.mkdir(parents=True)
    splits = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (own / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")
    for split in ("train", "test"):
        (own / f"{split}.jsonl").write_text(
            f"{json.dumps({'question': 'Say 3.', 'answer': 'It is said. #### 3'})}\n" * 16
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[dict[str, str]]:
    """What a client of the server has in its environment."""
    folder, port = with_model(tmp_path_factory.mktemp("server")), free_port()
    words = [str(PALESTRA), "tinker", MODEL, "--dir", "state", "--port", str(port), "--threads", "2"]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx2.TransportError):
                httpx2.get(f"{url}/api/v1/healthz")
                break
            time.sleep(0.1)
        yield {"TINKER_BASE_URL": url, "TINKER_API_KEY": (folder / "state" / "keys" / "default").read_text()}
    finally:
        process.terminate()
        process.wait(30)


def recipe(name: str, folder: Path, server: dict[str, str], *arguments: str) -> list[dict[str, float]]:
    """Run a recipe to its end, and return its metrics of each step."""
    code = (
        "import runpy\n"
        f"sys.argv = {['recipe', *SAME, *arguments]!r}\n"
        f"runpy.run_module('tinker_cookbook.recipes.{name}', run_name='__main__')\n"
    )
    run(code, with_model(folder), HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0", OMP_NUM_THREADS="1", **server)
    return [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]


def test_supervised_training_on_conversations_of_a_file(server, tmp_path):
    draw = random.Random(0)
    with (tmp_path / "sums.jsonl").open("w") as file:
        for a, b in [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(64)]:
            said = [{"role": "user", "content": f"{a} + {b} ="}, {"role": "assistant", "content": str(a + b)}]
            file.write(json.dumps({"messages": said}) + "\n")
    options = ["dataset=sums.jsonl", "batch_size=16", "num_epochs=3", "learning_rate=1e-3"]
    rows = recipe("chat_sl.train", tmp_path, server, *COMMON, *options)
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
    kinds = (tmp_path / "log" / "checkpoints.jsonl").read_text()
    assert "/weights/final" in kinds
    assert "/sampler_weights/final" in kinds


def test_reinforcement_learning_of_sums_is_on_policy(server, tmp_path):
    """The recipe compares the logprobs of sampling and of training: an exact server shows rounding alone."""
    options = ["env=arithmetic", "loss_fn=importance_sampling", "max_steps=3", "groups_per_batch=8", "group_size=4"]
    rows = recipe("math_rl.train", tmp_path, server, *COMMON, *options)
    steps = [row for row in rows if "env/all/reward/total" in row]
    assert len(steps) == 3
    for row in steps:
        assert abs(row["optim/kl_sample_train_v1"]) < 0.02
        assert 0.0 <= row["optim/kl_sample_train_v2"] < 0.005


def test_the_loop_without_helpers_runs_to_its_end(server, tmp_path):
    with_gsm8k(tmp_path)
    options = ["loss_fn=importance_sampling", "max_steps=2", "save_every=1", "batch_size=4", "group_size=4"]
    rows = recipe("rl_loop", tmp_path, server, *options, "max_tokens=12")
    assert [row["progress/batch"] for row in rows if "reward/total" in row] == [0, 1]
    saved = [json.loads(line)["name"] for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
    assert saved == ["000001", "final"]
