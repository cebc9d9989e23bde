from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config import JobConfig, dump_saved_config
from palestra.envs import TaskEnvironment
from palestra.errors import ConfigError, NotFound
from palestra.runtime.arguments import Play
from palestra.runtime.evaluating import Evaluation, TaskOutcome, config_to_score, evaluate
from palestra.runtime.job_thread import TrainResult
from palestra.runtime.run_dir import weights_of_run
from palestra.trainer import checkpoint


def of(*rewards: float | None) -> Evaluation:
    outcomes = [
        TaskOutcome(task_id=f"t{n}", episode_id=f"e{n}", reward=reward, reason=None if reward is not None else "why")
        for n, reward in enumerate(rewards)
    ]
    return Evaluation(outcomes=tuple(outcomes), complete=True)


def test_the_mean_is_of_the_tasks_that_were_scored():
    assert of(1.0, None, 0.0).mean == 0.5
    assert of(1.0, None, 0.0).rewards == [1.0, 0.0]
    assert (of(None).mean, of().mean, of(None).interval, of(3.0).interval) == (None, None, None, None)


@pytest.mark.parametrize(
    ("good", "of_all", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_of_zeros_and_ones_it_is_wilsons_interval(good, of_all, low, high):
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    found = of(*[1.0] * good, *[0.0] * (of_all - good)).interval
    assert found == pytest.approx((low, high), abs=5e-5)


def test_of_other_rewards_it_is_that_of_students_t():
    low, high = of(1.0, 2.0, 4.0, 5.0).interval  # mean 3, variance 10 / 3; the quantile of 3 degrees is 3.182446
    assert (low, high) == pytest.approx((3 - 3.1824463 * math.sqrt(10 / 12), 3 + 3.1824463 * math.sqrt(10 / 12)))


def games(*rewards: float, zero_sum: bool = True) -> Evaluation:
    """Games of two, of which the second loses what the first wins, or has 1 less."""
    outcomes = [
        replace(one, by_agent={"first": reward, "second": -reward if zero_sum else 1 - reward})
        for one, reward in zip(of(*rewards).outcomes, rewards, strict=True)
    ]
    return Evaluation(outcomes=tuple(outcomes), complete=True)


def test_games_that_were_all_won_have_no_interval_unless_a_loss_is_0():
    """Of rewards of 1 and -1 Wilson's interval would say that no mean lies below 0."""
    assert games(*[1.0] * 20).interval is None
    assert of(*[-1.0] * 20).interval is None
    assert of(*[0.5] * 20).interval is None
    low, high = games(*[1.0] * 10, *[-1.0] * 10).interval
    assert (low, high) == pytest.approx((-2.0930241 * math.sqrt(1 / 19), 2.0930241 * math.sqrt(1 / 19)))
    assert games(*[1.0] * 20, zero_sum=False).interval == pytest.approx((0.8389, 1.0), abs=5e-5)


def test_means_by_agent_are_of_the_tasks_in_which_it_has_a_reward():
    found = games(1.0, -1.0, 1.0, 1.0)
    assert found.by_agent == {"first": 0.5, "second": -0.5}
    some = replace(found, outcomes=(*found.outcomes, *of(None).outcomes))
    assert some.by_agent == found.by_agent
    assert of(1.0).by_agent == {}


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0]), min_size=2, max_size=50))
def test_the_mean_lies_in_its_interval(rewards):
    found = of(*rewards)
    if found.interval is None:
        assert len(set(rewards)) == 1
        assert rewards[0] not in (0.0, 1.0)
        return
    low, high = found.interval
    assert low <= found.mean + 1e-9 * max(map(abs, rewards))
    assert found.mean <= high + 1e-9 * max(map(abs, rewards))


def test_the_folder_of_a_run_stands_for_its_newest_good_checkpoint(tmp_path):
    (tmp_path / "run.db").touch()
    with pytest.raises(NotFound, match="checkpoint yet"):
        evaluate(model=str(tmp_path), reward=lambda task, answer: 1.0, tasks=[{"prompt": "?"}])
    for step in (3, 12):
        checkpoint.write(
            tmp_path / "checkpoints", step, lambda folder: (folder / "a").write_text("b"), {"step": step}, 5
        )
    assert weights_of_run(str(tmp_path)) == str(tmp_path / "checkpoints" / "step-000012")
    assert weights_of_run("tiny-random") == "tiny-random"
    assert weights_of_run(str(tmp_path / "checkpoints" / "step-000003")).endswith("step-000003")


def test_the_harness_of_a_run_plays_if_the_caller_scores_what_it_leaves(tmp_path):
    (tmp_path / "run.db").touch()
    harness = {"name": "pi", "score": str(tmp_path / "score.py"), "max_calls": 9}
    (tmp_path / "config.toml").write_text(dump_saved_config(JobConfig.model_validate({"harness": harness})))
    checkpoint.write(tmp_path / "checkpoints", 3, lambda folder: (folder / "a").write_text("b"), {"step": 3}, 5)
    played = {
        "nothing": Play(),
        "a function": Play(rollout=lambda task, endpoint: 1.0),
        "an environment": Play(environment="gomoku"),
        "a class": Play(environment=TaskEnvironment),
        "a reward": Play(reward=lambda task, result: 1.0),
    }
    found = {what: config_to_score(None, str(tmp_path), play).harness for what, play in played.items()}
    assert [what for what, one in found.items() if one is not None] == ["a reward"]
    assert (found["a reward"].score, found["a reward"].max_calls) == (None, 9)
    own = JobConfig.model_validate({"harness": harness})
    with pytest.raises(ConfigError, match=r"rollout.*harness"):
        evaluate(lambda task, endpoint: 1.0, [{"prompt": "?"}], own, quiet=True)


def test_several_environments_are_refused():
    mixed = JobConfig.model_validate({"environments": [{"id": "sums", "name": "arithmetic"}]})
    with pytest.raises(ConfigError, match=r"environments.*several"):
        evaluate(config=mixed, quiet=True)


def test_results_are_shown_in_a_line(tmp_path):
    rows = [{"step": float(step), "train/reward_mean": 0.1} for step in range(500)]
    result = TrainResult(state="completed", run_dir=tmp_path, metrics=rows, checkpoints={})
    assert (
        repr(result) == f"TrainResult(state='completed', run_dir={str(tmp_path)!r}, checkpoint=None, metrics=500 rows)"
    )
    assert len(f"{of(*[1.0, 0.0] * 200)}") < 120
