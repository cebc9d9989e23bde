from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from palestra.config import JobConfig, PolicyConfig, RolloutConfig, parse_config
from palestra.config.loading import dump_config, load_config
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.fake import FakeEngineConfig
from palestra.errors import ConfigError

BASE: dict[str, Any] = {
    "policies": {"policy": {}},
    "tasks": {"train": "/a.jsonl", "validation": "/b.jsonl"},
}
# Every leaf with a value other than its default. A new field has to be put here, and thereby on one of the two sides.
OTHER: dict[str, Any] = {
    "name": "other",
    "tracking": ["tensorboard"],
    "seed": 1,
    "steps": 31,
    "token_budget": 31,
    "deterministic": True,
    "run_dir": "elsewhere",
    "roles": {"agent": "policy"},
    "policies.policy.model": "tiny-random",
    "policies.policy.max_context": 100,
    "policies.policy.adapter": {"rank": 8},
    "policies.policy.sampling.temperature": 0.5,
    "policies.policy.sampling.max_tokens": 7,
    "policies.policy.optimizer.learning_rate": 1e-3,
    "policies.policy.optimizer.schedule": "linear",
    "policies.policy.optimizer.warmup_steps": 3,
    "policies.policy.optimizer.betas": (0.8, 0.9),
    "policies.policy.optimizer.weight_decay": 0.1,
    "policies.policy.optimizer.max_grad_norm": 2.0,
    "policies.policy.algorithm": {"name": "rloo"},
    "policies.policy.updates.every_steps": 2,
    "tasks.train": "/c.jsonl",
    "tasks.validation": "/c.jsonl",
    "rollout.group_size": 4,
    "rollout.group_key": "family",
    "rollout.groups_per_step": 4,
    "rollout.max_attempts": 9,
    "rollout.lease_seconds": 9.0,
    "rollout.timeout_seconds": 99.0,
    "rollout.changed_history": "keep",
    "rollout.untrained_agents": ("agent/*",),
    "rollout.max_open_buckets": 3,
    "rollout.max_claimed": 3,
    "rollout.step_order": "acted",
    "rollout.weight_sync": "between_episodes",
    "environment.name": "gomoku",
    "environment.settings": {"size": 5},
    "environment.agent": "tools",
    "environment.agent_settings": {"max_calls": 3},
    "environment.path": Path("tasks"),
    "environment.url": "http://127.0.0.1:7500",
    "environment.protocol": "openenv",
    "environment.key_variable": "NIM_KEY",
    "environment.system": "RolloutSpec.",
    "environment.train_tasks": 3,
    "environment.validation_tasks": 3,
    "environment.max_concurrency": 3,
    "environment.runners": 3,
    "seats.roles": ["white"],
    "seats.takeover": "policy",
    "seats.wait_seconds": 9.0,
    "algorithm.importance_sampling": "token-mask",
    "algorithm.importance_limit": 3.0,
    "algorithm.advantage_scale": "none",
    "algorithm.clip_low": 0.1,
    "algorithm.clip_high": 0.3,
    "algorithm.loss_agg_mode": "token-mean",
    "algorithm.minibatches": 2,
    "algorithm.dynamic_sampling": 1,
    "algorithm.reward_weights": {"right": 2.0},
    "algorithm.epochs": 2,
    "algorithm.entropy_coefficient": 0.1,
    "algorithm.kl": {"coefficient": 0.1},
    "algorithm.credit": "step",
    "algorithm.discount": 0.5,
    "algorithm.train_on": "final-branch",
    "evaluation.every_steps": 1,
    "evaluation.every_tokens": 1,
    "checkpoint.every_steps": 3,
    "checkpoint.keep": 3,
    "checkpoint.optimizer": False,
    "engine.kind": "fake",
    "engine.dtype": "float32",
    "engine.device": "cuda",
    "trainer.device": "cpu",
    "engine.cache_gib": 1.5,
    "engine.threads": 1,
    "engine.replicas": 2,
    "engine.stuck_seconds": 5.0,
    "engine.max_batch": 8,
    "trainer.dtype": "float32",
    "trainer.threads": 1,
    "trainer.micro_batch_tokens": 99,
    "trainer.devices": 2,
    "trainer.stuck_seconds": 9.0,
    "trainer.activation_checkpointing": True,
    "trainer.cpu_offload": True,
    "server.host": "0.0.0.0",
    "server.port": 1,
    "server.max_body_bytes": 99,
    "server.max_waiting_calls": 99,
    "server.unknown_fields": "ignore",
    "server.agent_headers": {"x-worker": ""},
    "server.auxiliary_prompts": ("Name this session",),
    "watchdog.stuck_seconds": 5.0,
    "pictures.store_gib": 0.5,
    "pictures.hosts": ["images.example.com"],
    "pictures.private_hosts": ["10.0.0.7:8080"],
}
# The first: with `deterministic`, and the second: with tasks, which the table has.
ONLY_ONE_VALUE = {"rollout.max_staleness", "kind", "algorithm.name", "policies.policy.frozen"}
SHORT = {"model"}  # written in one place and kept in another
# What neither moves a weight nor says which samples there are: where it is, how it is kept, how far it goes, how
# workers are watched. (The tasks are in the run store from the first start on.)
NOT_TRAINED = {
    "name",
    "run_dir",
    "tracking",
    "steps",
    "token_budget",
    "tasks",
    "evaluation",
    "seats",
    "checkpoint",
    "server",
    "pictures",
    "engine.replicas",
    "engine.stuck_seconds",
    "watchdog",
    "trainer.stuck_seconds",
    "trainer.devices",  # unless the job is deterministic, as the next two
    "trainer.activation_checkpointing",
    "trainer.cpu_offload",
}
NOT_TRAINED |= {
    f"rollout.{leaf}"
    for leaf in (
        "lease_seconds",
        "timeout_seconds",
        "max_attempts",
        "max_open_buckets",
        "max_claimed",
        "weight_sync",
    )
}
NOT_TRAINED |= {
    f"environment.{leaf}"
    for leaf in (
        "train_tasks",
        "validation_tasks",
        "max_concurrency",
        "runners",
        "path",
        "url",
        "key_variable",
    )
}


def leaves(model: BaseModel, path: str = "") -> set[str]:
    found: set[str] = set()
    for name in type(model).model_fields:
        value = getattr(model, name)
        if name == "policies":
            found |= leaves(value["policy"], "policies.policy.")
        elif isinstance(value, BaseModel):
            found |= leaves(value, f"{path}{name}.")
        else:
            found.add(path + name)
    return found


def config(**leaf_values: Any) -> JobConfig:
    data = {k: {**v} for k, v in BASE.items()}
    data["policies"] = {"policy": {}}
    for dotted, value in leaf_values.items():
        *parents, last = dotted.split(".")
        level: Any = data
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return JobConfig.model_validate(data)


def test_the_table_of_this_test_has_every_field():
    # See test_shared_base.py, test_budget.py, test_policies.py, judges/test_judges.py, and the end of this file.
    elsewhere = {"policies.policy.base", "policies.policy.vision", "judge", "harness"}
    elsewhere |= {"environments", "curriculum", "tasks.weigh", "audit", "prices", "budget"}
    assert leaves(config()) == OTHER.keys() | ONLY_ONE_VALUE | SHORT | elsewhere


@pytest.mark.parametrize(
    "data",
    [
        {"model": "tiny-random"},
        {"model": "tiny-random", "policies": {"policy": {}}},
        {"model": "tiny-random", "policies": {"policy": PolicyConfig(model="another")}},
    ],
)
def test_model_is_short_for_that_of_the_one_policy(data):
    short, long = JobConfig(**data), JobConfig(policies={"policy": {"model": "tiny-random"}})
    assert short == long
    assert short.digest() == long.digest()
    assert short.policies["policy"].model == "tiny-random"
    assert parse_config(tomllib.loads(dump_config(short))) == long
    named = parse_config({"policies": {"actor": {"model": "a", "max_context": 77}}}, {"model": "b"})
    assert named.policies == {"actor": PolicyConfig(model="b", max_context=77)}


@pytest.mark.parametrize("policies", [{}, {"a": {}, "b": {}}, 3])
def test_model_is_refused_where_it_could_be_that_of_several(policies):
    with pytest.raises(ConfigError, match=r"`model`.*frozen"):
        JobConfig(model="tiny-random", policies=policies)


@pytest.mark.parametrize("leaf", sorted(OTHER))
def test_the_digest_changes_exactly_with_what_is_trained(leaf):
    needed = {
        "environment.runners": {"environment.name": "gomoku"},
        "environment.path": {"environment.name": "harbor"},
        "environment.agent_settings": {"environment.agent": "tools"},
        "trainer.cpu_offload": {"trainer.devices": 2},
    }.get(leaf, {})
    changed, before = config(**needed, **{leaf: OTHER[leaf]}), config(**needed)
    assert changed != before
    same = changed.digest() == before.digest()
    assert same == (leaf in NOT_TRAINED or leaf.split(".")[0] in NOT_TRAINED)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_number_of_steps_is_part_of_the_digest_where_the_schedule_depends_on_it(schedule):
    key = "policies.policy.optimizer.schedule"
    assert config(**{key: schedule}).digest() != config(**{key: schedule, "steps": 31}).digest()
    assert config(**{key: schedule}).digest() != config(**{key: schedule, "token_budget": 31}).digest()


def test_the_name_of_the_policy_is_part_of_the_digest():
    assert JobConfig(policies={"a": PolicyConfig()}).digest() != JobConfig(policies={"b": PolicyConfig()}).digest()


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        ("seed", -1),
        ("seed", 2**63),
        ("steps", 0),
        ("name", ""),
        ("name", "a/b"),
        ("name", "../a"),
        ("name", ".hidden"),
        ("name", "a\n"),
        ("name", "x" * 65),
        ("policies.policy.sampling.temperature", 0.0),
        ("policies.policy.sampling.temperature", float("nan")),
        ("policies.policy.optimizer.learning_rate", 0.0),
        ("policies.policy.optimizer.learning_rate", float("inf")),
        ("policies.policy.max_context", 0),
        ("rollout.lease_seconds", 0.0),
        ("rollout.max_staleness", -1),
        ("rollout.max_staleness", 17),
        ("rollout.group_size", 0),
        ("checkpoint.keep", 1),
        ("engine.max_batch", 1),
        ("algorithm.clip_low", 1.5),
        ("server.port", 65536),
    ],
)
def test_values_out_of_range_are_refused(leaf, value):
    with pytest.raises(ValidationError):
        config(**{leaf: value})


def test_a_lease_can_not_be_longer_than_the_longest():
    with pytest.raises(ConfigError, match="lease_seconds"):
        RolloutConfig(lease_seconds=3601)


def test_the_folder_is_run_dir_or_follows_from_the_name():
    assert JobConfig(name="x").folder == Path("runs/x")
    assert JobConfig(name="x", run_dir=Path("y")).folder == Path("y")


def test_a_configuration_can_not_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        JobConfig().seed = 3  # type: ignore[misc]


def test_workers_of_a_deterministic_job_have_a_fixed_number_of_threads():
    with pytest.raises(ConfigError, match=r"needs engine\.threads"):
        JobConfig(deterministic=True, engine=EmbeddedEngineConfig(replicas=2))
    JobConfig(deterministic=True, engine=EmbeddedEngineConfig(replicas=2, threads=1))
    JobConfig(deterministic=True, engine=FakeEngineConfig(replicas=2))


def test_what_is_played_ahead_can_not_be_reproduced():
    with pytest.raises(ConfigError, match=r"max_staleness.*0"):
        JobConfig(deterministic=True, rollout=RolloutConfig(max_staleness=1))
    assert JobConfig(rollout=RolloutConfig(max_staleness=1)).digest() != JobConfig().digest()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("evaluation", "every_steps", 1),
        ("trainer", "threads", 3),
        ("environment", "name", "gomoku"),
        ("tasks", "train", "tasks.jsonl"),
        ("tasks", "validation", "tasks.jsonl"),
    ],
)
def test_an_inference_job_keeps_what_it_does_not_use(section, key, value):
    """So that the configuration of a training job serves its model when one word of it is changed."""
    trains = JobConfig.model_validate({"steps": 3, section: {key: value}})
    serves = JobConfig.model_validate({"kind": "inference", "steps": 3, section: {key: value}})
    assert getattr(getattr(serves, section), key) == getattr(getattr(trains, section), key)
    assert str(getattr(getattr(serves, section), key)) == str(value)
    assert serves.model_dump(exclude={"kind"}) == trains.model_dump(exclude={"kind"})


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (JobConfig, {"step": 3}, "JobConfig: unknown key 'step'; did you mean 'steps'?"),
        (JobConfig, {"model": 3}, "JobConfig: policies.policy.model: Input should be a valid string"),
        (JobConfig, {"group_size": 4}, "unknown key 'group_size'; did you mean 'rollout.group_size'?"),
        (JobConfig, {"learning_rate": 1}, "'learning_rate'; did you mean 'policies.NAME.optimizer.learning_rate'?"),
        (JobConfig, {"wandb": 1}, "unknown key 'wandb'; known keys here: name, kind"),
        (JobConfig, {"steps": -3}, "JobConfig: steps: Input should be greater than or equal to 1; it is -3"),
        (JobConfig, {"rollout": {"group_sise": 3}}, "unknown key 'rollout.group_sise'; did you mean 'group_size'?"),
        (RolloutConfig, {"group_size": "eight"}, "RolloutConfig: group_size: Input should be a valid integer"),
        (RolloutConfig, {"group_size": "eight"}, "; it is 'eight'"),
        (
            JobConfig,
            {"rollout": {"group_size": 1}},
            "group_size is 1, and algorithm.name = 'grpo' compares the episodes",
        ),
        (JobConfig, {"rollout": {"group_size": 1}}, "with one another, so it needs at least 2"),
    ],
)
def test_a_mistake_in_python_is_said_in_the_words_of_a_mistake_in_toml(section, values, said):
    with pytest.raises(ConfigError) as caught:
        section(**values)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("size", "needed"), [(1, 1), (2, 2), (8, 2)])
def test_a_group_needs_two_episodes_and_a_group_of_one_needs_one(size, needed):
    assert RolloutConfig(group_size=size).least_completed == needed


@pytest.mark.parametrize("weight", [1e308, -1.1e6, float("inf"), float("nan")])
def test_a_weight_of_a_reward_is_bounded_so_that_no_sum_overflows(weight):
    with pytest.raises(ConfigError, match=r"reward_weights\.right"):
        parse_config({"algorithm": {"reward_weights": {"right": weight}}})
    assert parse_config({"algorithm": {"reward_weights": {"right": -1e6}}}).algorithm.weighted_sum({"right": 1}) == -1e6


@pytest.mark.parametrize("name", ["", "a/b", "a\x1b", "a\n", "a" * 65, "é"])
def test_a_weight_is_of_a_name_that_a_reward_can_have(name):
    with pytest.raises(ConfigError, match="reward_weights"):
        parse_config({"algorithm": {"reward_weights": {name: 1.0}}})


@pytest.mark.parametrize(
    ("key", "refused", "taken"),
    [
        ("betas", [(5, -3), (1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)], [(0.0, 0.0), (0.99, 0.999999)]),
        ("learning_rate", [1e308, 1001.0, 0.0, -1.0], [1e-12, 1000.0]),
        ("weight_decay", [1e308, -0.1], [0.0, 1000.0]),
        ("max_grad_norm", [1e308, 0.0], [1e-6, 1e12, 1e30]),
        ("clip_high", [1e308, -0.1], [0.0, 1e12]),
    ],
)
def test_numbers_of_an_optimizer_are_bounded_where_no_step_could_be_computed(key, refused, taken):
    def given(value):
        if key == "clip_high":
            return {"algorithm": {"name": "ppo", key: value}}
        optimizer = {"optimizer": {key: value}}
        return {"algorithm": {"name": "ppo", "critic": optimizer}, "policies": {"policy": optimizer}}

    for value in refused:
        with pytest.raises(ConfigError, match=key) as caught:
            parse_config(given(value))
        assert "\n" not in str(caught.value)
    for value in taken:
        parse_config(given(value))


SUMS = {"id": "sums", "name": "arithmetic"}
FILE = {"id": "f", "tasks": {"train": "f.jsonl"}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"environment": {"path": "tasks"}}, "give environment.name"),
        ({"environments": [SUMS, SUMS]}, "two of environments have the id 'sums'; give each its own"),
        ({"environments": [SUMS], "environment": {"name": "calculator"}}, "environment.name is set"),
        ({"environments": [SUMS], "tasks": {"train": "a.jsonl"}}, "tasks.train is set"),
        ({"environments": [SUMS], "environment": {"runners": 2}}, "environment.runners play an environment"),
        ({"environments": [SUMS], "environment": {"runners": 2, "name": "calculator"}}, "environment.name is set"),
        ({"environments": [SUMS, {"id": "b", "tasks": {"train": "b.jsonl"}}]}, "or none has"),
        ({"environments": [SUMS], "environment": {"agent": "tools"}}, "environment.agent is set"),
        ({"environments": [SUMS], "environment": {"train_tasks": 3}}, "environment.train_tasks is set"),
        ({"environments": [FILE], "environment": {"settings": {"x": 1}}}, "environment.settings is set"),
        ({"environments": [{**FILE, "system": "Hi"}]}, "environment 'f' has `system`"),
        ({"environments": [{**FILE, "tasks": {"train": "f", "weigh": "tokens"}}]}, "unknown key"),
        ({"tasks": {"weigh": "tokens"}}, "tasks.weigh is of the weights of [[environments]]"),
        ({"environments": [{"id": "b"}]}, "environment 'b' has no tasks"),
        ({"environments": [{"id": "b", "url": "http://10.0.0.7:7500"}]}, "environment 'b' has no tasks"),
        ({"environments": [{**SUMS, "weight": 0}]}, "weight"),
        ({"environments": [{**SUMS, "weight": float("nan")}]}, "weight"),
        ({"environments": [{**SUMS, "id": "a/b"}]}, "id"),
        ({"environments": [{"name": "arithmetic"}]}, "id"),
        ({"environments": [SUMS], "algorithm": {"name": "sft"}}, "environments chooses among tasks that are played"),
        ({"curriculum": {"target": 1.0}}, "target"),
        ({"curriculum": {}, "algorithm": {"name": "sft"}}, "curriculum chooses among tasks that are played"),
    ],
)
def test_environments_and_curricula_that_can_not_be_are_one_line(settings, said):
    with pytest.raises(ConfigError) as caught:
        parse_config(settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_environment_is_a_job_of_its_own():
    job = parse_config(
        {"environments": [{**SUMS, "settings": {"x": 1}}, {"id": "b", "name": "calculator", "tasks": {"train": "b"}}]}
    )
    sums, other = job.each_environment.values()
    assert (sums.environment.name, sums.environment.settings, sums.tasks.train) == ("arithmetic", {"x": 1}, None)
    assert (other.environment.name, str(other.tasks.train), other.environments) == ("calculator", "b", [])
    assert JobConfig().each_environment == {"": JobConfig()}
    (file,) = parse_config({"environments": [FILE], "environment": {"system": "Hi"}}).each_environment.values()
    assert str(file.tasks.train) == "f.jsonl"


def test_weights_are_part_of_what_is_trained_and_places_of_files_are_not():
    def digest(**changes) -> str:
        return parse_config({"environments": [{**SUMS, **changes}]}).digest()

    assert digest() == digest(train_tasks=7) == digest(tasks={"train": "other.jsonl"})
    assert digest() != digest(weight=2)
    by_tokens = parse_config({"environments": [SUMS], "tasks": {"weigh": "tokens"}})
    assert by_tokens.digest() != digest()
    assert parse_config({"curriculum": {}}).digest() != JobConfig().digest()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"environment": {"name": "arithmetic"}}, "environment.name"),
        ({"environments": [SUMS]}, "environments"),
        ({"seats": {"roles": ["white"]}}, "seats.roles"),
    ],
)
def test_a_harness_plays_alone(settings, said):
    with pytest.raises(ConfigError, match=f"{said}.*set"):
        parse_config({"harness": {"name": "pi"}, **settings})
    assert parse_config({"harness": {"name": "pi"}, "environment": {"max_concurrency": 4}}).harness is not None


def test_the_program_and_its_limits_are_part_of_what_is_trained_and_places_of_files_are_not():
    def digest(**changes) -> str:
        return parse_config({"harness": {"name": "pi", **changes}}).digest()

    assert digest() == digest(score="b.py", folder="other/", timeout_seconds=5)
    assert len({digest(), digest(name="codex"), digest(max_calls=3), digest(max_tokens=3), JobConfig().digest()}) == 5


def test_files_of_a_harness_lie_beside_the_configuration(tmp_path):
    (tmp_path / "job.toml").write_text('[harness]\nname = "pi"\nscore = "score.py:mine"\nfolder = "project"\n')
    found = load_config(tmp_path / "job.toml").harness
    assert (found.score, found.folder) == (tmp_path / "score.py:mine", tmp_path / "project")
