"""`palestra.train` on a real, tiny model: HTTP, the openai client, gradients, checkpoints."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

import palestra
from palestra import JobConfig


def config(folder, **changes):
    return JobConfig.model_validate(
        {
            "name": "tiny",
            "steps": 2,
            "run_dir": folder,
            "policies": {"policy": {"model": "tiny-random", "max_context": 256, "sampling": {"max_tokens": 8}}},
            "rollout": {"group_size": 4, "groups_per_step": 2},
            "evaluation": {"every_steps": 1},
            "engine": {"threads": 1},
            "trainer": {"threads": 1},
        }
        | changes
    )


async def rollout(task, policy):
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        reply = await client.chat.completions.create(
            model=policy.model, messages=[{"role": "user", "content": task["text"]}], max_tokens=8
        )
    return float(len(reply.choices[0].message.content) % 3)


TASKS = [{"text": f"say {i}"} for i in range(5)]


def test_trains_saves_and_reports(tmp_path):
    result = palestra.train(rollout, TASKS, config(tmp_path / "run"), validation_tasks=TASKS[:2], quiet=True)
    assert result.state == "completed"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["train/trained_tokens"] > 0
    assert {"train/reward_mean", "validation/reward_mean"} <= rows[-1].keys()
    assert (tmp_path / "run" / "curve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_tasks_that_can_be_read_only_once_are_not_lost_to_the_check(tmp_path):
    settings = config(tmp_path / "run", steps=1, engine={"kind": "fake"})
    tasks, held = (task for task in TASKS), (task for task in TASKS[:2])
    result = palestra.train(lambda task, policy: 1.0, tasks, settings, validation_tasks=held, quiet=True)
    assert (result.state, result.metrics[-1]["validation/total"]) == ("completed", 2)


@pytest.mark.slow
def test_the_checkpoint_loads_in_transformers_and_differs_from_the_start(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = palestra.train(rollout, TASKS, config(tmp_path / "run"), quiet=True)
    trained = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    AutoTokenizer.from_pretrained(result.checkpoint)
    from palestra.models.catalog import model_folder

    before = AutoModelForCausalLM.from_pretrained(model_folder("tiny-random"))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters(), strict=True))


def test_a_rollout_that_always_fails_ends_the_run_with_its_error(tmp_path):
    async def broken(task, policy):
        raise ZeroDivisionError("no reward today")

    with pytest.raises(ZeroDivisionError, match="reward today"):
        palestra.train(broken, TASKS, config(tmp_path / "run"), quiet=True)


@pytest.mark.slow
def test_what_was_trained_before_a_rollout_began_to_fail_is_saved(tmp_path):
    played = itertools.count()

    def rollout(task, endpoint):
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as ai:
            ai.chat.completions.create(model=endpoint.model, messages=[{"role": "user", "content": task["text"]}])
        if (number := next(played)) >= 8:
            raise ValueError("the world has ended")
        return float(number % 2)

    settings = config(tmp_path / "run", engine={"kind": "fake"}, checkpoint={"every_steps": 10})
    with pytest.raises(ValueError, match=r"world.*ended"):
        palestra.train(rollout, TASKS, settings, quiet=True)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.slow
def test_the_tiny_model_needs_no_setting_but_its_name(tmp_path):
    """The default context is more than it has."""
    settings = {"steps": 1, "run_dir": tmp_path / "run", "evaluation": {"every_steps": 0}}
    small = {"rollout": {"group_size": 2, "groups_per_step": 1}, "policies": {"policy": {"model": "tiny-random"}}}
    result = palestra.train(rollout, TASKS, JobConfig.model_validate(settings | small), quiet=True)
    assert result.state == "completed"
    assert "max_context = 2048" in (result.run_dir / "config.toml").read_text()
    again = JobConfig.model_validate(settings | small | {"steps": 2})
    assert palestra.train(rollout, TASKS, again, quiet=True, resume=True).state == "completed"


@pytest.mark.slow
def test_a_learning_rate_that_makes_the_entropy_collapse_is_warned_of(tmp_path, capsys):
    policy = {"model": "tiny-random", "max_context": 256, "sampling": {"max_tokens": 8}}
    policies = {"policy": policy | {"optimizer": {"learning_rate": 10.0}}}

    async def varied(task, policy):
        await rollout(task, policy)
        varied.calls += 1
        return float(varied.calls % 2)

    varied.calls = 0
    result = palestra.train(varied, TASKS, config(tmp_path / "run", policies=policies, steps=3))
    entropies = [row["train/entropy"] for row in result.metrics if "train/entropy" in row]
    assert entropies[1] < 0.1 * entropies[0]
    assert "warning: the entropy of the policy fell from" in capsys.readouterr().out


@pytest.mark.slow
def test_an_algorithm_and_a_loss_of_ones_own_train_and_their_metrics_are_written_by_their_names(tmp_path):
    """Against the loss of its definition: the policy is on its own samples, so the numbers follow from the rows."""
    own = {"name": "unit.algorithms.own_algorithm:Surprise"}
    result = palestra.train(rollout, TASKS, config(tmp_path / "run", algorithm=own), quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.state == "completed"
    assert result.checkpoint is not None
    for row in rows[1:]:
        assert {"train/surprise_mean", "train/surprise_max", "train/advantage_sum", "train/baseline"} <= row.keys()
        assert {"train/ratio_mean", "train/clip_fraction", "train/calls_without_peers"}.isdisjoint(row)
        assert row["train/baseline"] == pytest.approx(row["train/reward_mean"])
        assert 0 < row["train/surprise_mean"] < row["train/surprise_max"]
        assert row["train/groups_zero_variance"] == 0  # it learns from every group
        assert row["train/trained_tokens"] == row["rollout/completion_tokens"]
        assert row["train/grad_norm"] > 0


def test_a_class_of_ones_own_is_refused_by_a_server(tmp_path):
    from palestra.errors import ConfigError
    from palestra.http.server import run_on_uvloop
    from palestra.runtime.local import local_job

    async def serve() -> None:
        own = {"name": "unit.algorithms.own_algorithm:Surprise"}
        server = {"port": 0}
        async with local_job(config(tmp_path / "run", algorithm=own, server=server), lambda kind, data: None):
            pass

    with pytest.raises(ConfigError, match=r"palestra\.train"):
        run_on_uvloop(serve())
    assert not (tmp_path / "run").exists()


MEMORY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import palestra
from integration.test_train import TASKS, config, rollout

palestra.train(rollout, tasks=TASKS, config=config(sys.argv[2], steps=8, evaluation={"every_steps": 0}), quiet=True)
found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(found["VmHWM"].split()[0]) / 1024)
"""


@pytest.mark.slow
def test_a_job_with_a_tiny_model_takes_little_more_memory_than_its_libraries(tmp_path):
    def peak(script: str) -> float:
        words = [sys.executable, "-c", script, str(Path(__file__).parents[1]), str(tmp_path / "run")]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return float(done.stdout.splitlines()[-1])

    libraries = "import matplotlib.pyplot, openai, renderers, palestra.models.causal_lm, palestra.runtime.local\n"
    most, before = peak(MEMORY), peak(libraries + MEMORY.replace("palestra.train(", "(lambda *a, **b: None)("))
    print(f"{most:.0f} MiB, libraries {before:.0f} MiB")
    assert most < 600
    assert most - before < 110
