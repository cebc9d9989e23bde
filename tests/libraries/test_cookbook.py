"""Recipes of Tinker's cookbook, unmodified but for URL, key, model and data, against `palestra tinker`."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import PALESTRA, environment, free_port

from libraries.child import missing, run
from palestra.models.catalog import model_folder

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(missing(), reason="no .venv-peers/libraries; `make libraries` makes it"),
]
SMALL, TINY = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-30B-A3B-Base"  # names that the cookbook knows a renderer of
MODELS = {SMALL: "SmolLM2-135M-Instruct", TINY: "tiny-random"}  # what is in the folders of these names here
WITHOUT_RANK = ["renderer_name=role_colon", "behavior_if_log_dir_exists=delete"]
COMMON = [*WITHOUT_RANK, "lora_rank=8"]


def with_models(folder: Path) -> Path:
    """Give a folder the models by the names that tokenizer and server alike read as paths."""
    for name, model in MODELS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(model_folder(model))
    return folder


def with_data(folder: Path, name: str, **splits: list[dict[str, Any]]) -> None:
    """Let a folder stand in for a data set of the hub: `load_dataset` takes one of its name first."""
    own = folder / name
    own.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (own / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    for split, rows in splits.items():
        (own / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def with_gsm8k(folder: Path, rows: int) -> None:
    """Give a folder problems as in GSM8K."""
    problems = [{"question": "Say 3.", "answer": "It is said. #### 3"}] * rows
    with_data(folder, "openai/gsm8k", train=problems, test=problems)


def sums(count: int) -> list[tuple[str, str]]:
    """Return questions with their answers."""
    draw = random.Random(0)
    numbers = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(count)]
    return [(f"{a} + {b} =", str(a + b)) for a, b in numbers]


def conversations(count: int) -> list[dict[str, Any]]:
    """Return rows with messages."""
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in sums(count)
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[dict[str, str]]:
    """What a client of the server has in its environment."""
    folder, port = with_models(tmp_path_factory.mktemp("server")), free_port()
    words = [str(PALESTRA), "tinker", *MODELS, "--dir", "state", "--port", str(port), "--threads", "2"]
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


def recipe(
    name: str, folder: Path, server: dict[str, str], *arguments: str, model: str = TINY
) -> list[dict[str, float]]:
    """Run a recipe to its end, and return its metrics of each step."""
    code = (
        "import runpy\n"
        f"sys.argv = {['recipe', f'model_name={model}', 'log_path=log', *arguments]!r}\n"
        f"runpy.run_module('tinker_cookbook.recipes.{name}', run_name='__main__')\n"
    )
    alone = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "TINKER_TELEMETRY": "0"}
    run(code, with_models(folder), OMP_NUM_THREADS="1", **alone, **server)
    return [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]


def saved(folder: Path) -> list[str]:
    """Return the names of a recipe's checkpoints."""
    return [json.loads(line)["name"] for line in (folder / "log" / "checkpoints.jsonl").read_text().splitlines()]


def on_policy_steps(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the steps, in which logprobs of sampling and of training differ by rounding alone."""
    steps = [row for row in rows if "env/all/reward/total" in row]
    for row in steps:
        assert abs(row["optim/kl_sample_train_v1"]) < 0.02
        assert 0.0 <= row["optim/kl_sample_train_v2"] < 0.005
    return steps


def test_supervised_training_on_conversations_of_a_file(server, tmp_path):
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in conversations(64)))
    options = ["dataset=sums.jsonl", "batch_size=16", "num_epochs=3", "learning_rate=1e-3"]
    rows = recipe("chat_sl.train", tmp_path, server, *COMMON, *options, model=SMALL)
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
    kinds = (tmp_path / "log" / "checkpoints.jsonl").read_text()
    assert "/weights/final" in kinds
    assert "/sampler_weights/final" in kinds


def test_the_supervised_template_scores_in_its_evaluation_what_it_trains_on(server, tmp_path):
    """The recipe fixes 128 conversations a step; its evaluation samples nothing, and has the sampler score them."""
    rows = conversations(128)
    with_data(tmp_path, "HuggingFaceH4/no_robots", train=rows, test=rows)
    first, second = recipe("sl_basic", tmp_path, server, "num_epochs=2", "learning_rate=1e-3")
    assert first["test/nll"] == pytest.approx(first["train_mean_nll"], abs=1e-3)
    assert second["train_mean_nll"] < first["train_mean_nll"] - 0.04
    assert saved(tmp_path) == ["final"]


def test_reinforcement_learning_of_sums_is_on_policy(server, tmp_path):
    options = ["env=arithmetic", "loss_fn=importance_sampling", "max_steps=3", "groups_per_batch=8", "group_size=4"]
    assert len(on_policy_steps(recipe("math_rl.train", tmp_path, server, *COMMON, *options, model=SMALL))) == 3


def test_the_template_of_reinforcement_learning_runs_to_its_end(server, tmp_path):
    """The recipe fixes 16 samples of each problem, and at most 128 problems a step."""
    with_gsm8k(tmp_path, 2)
    assert len(on_policy_steps(recipe("rl_basic", tmp_path, server, "num_epochs=2", "max_tokens=12"))) == 2
    assert saved(tmp_path) == ["final"]


def test_the_loop_without_helpers_runs_to_its_end(server, tmp_path):
    with_gsm8k(tmp_path, 16)
    options = ["loss_fn=importance_sampling", "max_steps=2", "save_every=1", "batch_size=4", "group_size=4"]
    rows = recipe("rl_loop", tmp_path, server, *options, "max_tokens=12", model=SMALL)
    assert [row["progress/batch"] for row in rows if "reward/total" in row] == [0, 1]
    assert saved(tmp_path) == ["000001", "final"]


def test_a_game_of_many_turns_is_on_policy(server, tmp_path):
    options = ["batch_size=2", "group_size=2", "max_tokens=8", "eval_every=0", "max_steps=2"]
    steps = on_policy_steps(recipe("multiplayer_rl.guess_number.train", tmp_path, server, *WITHOUT_RANK, *options))
    assert len(steps) == 2
    assert all(1 < row["env/all/turns_per_episode"] <= 10 for row in steps)


def test_a_preference_among_samples_is_on_policy_and_scored_after_the_step(server, tmp_path):
    options = ["batch_size=2", "group_size=4", "max_tokens=24", "eval_every=0", "max_steps=2"]
    steps = on_policy_steps(recipe("preference.shorter.train", tmp_path, server, *WITHOUT_RANK, *options))
    assert len(steps) == 2
    assert all(0.0 <= row["kl_pre_post_v2"] < 0.05 for row in steps)


def test_direct_preference_optimization_begins_at_its_reference(server, tmp_path):
    """The reference's logprobs are the sampler's, and the gradient is of a loss in the client."""
    pairs = [
        {
            "chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}",
            "rejected": f"\n\nHuman: {question}\n\nAssistant: No.",
        }
        for question, answer in sums(16)
    ]
    with_data(tmp_path, "Anthropic/hh-rlhf", train=pairs, test=pairs[:4])
    options = ["batch_size=8", "max_steps=2", "learning_rate=1e-3"]
    first, second = recipe("preference.dpo.train", tmp_path, server, *WITHOUT_RANK, *options)
    assert first["dpo_loss"] == pytest.approx(math.log(2.0), abs=1e-3)
    assert second["dpo_loss"] < first["dpo_loss"] - 0.01
    assert saved(tmp_path) == ["final"]
