"""Several trained policies, scored together: each by its own rewards, with other checkpoints, against random moves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_command_line import palestra as command
from test_command_line import refused

import palestra
from palestra import JobConfig
from palestra.errors import ConfigError, NotFound
from palestra.runtime.starting_points import trained_in, with_models

TINY = {"model": "tiny-random", "max_context": 64, "sampling": {"max_tokens": 1}}
LEARNS = TINY | {"optimizer": {"learning_rate": 1e-2}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> palestra.TrainResult:
    config = JobConfig.model_validate(
        {
            "steps": 2,
            "seed": 2,  # with which neither of the two, playing the likeliest move, wins all games of the validation
            "deterministic": True,
            "run_dir": tmp_path_factory.mktemp("several") / "run",
            "policies": {"white": LEARNS, "black": LEARNS},
            "roles": {"first": "white", "second": "black"},
            "rollout": {"group_size": 4, "groups_per_step": 2},
            "evaluation": {"every_steps": 2},
            "environment": {"validation_tasks": 7},
            "engine": {"threads": 1},
            "trainer": {"threads": 1},
        }
    )
    return palestra.train(config=config, environment="kuhn-poker", quiet=True)


@pytest.mark.slow
def test_each_policy_has_the_mean_that_the_last_validation_of_its_training_had(trained):
    found = palestra.evaluate(model=str(trained.run_dir), environment="kuhn-poker", quiet=True)
    last = trained.metrics[-1]
    names = ["white/validation/reward_mean", "black/validation/reward_mean"]
    assert found.policies == ("white", "black")
    assert list(found.metrics) == names
    assert [found.metrics[name] for name in names] == [last[name] for name in names]
    assert found.metrics[names[0]] == -found.metrics[names[1]] != 0
    assert found.scored == 7
    for outcome in found.outcomes:
        assert outcome.reward is None
        assert dict(outcome.by_policy) == {"white": outcome.by_agent["first"], "black": outcome.by_agent["second"]}
    own = found.of("white")
    assert [outcome.reward for outcome in own.outcomes] == [outcome.by_agent["first"] for outcome in found.outcomes]
    assert own.mean == found.metrics[names[0]]
    assert own.interval is not None, "the games of this seed end differently"
    assert own.interval[0] <= own.mean <= own.interval[1]
    assert "white=" in repr(found)
    assert len(repr(found)) < 120
    for wrong in (lambda: found.mean, lambda: found.rewards, lambda: found.of("red"), lambda: own.of("white")):
        with pytest.raises(ConfigError, match=r"white|one policy alone"):
            wrong()


@pytest.mark.slow
def test_a_policy_is_scored_against_another_checkpoint_or_random_moves(trained):
    run = str(trained.run_dir)
    against = palestra.evaluate(
        model={"white": run, "black": f"{run}/checkpoints/white"}, config=_settings(trained), environment="kuhn-poker"
    )
    assert against.policies == ("white", "black")
    random = palestra.evaluate(model=run, environment="kuhn-poker", random=["second"], trajectories=True, quiet=True)
    for outcome in random.outcomes:
        assert dict(outcome.by_policy) == {"white": outcome.by_agent["first"]}
        assert {chat.policy for chat in outcome.trajectory.chats} == {"white"}
    assert list(random.metrics) == ["white/validation/reward_mean"]
    assert random.of("black").mean is None
    with pytest.raises(ConfigError, match=r"'third'.*'first'.*'second'"):
        palestra.evaluate(model=run, environment="kuhn-poker", random=["third"], quiet=True)
    with pytest.raises(ConfigError, match="rollout function"):
        palestra.evaluate(lambda task, policy: 1.0, [{"id": "t"}], model=run, random=["second"], quiet=True)


def _settings(trained) -> JobConfig:
    found = palestra.load_config(trained.run_dir / "config.toml")
    environment = found.environment.model_copy(update={"name": None})
    return found.model_copy(update={"run_dir": None, "environment": environment})


@pytest.mark.slow
def test_every_policy_takes_its_own_checkpoint_or_the_one_that_is_named(trained, tmp_path):
    run, settings = str(trained.run_dir), _settings(trained)
    both = {name: str(path) for name, path in trained.checkpoints.items()}
    assert trained_in(run) == ("white", "black")
    assert _models(with_models(settings, run)) == both
    turned = {"white": f"{run}/checkpoints/black", "black": "tiny-random"}
    assert _models(with_models(settings, turned)) == {"white": both["black"], "black": "tiny-random"}
    alone = JobConfig.model_validate({"policies": {"white": TINY}})
    assert _models(with_models(alone, run)) == {"white": both["white"]}
    opponent = JobConfig.model_validate({"policies": {"white": TINY, "rival": TINY | {"frozen": True}}})
    assert _models(with_models(opponent, {"rival": f"{run}/checkpoints/black"}))["rival"] == both["black"]
    for models, said in (
        ({"red": run}, r"a model is given for 'red'.*there are 'white', 'rival'"),
        ({"rival": run}, r"has trained 'white' and 'black', and a checkpoint is that of one"),
        ({"white": ""}, "the model of 'white' is ''"),
    ):
        with pytest.raises(ConfigError, match=said):
            with_models(opponent, models)
    (tmp_path / "run.db").touch()
    (tmp_path / "config.toml").write_text(Path(run, "config.toml").read_text())
    with pytest.raises(NotFound, match="checkpoint yet"):
        with_models(settings, str(tmp_path))


def _models(config: JobConfig) -> dict[str, str]:
    return {name: policy.model for name, policy in config.policies.items()}


@pytest.mark.slow
def test_a_job_begins_with_what_the_policies_of_a_run_have_learned(trained, tmp_path):
    settings = _settings(trained).model_copy(update={"run_dir": tmp_path / "run"})
    later = palestra.train(config=settings, environment="kuhn-poker", model=str(trained.run_dir), quiet=True)
    first, last = later.metrics[0], trained.metrics[-1]
    for name in ("white", "black"):
        key = f"{name}/validation/reward_mean"
        assert first[key] == last[key]


@pytest.mark.slow
def test_the_command_prints_each_policy_or_one(trained):
    run, environment = str(trained.run_dir), ("--environment", "kuhn-poker", "--quiet")
    both = command("eval", run, *environment).stdout.splitlines()
    assert [re.match(r"(\w+): mean reward (-?\d\.\d{3}) ", line)[1] for line in both] == ["white", "black"]
    white, last = both[0], trained.metrics[-1]["white/validation/reward_mean"]
    assert f"mean reward {last:.3f} " in white
    alone = command("eval", run, *environment, "--policy", "white")
    assert (alone.code, alone.stdout.strip()) == (0, white.removeprefix("white: "))
    other = command("eval", run, *environment, "--model", "black=tiny-random", "--random", "second")
    assert other.stdout.splitlines()[-1] == "black: none of 7 tasks was scored"
    refused(command("eval", run, *environment, "--policy", "red"), "--policy red")
    refused(command("eval", run, *environment, "--model", "red=tiny-random"), "'red'")
    refused(command("eval", run, *environment, "--model", "tiny-random"), "write NAME=MODEL")


@pytest.mark.slow
def test_it_is_said_where_one_policy_plays_both_sides(trained, capsys):
    small = JobConfig.model_validate({"policies": {"one": TINY}, "environment": {"validation_tasks": 3}})
    model = f"{trained.run_dir}/checkpoints/white"
    found = palestra.evaluate(model=model, config=small, environment="kuhn-poker")
    assert found.mean == 0
    assert found.note.startswith("'one' has played 'first' and 'second', and a reward is the sum of what they earned")
    assert "note='one' has played" in repr(found).replace('"', "")
    assert "note: 'one' has played" in capsys.readouterr().err
    assert palestra.evaluate(model=model, config=small, environment="kuhn-poker", random=["second"]).note is None
    other = JobConfig.model_validate(
        {
            "policies": {"one": TINY, "other": TINY | {"frozen": True}},
            "roles": {"second": "other"},
            "environment": {"validation_tasks": 3},
        }
    )
    assert palestra.evaluate(model=model, config=other, environment="kuhn-poker").note is None
    assert "note:" not in capsys.readouterr().err
