"""Two policies that are trained in one job: in process and over HTTP, alternate updates, kills between their saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from outcome import assert_complete, assert_same_metrics
from servers import SCRIPTED, TINY, Job, run_through
from test_two_policies import TASKS, Talk, config, digest_of, other_model  # noqa: F401 - a fixture

import palestra
from palestra import RolloutSpec
from palestra.config import UpdatesConfig, load_config
from palestra.errors import ConfigError
from palestra.runtime.local import local_job
from palestra.types.records import Task

ROLES = {"opponent": "black"}
LEARNS = {"optimizer": {"learning_rate": 1e-2}}


async def played(settings, seen: list[tuple[str, str]] | None = None) -> dict[str, Any]:
    """What a job of two has left: digests of the engine before and after, rows, manifests, trajectories."""
    async with local_job(settings, lambda kind, data: None, RolloutSpec(environment=Talk)) as job:
        await job.plane.store.tasks.push("train", [Task(task_id=t["id"], data=t) for t in TASKS], "c")
        await job.plane.store.tasks.seal()
        trainer = job._work._trainer
        for name in ("untrainable", "forward", "forward_backward", "optim_step", "weights"):
            setattr(trainer, name, _watched(name, getattr(trainer, name), seen if seen is not None else []))
        before = {name: digest_of(job.opened.engine, name) for name in settings.policies}
        await job.run()
        manifests = [await job.plane.store.log.manifest(step) for step in range(1, settings.steps + 1)]
        return {
            "before": before,
            "after": {name: digest_of(job.opened.engine, name) for name in settings.policies},
            "rows": await job.plane.store.log.metrics(),
            "versions": {n: str(v) for n, v in job.plane.sessions.context.policies.versions.items()},
            "manifests": manifests,
            "played": [await job.plane.store.calls.trajectories(one.episode_ids) for one in manifests],
        }


def _watched(name, method, seen):
    async def watched(policy, *arguments, **named):
        seen.append((name, policy))
        return await method(policy, *arguments, **named)

    return watched


@pytest.mark.slow
async def test_two_models_learn_in_one_zero_sum_game(tmp_path, other_model):  # noqa: F811
    settings = config(tmp_path / "run", {"black": {"model": other_model} | LEARNS}, ROLES)
    found = await played(settings)
    assert found["versions"] == {"white": "0.2", "black": "0.2"}
    for name in ("white", "black"):
        assert found["after"][name] != found["before"][name]
    assert [list(one.versions) for one in found["manifests"]] == [["white", "black"]] * 2
    for row, trajectories in zip(found["rows"], found["played"], strict=True):
        chats = [chat for trajectory in trajectories for chat in trajectory.chats]
        tokens = {n: sum(len(c.completion_ids) for c in chats if c.policy == n) for n in ("white", "black")}
        assert {n: row[f"{n}/train/trained_tokens"] for n in tokens} == tokens
        assert row["rollout/completion_tokens"] == sum(tokens.values())
        assert row["train/tokens_frozen"] == 0
        # What the agent earns the opponent loses: neither learns from the sum, which is always 0.
        assert row["white/train/reward_mean"] == pytest.approx(-row["black/train/reward_mean"])
        assert row["white/train/grad_norm"] > 0
        assert row["black/train/grad_norm"] > 0
        for trajectory in trajectories:
            by_agent = trajectory.episode.agent_step_rewards
            assert {one.agent: one.reward for one in by_agent} == trajectory.episode.rewards


@pytest.mark.model
async def test_two_models_of_different_families_learn_in_one_episode(tmp_path):
    settings = config(tmp_path / "run", {"black": {"model": "SmolLM2-135M-Instruct"} | LEARNS}, ROLES, steps=1)
    found = await played(settings)
    assert all(found["after"][name] != found["before"][name] for name in ("white", "black"))
    assert found["versions"] == {"white": "0.1", "black": "0.1"}


@pytest.mark.slow
async def test_in_turns_only_the_one_that_is_due_is_touched(tmp_path):
    policies = {"black": {"updates": {"every_steps": 2}} | LEARNS}
    settings = config(tmp_path / "run", policies, ROLES)
    white = settings.policies["white"].model_copy(update={"updates": UpdatesConfig(every_steps=2)})
    settings = settings.model_copy(update={"policies": settings.policies | {"white": white}})
    seen: list[tuple[str, str]] = []
    found = await played(settings, seen)
    assert [policy for name, policy in seen if name == "optim_step"] == ["white", "black"]
    assert [policy for name, policy in seen if name == "untrainable"] == ["white", "black"]
    # Both are handed to the engine at the start, and then each after its update.
    assert [policy for name, policy in seen if name == "weights"] == ["white", "black", "white", "black"]
    assert found["versions"] == {"white": "0.1", "black": "0.1"}
    assert [{n: v.n for n, v in one.versions.items()} for one in found["manifests"]] == [
        {"white": 0, "black": 0},
        {"white": 1, "black": 0},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"name": "grpo", "credit": "step"}, {"name": "ppo"}])
async def test_rewards_of_time_steps_are_those_of_a_policys_own_agents(tmp_path, algorithm):
    """All of an episode's rewards come with one action, and their sum is 0: alone it would teach nothing."""
    settings = config(tmp_path / "run", {"black": LEARNS}, ROLES, algorithm=algorithm, steps=1)
    (row,) = (await played(settings))["rows"]
    assert row["white/train/grad_norm"] > 0
    assert row["black/train/grad_norm"] > 0
    if algorithm["name"] == "ppo":
        assert row["white/train/return_mean"] == pytest.approx(-row["black/train/return_mean"], abs=0.3)
        assert row["white/train/return_mean"] > 0


@pytest.mark.slow
def test_the_result_has_a_checkpoint_of_each_which_is_evaluated_by_its_folder(tmp_path):
    settings = config(tmp_path / "run", {"black": LEARNS}, ROLES)
    result = palestra.train(RolloutSpec(environment=Talk), TASKS, settings, quiet=True)
    assert {name: path.name for name, path in result.checkpoints.items()} == {
        "white": "step-000002",
        "black": "step-000002",
    }
    with pytest.raises(ConfigError, match=r"'white'.*'black'"):
        _ = result.checkpoint
    assert "checkpoints={" in repr(result)
    weights = {
        name: safetensors.torch.load_file(path / "model.safetensors") for name, path in result.checkpoints.items()
    }
    assert any(not weights["white"][name].equal(weights["black"][name]) for name in weights["white"])
    alone = palestra.JobConfig(engine={"threads": 1}, policies={"policy": {"sampling": {"max_tokens": 8}}})
    with pytest.raises(ConfigError, match=r"'white'.*'black'.*checkpoint"):
        palestra.evaluate(reward=lambda t, a: 1.0, tasks=[{"prompt": "?"}], config=alone, model=str(result.run_dir))
    found = palestra.evaluate(
        reward=lambda t, a: 1.0,
        tasks=[{"prompt": "?"}],
        config=alone,
        model=str(result.run_dir / "checkpoints" / "black"),
        quiet=True,
    )
    assert found.outcomes[0].reward == 1.0
    white = str(result.run_dir / "checkpoints" / "white")
    against = settings.model_copy(
        update={
            "run_dir": tmp_path / "against",
            "steps": 1,
            "policies": settings.policies | {"black": settings.policies["black"].model_copy(update={"model": white})},
        }
    )
    palestra.train(RolloutSpec(environment=Talk), TASKS, against, quiet=True)
    saved = load_config(tmp_path / "against" / "config.toml")
    assert saved.policies["black"].model == str(result.checkpoints["white"]), "the checkpoint, and not what it was"


TWO = {"white": {}, "black": {}}
SCRIPTED_TWO = SCRIPTED | {"policies": TWO, "roles": ROLES, "checkpoint": {"every_steps": 1}}
# The first save of a step is white's, the second black's: 2 is between the two of the first step.
BETWEEN_SAVES = ["after_checkpoint_rename:1", "before_checkpoint_rename:2", "after_checkpoint_rename:3"]
AROUND_UPDATES = ["before_step:1", "after_step:1", "before_publish:2", "between_publications:2", "after_publish:2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("undisturbed-two-trained"), SCRIPTED_TWO) as job:
        run_through(job, [], "--opponent")
        assert_complete(job)
        yield job


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        BETWEEN_SAVES,
        pytest.param(AROUND_UPDATES, marks=pytest.mark.long),
        pytest.param(["before_manifest_commit:1", "after_end_commit:3"], marks=pytest.mark.long),
    ],
)
def test_a_job_of_two_that_is_killed_again_and_again_ends_as_one_that_was_not(tmp_path, undisturbed, faults):
    for row in undisturbed.query("SELECT * FROM manifests"):
        n = row["step"] - 1
        assert json.loads(row["versions"]) == {"white": [0, n], "black": [0, n]}
    with Job(tmp_path, SCRIPTED_TWO) as job:
        run_through(job, faults, "--opponent", "--threads", "2")
        assert_complete(job)
        assert_same_metrics(job, undisturbed)
        for policy in TWO:
            assert job.weights(policy) == undisturbed.weights(policy)


@pytest.mark.slow
def test_the_lines_of_the_console_show_both(undisturbed):
    output = undisturbed.servers[0].output
    assert "white reward " in output
    assert "black reward " in output
    assert "checkpoints/white/step-000003" in output
    assert "--policy white" in output
    assert (undisturbed.run_dir / "curve.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("turns", [{}, pytest.param({"updates": {"every_steps": 2}}, marks=pytest.mark.long)])
def test_weights_of_both_are_bit_identical_after_kills(tmp_path, turns):
    policy = TINY["policies"]["policy"]
    settings = TINY | {
        "policies": {"white": policy, "black": policy | turns},
        "roles": ROLES,
        "checkpoint": {"every_steps": 1},
        "evaluation": {"every_steps": 3},
    }
    faults = ["before_step:2", "after_checkpoint_rename:1", "between_publications:2", "after_end_commit:4"]
    found: list[dict[str, dict[str, Any]]] = []
    for name, at, threads in (("undisturbed", [], "3"), ("killed", faults, "1")):
        with Job(tmp_path / name, settings) as job:
            run_through(job, at, "--opponent", "--threads", threads)
            found.append({p: _tensors(job.checkpoints(p)[-1]) for p in ("white", "black")})
    for policy_name, tensors in found[0].items():
        other = found[1][policy_name]
        assert tensors.keys() == other.keys()
        assert all(tensors[name].equal(other[name]) for name in tensors), policy_name
    assert any(not found[0]["white"][name].equal(found[0]["black"][name]) for name in found[0]["white"])


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """Weights and moments, by name."""
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
    }
