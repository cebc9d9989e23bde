"""`JobConfig` and its sections. Every field says its unit; unknown keys are refused (see `config.loading`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import to_json

from palestra.config.algorithm import AnyAlgorithmConfig
from palestra.config.algorithm_base import AlgorithmConfig
from palestra.config.budget import BudgetConfig, PricesConfig, check_budget
from palestra.config.checks import check_bases, check_devices, check_trained
from palestra.config.engine import EngineConfig, default_engine
from palestra.config.judge import AuditConfig, JudgeConfig
from palestra.config.networks import TeacherServerConfig, reference_of
from palestra.config.parts import (
    CheckpointConfig,
    HarnessConfig,
    PicturesConfig,
    SeatsConfig,
    ServerConfig,
    TrainerConfig,
    WatchdogConfig,
)
from palestra.config.policy import PolicyConfig, not_frozen, with_model
from palestra.config.policy_gradient import GRPOConfig
from palestra.config.roles import AgentName, Role, RoleConfig, Roles, check_pools
from palestra.config.rollout import (
    CurriculumConfig,
    EnvironmentConfig,
    EvaluationConfig,
    MixedEnvironment,
    PlayedEnvironment,
    RolloutConfig,
    TasksConfig,
    check_environments,
    check_no_environment,
)
from palestra.config.section import Identifier, Positive, Section
from palestra.errors import ConfigError

JobKind = Literal["training", "inference"]

# Models that need no download from a hub.
SMOLLM2, TINY, TINY_VISION, TINY_QWEN_VL = BUILT_IN = (
    "SmolLM2-135M-Instruct",
    "tiny-random",
    "tiny-random-vision",
    "tiny-random-qwen-vl",
)
MAX_POLICIES = 8
MAX_ENVIRONMENTS = 64


class JobConfig(Section):
    """The configuration of one job, which trains models or only serves them."""

    model_config = ConfigDict(defer_build=True)  # see `EngineConfig`

    name: Identifier = Field("job", description="Name of the job, and of its folder below runs/.")
    kind: JobKind = Field(
        "training",
        description="`training`, or `inference`: the model is served to clients with the job's key, nothing is trained "
        "or recorded, and settings of training (tasks, environment, steps) are not used.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of all sampling and of the order of tasks.")
    steps: Positive = Field(30, description="Number of training steps.")
    token_budget: Positive | None = Field(
        None,
        description="Sampled tokens with which training ends: after the step that reaches them, or after `steps` steps "
        "if that is earlier. A learning rate with a schedule falls by tokens then. None: training ends after `steps`.",
    )
    deterministic: bool = Field(
        False,
        description="Bit-identical results on one CPU build, also after any kill. A run is not resumed where another "
        "processor, compiler, library or number of threads would compute it.",
    )
    run_dir: Path | None = Field(None, description="The run's folder. None: `runs/NAME` in the present one.")
    model: str | None = Field(
        None,
        exclude=True,  # the value is moved into `policies`
        description="Short for the model of the one policy that is not frozen, if it is the only one; replaces "
        "`policies.NAME.model`.",
    )
    policies: dict[Identifier, PolicyConfig] = Field(
        default_factory=lambda: {"policy": PolicyConfig()},
        min_length=1,
        max_length=MAX_POLICIES,
        description=f"One to {MAX_POLICIES} models by name. A training job trains all that are not frozen.",
    )
    roles: dict[AgentName, Role] = Field(
        {},
        description="The policy that plays an agent, by the agent's name (`agent/solver` is any of `agent/solver-1`, "
        "`agent/solver-2`, …; a subagent without a role is played by its parent's policy). An agent that is not named "
        "here is played by the first policy that is not frozen. In place of a name, a table has a role played by past "
        "versions.",
    )
    tracking: list[Identifier] = Field(
        [],
        description="Trackers that get the metrics of a training job: `tensorboard`, `wandb` (offline), `mlflow`, "
        "`trackio`, or the name of a plug-in.",
    )
    tasks: TasksConfig = TasksConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    environments: list[MixedEnvironment] = Field(
        [],
        max_length=MAX_ENVIRONMENTS,
        description="Several environments, or files of tasks, in place of `environment.name` and `tasks.train`. Each "
        "group of episodes plays one of them, in the proportion of their weights.",
    )
    curriculum: CurriculumConfig | None = Field(
        None, description="Draws tasks by how often they are solved. None: all in a new random order every epoch."
    )
    harness: HarnessConfig | None = Field(
        None,
        description="A program plays the episodes, such as a coding agent (docs/how-to/harnesses.md). None: the "
        "environment is played, or workers play.",
    )
    seats: SeatsConfig = SeatsConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AnyAlgorithmConfig = GRPOConfig()
    judge: JudgeConfig | None = Field(
        None,
        description="Scores each episode in addition to the environment's own reward (`environment` among the named "
        "rewards). None: the environment's reward alone counts.",
    )
    audit: AuditConfig | None = Field(None, description="Watches whether the reward is gamed. None: no audit.")
    prices: PricesConfig | None = Field(None, description="What things cost (docs/how-to/costs.md). None: not known.")
    budget: BudgetConfig | None = Field(None, description="The most that the job may spend. None: any amount.")
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = Field(default_factory=default_engine)
    trainer: TrainerConfig = TrainerConfig()
    server: ServerConfig = ServerConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    pictures: PicturesConfig = PicturesConfig()

    @model_validator(mode="before")
    @classmethod
    def _model_of_the_policy(cls, data: Any) -> Any:
        """Move `model` into the only policy, so that it has one place."""
        if not isinstance(data, Mapping) or data.get("model") is None:
            return data
        rest = {key: value for key, value in data.items() if key != "model"}
        return rest | {"policies": with_model(rest.get("policies", {"policy": {}}), data["model"])}

    @model_validator(mode="after")
    def _roles_have_policies(self) -> JobConfig:
        for agent, role in self.roles.items():
            policy, key = (role.policy, ".policy") if isinstance(role, RoleConfig) else (role, "")
            if policy not in self.policies:
                known = ", ".join(map(repr, self.policies))
                raise ValueError(f"roles.{agent}{key} is {policy!r}, and there is no such policy (there are {known})")
        return self

    @model_validator(mode="after")
    def _is_on_one_base(self) -> JobConfig:
        check_bases(self)
        return self

    @model_validator(mode="after")
    def _can_be_trained(self) -> JobConfig:
        if self.kind == "training":
            check_trained(self)
            check_devices(self)
            check_pools(self.players, self.steps, self.rollout.max_staleness, self.algorithm_of)
        return self

    @model_validator(mode="after")
    def _runners_can_play(self) -> JobConfig:
        if self.environment.runners is not None and self.seats.roles:
            raise ValueError("seats belong to episodes that the job's own process plays; leave environment.runners out")
        return self

    @model_validator(mode="after")
    def _can_choose_tasks(self) -> JobConfig:
        check_environments(self.environments, self.environment, self.tasks)
        if self.harness is not None:
            check_no_environment(self.environments, self.environment, self.seats)
        algorithms = [self.algorithm_of(name) for name in self.trained_policies]
        if any(each.brings_tasks or each.learns_conversations for each in algorithms):
            for key, chosen in (("environments", self.environments), ("curriculum", self.curriculum)):
                if chosen:
                    raise ValueError(f"{key} chooses among tasks that are played, and this algorithm plays none")
        if self.curriculum is not None and self.trains_several:
            raise ValueError("a curriculum needs one reward of an episode, and several policies are trained")
        return self

    @model_validator(mode="after")
    def _has_weights_of_rewards(self) -> JobConfig:
        for name in self.trained_policies:
            algorithm = self.algorithm_of(name)
            if algorithm.trains_policy:
                continue
            if self.policies[name].adapter is not None:
                raise ValueError(
                    f"{algorithm.name!r} trains all weights of a copy of the model; leave policies.{name}.adapter out"
                )
            if self.tasks.validation is not None and self.evaluation.is_on:
                raise ValueError(
                    f"validation plays with the policy, and {algorithm.name!r} does not train it; leave "
                    "tasks.validation out"
                )
        return self

    @model_validator(mode="after")
    def _can_be_judged(self) -> JobConfig:
        if self.judge is not None and self.trains_several:
            raise ValueError("a judge scores whole episodes, and several policies are trained; train one policy a job")
        return self

    @model_validator(mode="after")
    def _can_be_audited(self) -> JobConfig:
        if self.audit is None or self.kind != "training":
            return self
        if self.trains_several:
            raise ValueError("an audit compares with the reward of an episode, and several policies are trained")
        if self.learns_recorded:
            raise ValueError("an audit looks at what is played, and this algorithm plays no training episodes")
        if self.audit.judge is not None and self.audit.judge == self.judge:
            raise ValueError("audit.judge is the same as [judge], so it can't find what that one does not; use another")
        return self

    @model_validator(mode="after")
    def _fits_its_engine(self) -> JobConfig:
        self.engine.check_job(self)
        return self

    @model_validator(mode="after")
    def _has_a_budget_that_can_be_kept(self) -> JobConfig:
        check_budget(self)
        return self

    @model_validator(mode="after")
    def _reproducible(self) -> JobConfig:
        if self.deterministic and not self.checkpoint.optimizer:
            raise ValueError(
                "deterministic = true needs checkpoint.optimizer = true: a resumed job would begin with new moments"
            )
        if self.deterministic and self.rollout.max_staleness:
            raise ValueError(
                "deterministic = true needs rollout.max_staleness = 0: what is played ahead depends on time"
            )
        return self

    @property
    def folder(self) -> Path:
        """Return the run's folder: `run_dir`, or `runs/<name>`."""
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name

    @property
    def base(self) -> str | None:
        """Return the address of the base server that samples and trains for the job, or `shared`; None: no base server.

        A job without a model needs none.
        """
        return next(iter(self.policies.values())).base if self.engine.has_model else None

    @property
    def loads_models(self) -> bool:
        """Return whether the job loads models: it has neither a base server nor an engine without a model."""
        return self.engine.has_model and self.base is None

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Return the names of the policies that are not frozen, in order."""
        return tuple(not_frozen(self.policies))

    @property
    def frozen_policies(self) -> tuple[str, ...]:
        """Return the names of the frozen policies, in order."""
        return tuple(name for name, policy in self.policies.items() if policy.frozen)

    @property
    def named_models(self) -> dict[str, str]:
        """Return the models that the job names: by policy, and those of references by `reference_of` a policy."""
        found = {name: policy.model for name, policy in self.policies.items()}
        for name in self.trained_policies:
            kl = self.algorithm_of(name).kl
            if kl is not None and kl.reference is not None:
                found[reference_of(name)] = kl.reference
        return found

    @property
    def trains_several(self) -> bool:
        """Return whether several policies are trained, each with rewards, metrics and checkpoints of its own."""
        return self.kind == "training" and len(self.trained_policies) > 1

    def algorithm_of(self, policy: str) -> AlgorithmConfig:
        """Return the algorithm that trains a policy: its own, or the job's; with the weights that a judge brings."""
        own = self.policies[policy].algorithm
        found: AlgorithmConfig = self.algorithm if own is None else own
        if self.judge is None:
            return found
        weights = {**self.judge.reward_weights, **found.reward_weights}
        return found.model_copy(update={"reward_weights": weights})

    def algorithm_key(self, policy: str) -> str:
        """Return the dotted key of the table that `algorithm_of` returns, for messages."""
        return "algorithm" if self.policies[policy].algorithm is None else f"policies.{policy}.algorithm"

    def teacher_of(self, policy: str) -> str | None:
        """Return the name of the frozen policy that teaches a trained one; None: it learns from rewards. Raises
        ValueError if the teacher is ambiguous.
        """
        return self.algorithm_of(policy).teacher_of(self.frozen_policies)

    @property
    def each_environment(self) -> dict[str, JobConfig]:
        """Return the job with each of `environments` alone, by id; {"": itself} if it has one environment."""
        if not self.environments:
            return {"": self}
        return {
            each.id: self.model_copy(
                update={
                    "environments": [],
                    "tasks": self.tasks.model_copy(update=each.tasks.model_dump()),
                    "environment": self.environment.model_copy(
                        update={name: getattr(each, name) for name in PlayedEnvironment.model_fields}
                    ),
                }
            )
            for each in self.environments
        }

    @property
    def brings_tasks(self) -> bool:
        """Return whether an algorithm provides the training tasks."""
        return any(self.algorithm_of(name).brings_tasks for name in self.trained_policies)

    @property
    def learns_recorded(self) -> bool:
        """Return whether training episodes are recorded ones, so that none is played for training."""
        algorithms = [self.algorithm_of(name) for name in self.trained_policies]
        return any(each.brings_tasks or each.learns_conversations for each in algorithms)

    def updates_until(self, policy: str, step: int) -> int:
        """Return how many of the steps up to this one, counting from 1, update a trained policy."""
        every = self.policies[policy].updates.every_steps
        alike = [name for name in self.trained_policies if self.policies[name].updates.every_steps == every]
        return max((step - 1 - alike.index(policy) % every) // every + 1, 0)

    def updates_in(self, policy: str, step: int) -> bool:
        """Return whether a step, counting from 1, updates a trained policy."""
        return self.updates_until(policy, step) > self.updates_until(policy, step - 1)

    @property
    def players(self) -> Roles:
        """Return which policy plays which agent."""
        default = (*self.trained_policies, *self.policies)[0]
        tables = {agent: role for agent, role in self.roles.items() if isinstance(role, RoleConfig)}
        return Roles(
            default=default,
            named={agent: role.policy if isinstance(role, RoleConfig) else role for agent, role in self.roles.items()},
            frozen=frozenset(self.frozen_policies),
            rivals=self.trained_policies if self.trains_several else (),
            pools={agent: role.pool for agent, role in tables.items() if role.pool is not None},
            untrained=self.rollout.untrained_agents,
        )

    def with_model(self, model: str) -> JobConfig:
        """Return the job with another model for its only policy that is not frozen. Raises ConfigError if several
        policies are not frozen, or the name is empty.
        """
        try:
            policies = with_model(self.policies, model)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        (name,) = self.trained_policies
        return self.model_copy(update={"policies": {**self.policies, name: PolicyConfig(**policies[name])}})

    def digest(self) -> str:
        """Return a hash of `what_is_trained`. A run can only be resumed with the same digest."""
        return hashlib.sha256(to_json(self.what_is_trained())).hexdigest()

    def what_is_trained(self) -> dict[str, Any]:
        """Return all settings that affect training, as nested tables.

        Left out are the address and the files, limits of workers, who plays, and the number of steps (unless the
        learning rate depends on it). The tasks themselves are in the run store.
        """
        apart = "name kind run_dir tracking seats server pictures checkpoint evaluation watchdog audit"
        apart += " prices budget"
        left_out: dict[str, Any] = dict.fromkeys(apart.split(), True)
        left_out["rollout"] = {
            "lease_seconds",
            "timeout_seconds",
            "max_attempts",
            "max_open_buckets",
            "max_claimed",
            "weight_sync",
        }
        moves = {"train_tasks", "validation_tasks", "path", "url", "key_variable"}  # files and servers may move
        left_out["environment"] = moves | {"max_concurrency", "runners"}
        left_out["environments"] = {"__all__": moves | {"tasks"}} if self.environments else True
        left_out["tasks"] = {"train", "validation"} if self.environments else True
        if self.curriculum is None:
            left_out["curriculum"] = True
        left_out["harness"] = True if self.harness is None else {"score", "folder", "timeout_seconds"}  # files may move
        left_out["engine"] = self.engine.not_trained()  # a server may move, and every worker gives the same reply
        left_out["trainer"] = {"stuck_seconds"}  # it changes no number
        # These change the order of sums alone, so that a run may go on with other values, unless it counts every bit.
        left_out["trainer"] |= {
            key for key in ("devices", "activation_checkpointing", "cpu_offload") if not self.deterministic
        }
        left_out["algorithm"] = _UNUSED_OF_ALGORITHM
        left_out["policies"] = {
            name: {"base": True} if policy.frozen else _unused_of_policy(policy)
            for name, policy in self.policies.items()
        }
        if not self.roles:
            left_out["roles"] = True
        if self.judge is not None:
            left_out["judge"] = self.judge.not_judged
        if not {self.policies[name].optimizer.schedule for name in self.trained_policies} & {"linear", "cosine"}:
            left_out |= {"steps": True, "token_budget": True}
        return self.model_dump(mode="json", exclude=left_out)


# The server that teaches may move; which model it has stays.
_UNUSED_OF_ALGORITHM: dict[str, Any] = {"teacher_server": set(TeacherServerConfig.model_fields) - {"model"}}


def _unused_of_policy(policy: PolicyConfig) -> dict[str, Any]:
    """Return the settings of a trained policy that do not affect training, as pydantic's `exclude`."""
    found: dict[str, Any] = {"frozen": True, "base": True}  # a base server may move
    if policy.algorithm is not None:
        found["algorithm"] = _UNUSED_OF_ALGORITHM
    return found
