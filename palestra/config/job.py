"""`JobConfig` and its parts. Every field says its unit; unknown keys are refused (see `loading`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import to_json

from palestra.config.engine import EmbeddedEngineConfig, EngineConfig
from palestra.config.renames import in_first_names
from palestra.config.section import Positive, Seconds, Section

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
JobKind = Literal["training", "inference"]

DEFAULT_CONTEXT = 4096
SMOLLM2, TINY = "SmolLM2-135M-Instruct", "tiny-random"  # models that need no hub


class SamplingConfig(Section):
    """How training episodes are sampled. A job fixes these, whatever a call asks for."""

    temperature: float = Field(1.0, gt=0, le=10, description="Softmax temperature, also used by the trainer.")
    max_tokens: Positive = Field(1024, description="Most tokens a call may sample; a call may ask for fewer.")


class OptimizerConfig(Section):
    """AdamW on float32 master weights."""

    learning_rate: float = Field(2e-5, gt=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Learning rate after warm-up: constant, or falling from the peak, in a line or half a cosine wave, "
        "to a zero that it would reach one step after the last, as in transformers. The last of `n` steps after "
        "warm-up still trains: with 1/n of the peak where it falls in a line.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate grows in a line; the first has 1/warmup_steps of it."
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates.")
    epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay; not of norms and biases.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global L2 norm.")


class PolicyConfig(Section):
    """One model being trained."""

    model: str = Field(
        "SmolLM2-135M-Instruct",
        min_length=1,
        description="`SmolLM2-135M-Instruct` (from a Python package), `tiny-random` (made on the spot), "
        "or a Hugging Face folder or name.",
    )
    max_context: Positive = Field(
        DEFAULT_CONTEXT,
        description=f"Most tokens of prompt and reply together. {DEFAULT_CONTEXT}, the default, stands for what the "
        "model has where that is less; any other number that is more than the model has is refused.",
    )
    sampling: SamplingConfig = SamplingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


class TasksConfig(Section):
    """Where tasks come from. With no file, clients push them with `POST /tasks`."""

    train: Path | None = Field(None, description="JSONL file: one task a line, an object; `id` is optional.")
    validation: Path | None = Field(None, description="JSONL file of held-out tasks, never trained on.")


class EnvironmentConfig(Section):
    """An environment that ships with Palestra, and that this process plays itself."""

    name: str | None = Field(
        None,
        description="`arithmetic`, `calculator`, `countdown`, `frozen-lake`, `gomoku`, `gsm-symbolic` or `subagents`. "
        "None: workers outside play, or the environment given to `palestra.train`.",
    )
    settings: dict[str, bool | int | float | str] = Field({}, description="Of the environment.")
    train_tasks: Positive = Field(512, description="Tasks to generate, where no files name any.")
    validation_tasks: int = Field(64, ge=0, description="Held-out tasks to generate, likewise.")
    system: str | None = Field(None, description="System message. None: the environment's own, if it has one.")
    max_concurrency: Positive | None = Field(
        None, description="Episodes that are played at the same time. None: one step's, at most 256."
    )
    timeout_seconds: Seconds | None = Field(
        None, description="Of one attempt at an episode. None: `rollout.max_episode_seconds` alone."
    )


class RolloutConfig(Section):
    """Groups, episodes and leases."""

    group_size: Positive = Field(8, description="Episodes of one task, compared with one another.")
    groups_per_step: Positive = Field(8, description="Tasks that one training step is made from.")
    min_group_size: Positive = Field(
        2,
        description="A group that lost episodes is trained if this many are left, else dropped and replaced.",
    )
    max_attempts: Positive = Field(3, description="Claims an episode may use up before it is discarded.")
    lease_seconds: Seconds = Field(
        120.0,
        description="A claimed episode is given back after this long without any call or heartbeat of it "
        "(`allow_discard_timeout`).",
    )
    max_lease_seconds: Seconds = Field(3600.0, description="The longest lease that a claim may ask for.")
    max_episode_seconds: Seconds = Field(3600.0, description="The longest that one attempt may take in all.")
    max_staleness: int = Field(
        0,
        ge=0,
        le=16,
        description="How many steps older than the policy that is trained a token may be. 0: synchronous; else the "
        "episodes of so many steps to come are played while earlier ones are trained.",
    )

    max_open_buckets: Positive | None = Field(
        None, description="Groups that are played at the same time. None: all that are due."
    )
    max_per_worker: Positive | None = Field(
        None,
        description="Episodes of one task that a worker may hold at the same time, so that a fast one leaves some of "
        "them to others. None: any number. Episodes that the server plays itself are not limited.",
    )
    max_claimed: Positive | None = Field(
        None, description="Episodes that may be claimed at the same time, by all workers. None: any number."
    )
    step_order: Literal["observed", "acted"] = Field(
        "observed",
        description="Order of the TimeSteps of an episode in which several agents act at once, for credit by step: "
        "by the time of their observations, or of their actions. Both are recorded.",
    )
    weight_sync: Literal["any_time", "between_episodes"] = Field(
        "any_time",
        description="When episodes that Palestra plays itself get new weights: as soon as they are there (each token "
        "has its version), or when none of them is being played.",
    )

    strict_history: bool = Field(
        False,
        description="Refuse, with 409, a call that goes on from an earlier one and would lose its exact tokens.",
    )

    dropped_reasoning: Literal["fork", "keep"] = Field(
        "fork",
        description="What a reply that the agent sends back without its reasoning means. `fork`: the model is not to "
        "see the reasoning again, so the tokens fork; `keep`: nothing, the exact tokens stay.",
    )
    stripped_whitespace: Literal["fork", "keep"] = Field(
        "fork",
        description="What a reply means that the agent sends back with other white space around its text or its "
        "reasoning, as after `.strip()`. `fork`: the model is to see the new text, so the tokens fork; `keep`: "
        "nothing, the exact tokens stay.",
    )

    untrainable_sampling: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="Sampling fields that a training episode can't have, because the trainer could not compute the "
        "probabilities: `top_p` below 1, `top_k`, `min_tokens`, penalties, `logit_bias`. `refuse`: with 400; `ignore`: "
        "sampled as if they were not there, as `x-palestra-sampling` then says; for frameworks that always send them.",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> RolloutConfig:
        if self.group_size == 1 and "min_group_size" not in self.model_fields_set:
            raise ValueError(
                "group_size is 1, and GRPO compares the episodes of a group with one another, so it needs at least 2; "
                "more learn faster (8 is the default)"
            )
        if self.min_group_size > self.group_size:
            raise ValueError("min_group_size is larger than group_size")
        if self.lease_seconds > self.max_lease_seconds:
            raise ValueError("lease_seconds is larger than max_lease_seconds")
        return self


class AlgorithmConfig(Section):
    """How rewards become a gradient. GRPO: a group's rewards are its baseline (Shao et al. 2024, DeepSeekMath, 4.1)."""

    name: str = Field(
        "grpo",
        pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}(:[A-Za-z_][A-Za-z0-9_]{0,63})?$",
        description="`grpo`, or a class of your own as `package.module:Class` where you call `palestra.train` yourself "
        "(a server imports no code of its users).",
    )
    advantage_scale: Literal["std", "none"] = Field(
        "std", description="`std`: divide by the group's deviation (GRPO); `none`: do not (Dr. GRPO)."
    )
    clip_low: float = Field(0.2, ge=0, le=1, description="Probability ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.2, ge=0, description="Probability ratios above 1 + clip_high are clipped.")
    loss_agg_mode: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"] = Field(
        "seq-mean-token-mean",
        description="How the losses of tokens become one number, by verl's names; a sequence is a rollout, of any "
        "number of calls. `seq-mean-token-mean`: mean over a rollout's tokens, then over rollouts (GRPO); "
        "`token-mean`: mean over all tokens of the batch (DAPO); `seq-mean-token-sum-norm`: sum over tokens divided by "
        "rollouts x max_tokens (Dr. GRPO).",
    )
    credit: Literal["episode", "step", "agent", "branch"] = Field(
        "episode",
        description="What a call's tokens are credited with. `episode`: the sum of all rewards; `step`: the discounted "
        "sum of the TimeSteps' rewards from its own on; `agent`: the reward of its agent, or of the nearest parent "
        "that has one (`planner` for `planner/search`), compared with those of the same agent; `branch`: as `agent`, "
        "but subagents are compared with all that the same parent started.",
    )
    discount: float = Field(1.0, ge=0, le=1, description="Of one TimeStep, where credit is by step.")
    importance_sampling: Literal["none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] = Field(
        "none",
        description="Correction for tokens that were sampled from other probabilities than those of the policy before "
        "the step (older weights, or an engine that computes otherwise). `none`: the clipped ratio is to the sampled "
        "probability itself. Else the ratio is to the policy before the step, and each token's loss is multiplied by "
        "w = policy before the step / sampled, of the token or of the call's whole reply (sequence); `truncate`: at "
        "most `importance_limit` (truncated importance sampling, TIS: Yao et al. 2025); `mask`: w itself between "
        "1 / `importance_limit` and `importance_limit`, and 0 outside (masked importance sampling, MIS).",
    )
    importance_limit: float = Field(2.0, gt=1, description="See `importance_sampling`.")
    train_on: Literal["all-calls", "final-branch"] = Field(
        "all-calls",
        description="`all-calls`: every call of an episode is trained; `final-branch`: only those whose tokens stand "
        "in the last call of an agent, and others, such as attempts that were given up, are left out and counted.",
    )
    epochs: Positive = Field(1, description="Optimizer steps made from one batch.")


class EvaluationConfig(Section):
    """Validation through the same claim path, greedy, on a pinned version."""

    every_steps: int = Field(
        5, ge=0, description="Evaluate each so many steps, before the first and after the last. 0: never."
    )
    max_tasks: Positive | None = Field(None, description="Use only the first so many validation tasks.")


class CheckpointConfig(Section):
    """Weights, optimizer and cursor."""

    every_steps: Positive = Field(10, description="Save each so many steps; the last step is always saved.")
    keep: int = Field(2, ge=2, description="How many to keep; at least two, so that a damaged one has one before it.")


class TrainerConfig(Section):
    """How gradients are computed."""

    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Precision of products; weights are float32.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: the GPU, if there is one.")
    threads: Positive | None = Field(None, description="CPU threads for arithmetic. None: all cores.")
    micro_batch_tokens: Positive | None = Field(
        None,
        description="Most tokens in one forward and backward pass: memory grows with it. None: 1,024 on a CPU, 8,192 "
        "on a GPU.",
    )
    logit_chunk: Positive = Field(2048, description="Most positions whose logits exist at the same time.")


class StoreConfig(Section):
    """The run store."""

    synchronous: Literal["FULL", "NORMAL"] = Field(
        "FULL", description="SQLite's level. NORMAL survives kill -9; FULL survives loss of power too."
    )


class ServerConfig(Section):
    """The data plane."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all. TLS is a proxy's work.")
    port: int = Field(7411, ge=0, le=65535, description="0: any free port.")
    max_body_bytes: Positive = Field(4 * 2**20, description="A larger body is refused with 413.")
    max_waiting_calls: Positive = Field(1024, description="More model calls at the same time are refused with 429.")
    max_wait_seconds: Seconds = Field(60.0, description="The longest that a claim may wait for an episode.")


_ADDED_TO_ROLLOUT = {"stripped_whitespace": "fork"}  # later than the first runs that are to be resumed; see `digest`


class JobConfig(Section):
    """One run: a model is trained, or only served."""

    name: Identifier = Field("job", description="Of the job, and of its folder below runs/.")
    kind: JobKind = Field(
        "training",
        description="`training`, or `inference`: the model is served to whoever has the job's key, and nothing is "
        "trained or recorded; what is about training only (tasks, environment, steps) is not used then.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="All sampling and all orders follow from it.")
    steps: Positive = Field(30, description="Training steps.")
    deterministic: bool = Field(False, description="Bit-identical results on one CPU build, also after any kill.")
    run_dir: Path | None = Field(None, description="The run's folder. None: runs/<name>.")
    model: str | None = Field(
        None,
        exclude=True,  # it is kept where it belongs, in `policies`
        description="Short for `policies.policy.model`, and for the model of the one policy that `policies` names, "
        "whatever that says.",
    )
    policies: dict[Identifier, PolicyConfig] = Field(default_factory=lambda: {"policy": PolicyConfig()})
    tasks: TasksConfig = TasksConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EmbeddedEngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    store: StoreConfig = StoreConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="before")
    @classmethod
    def _model_of_the_policy(cls, data: Any) -> Any:
        """Move `model` into the one policy, so that the rest of the package reads one place only."""
        if not isinstance(data, Mapping) or data.get("model") is None:
            return data
        rest = {key: value for key, value in data.items() if key != "model"}
        policies = rest.get("policies", {"policy": {}})
        if not isinstance(policies, Mapping) or len(policies) != 1:
            raise ValueError("`model` is of a job with one policy; give each policy its own, in policies.NAME.model")
        ((name, policy),) = policies.items()
        given = policy.model_dump(exclude_unset=True) if isinstance(policy, PolicyConfig) else policy
        if not isinstance(given, Mapping):
            return rest  # the check of `policies` says what is wrong with it
        return rest | {"policies": {name: {**given, "model": data["model"]}}}

    @field_validator("policies")
    @classmethod
    def _one_policy(cls, policies: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        if len(policies) != 1:
            raise ValueError(f"this version trains exactly one policy a job; {len(policies)} are given")
        return policies

    @model_validator(mode="after")
    def _reproducible(self) -> JobConfig:
        if self.deterministic and self.rollout.max_staleness:
            raise ValueError(
                "deterministic = true needs rollout.max_staleness = 0: what is played ahead depends on time"
            )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name

    @property
    def policy_name(self) -> str:
        """The name of the one policy."""
        return next(iter(self.policies))

    @property
    def policy(self) -> PolicyConfig:
        """The one policy."""
        return self.policies[self.policy_name]

    def with_max_context(self, max_context: int) -> JobConfig:
        """Return the job with this many tokens of context for its policy."""
        policy = self.policy.model_copy(update={"max_context": max_context})
        return self.model_copy(update={"policies": {self.policy_name: policy}})

    def digest(self) -> str:
        """Hash of all that decides what is trained; a run can't be resumed with another one.

        Left out: where it is served and written, how workers are watched, and how far it goes (unless the learning
        rate depends on that). The tasks themselves are in the run store.
        """
        left_out: dict[str, Any] = dict.fromkeys(
            ("name", "kind", "run_dir", "tasks", "server", "store", "checkpoint", "evaluation"), True
        )
        left_out["rollout"] = {
            "lease_seconds",
            "max_lease_seconds",
            "max_episode_seconds",
            "max_attempts",
            "max_open_buckets",
            "max_per_worker",
            "max_claimed",
            "weight_sync",
            # It changes no token: what one setting refuses, the other samples as if it had not been asked for.
            "untrainable_sampling",
        }
        left_out["environment"] = {"train_tasks", "validation_tasks", "max_concurrency", "timeout_seconds"}
        # A key that an earlier version did not have does not tell its runs from those of this one, unless it is used.
        left_out["rollout"] |= {
            key for key, unused in _ADDED_TO_ROLLOUT.items() if getattr(self.rollout, key) == unused
        }
        if self.policy.optimizer.schedule == "constant":
            left_out["steps"] = True
        # By the first names of all keys, so that stores of earlier versions know the digest.
        dumped = in_first_names(self.model_dump(mode="json", exclude=left_out))
        return hashlib.sha256(to_json(dumped)).hexdigest()
