"""`PolicyConfig` and its parts: a model, how it is sampled, and how it is trained, if it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from palestra.config.algorithm import AnyAlgorithmConfig
from palestra.config.checks import check_address
from palestra.config.networks import OptimizerConfig
from palestra.config.section import UNLIMITED, Positive, Section

DEFAULT_CONTEXT = 4096
ALL_LINEAR = "all-linear"  # as a target of an adapter: all linear layers but the head
VisionTraining = Literal["frozen", "trained"]
# Of an adapter, where nothing else is said. Without warm-up this rate ruined a Qwen in two steps; a tenth of it did not
# teach SmolLM2; and where it stays high, what was learned is lost again.
ADAPTER_OPTIMIZER = {"learning_rate": 2e-4, "warmup_steps": 10, "schedule": "inverse_sqrt"}
_OF_TRAINING = ("optimizer", "algorithm", "updates", "vision")  # keys that a frozen policy does not have


class SamplingConfig(Section):
    """Sampling of training episodes. The job fixes these parameters; calls cannot change them."""

    temperature: float = Field(1.0, gt=0, le=10, description="Softmax temperature, also used by the trainer.")
    max_tokens: Positive = Field(1024, description="Most tokens a call may sample; a call may ask for fewer.")


class UpdatesConfig(Section):
    """The training steps that update a policy; in the others it is unchanged, at no cost."""

    every_steps: Positive = Field(
        1,
        description="The policy is updated in every so many steps. Policies with the same number take turns: of two "
        "with 2, the one that the file names first is updated in odd steps, the other one in even steps.",
    )


class AdapterConfig(Section):
    """LoRA (Hu et al. 2021): low-rank matrices, trained in place of the model's weights."""

    rank: Positive = Field(16, description="Rank of the product of a layer's two matrices; at most the layer's width.")
    alpha: float = Field(32.0, gt=0, le=UNLIMITED, description="The product is multiplied by alpha / rank.")
    targets: Literal["all-linear"] | list[Annotated[str, Field(min_length=1)]] = Field(
        "all-linear",
        description="Layers that get matrices: `all-linear` (all but the head that predicts tokens), or a list of the "
        "ends of their names, such as `q_proj`. The head (`lm_head` in most models) and the embedding of tokens "
        '(`embed_tokens`) may be in the list, and so may `all-linear`: `["all-linear", "lm_head"]`.',
    )

    @property
    def scale(self) -> float:
        """Return the factor of the low-rank product."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _is_for_something(self) -> AdapterConfig:
        if not self.targets:
            raise ValueError("targets is empty, so there is nothing to train; leave it out for all linear layers")
        return self


class PolicyConfig(Section):
    """One model of a job: its weights, context and sampling, and how it is trained unless it is frozen."""

    model: str = Field(
        "SmolLM2-135M-Instruct",
        min_length=1,
        description="`SmolLM2-135M-Instruct` (from a Python package), `tiny-random`, `tiny-random-vision` or "
        "`tiny-random-qwen-vl` (made on the spot), or a Hugging Face folder or name. The folder may be that of an "
        "adapter in PEFT's format, as a checkpoint is.",
    )
    max_context: Positive = Field(
        DEFAULT_CONTEXT,
        description=f"Most tokens of prompt and reply together. The default, {DEFAULT_CONTEXT}, is lowered to the "
        "model's own limit; any other number above that limit is refused.",
    )
    sampling: SamplingConfig = SamplingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AnyAlgorithmConfig | None = Field(
        None, description="A table of the policy's own, with the keys of `[algorithm]`. None: the job's `[algorithm]`."
    )
    updates: UpdatesConfig = UpdatesConfig()
    adapter: AdapterConfig | None = Field(
        None,
        description="Train an adapter (LoRA) of the model, whose own weights stay as they are and are in memory once "
        "for the engine and the trainer, as long as both have the same `dtype` and device. None: train all weights.",
    )
    vision: VisionTraining | None = Field(
        None,
        description="Whether the vision tower of a vision-language model is trained with the rest: `trained`, or "
        "`frozen`, as without this key: then each picture passes through it once, and not again after every update. "
        "Refused for a model that reads text only, and together with `adapter`.",
    )
    base: Annotated[str, AfterValidator(check_address)] | None = Field(
        None,
        description="Base server that has `model` in memory and samples and trains for this and other jobs: its "
        "address, such as `unix:runs/base/socket` or `ws://127.0.0.1:7414`, or `shared` where a service chooses one. "
        "Such a policy has an adapter or is frozen. None: the job has a model of its own.",
    )
    frozen: bool = Field(
        False,
        strict=True,  # a text such as "false" would be true to those who read what is not checked yet
        description="The policy is sampled from and never trained: its weights and its version stay as they are, and "
        "its tokens enter no loss. A frozen policy has no `optimizer`, `algorithm` or `updates`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _rate_of_adapters(cls, data: Any) -> Any:
        """Give an adapter default rates of its own; at that of all weights it hardly learns."""
        if not isinstance(data, Mapping) or data.get("adapter") is None or data.get("frozen"):
            return data
        given = data.get("optimizer", {})
        if isinstance(given, OptimizerConfig):
            given = given.model_dump(exclude_unset=True)
        return {**data, "optimizer": {**ADAPTER_OPTIMIZER, **given}} if isinstance(given, Mapping) else data

    @model_validator(mode="after")
    def _trained_or_frozen(self) -> PolicyConfig:
        given = [key for key in _OF_TRAINING if key in self.model_fields_set and getattr(self, key) is not None]
        if self.frozen and given:
            raise ValueError(f"a frozen policy is never trained; leave out either `frozen` or its `{given[0]}`")
        if self.base is not None and self.vision is not None:
            raise ValueError("base servers are for models that read text only; leave out either `base` or `vision`")
        if self.adapter is not None and self.vision is not None:
            raise ValueError("adapters of models that see are not supported; leave out either `adapter` or `vision`")
        if self.frozen and self.adapter is not None:
            raise ValueError(
                "a frozen policy is never trained, so it gets no new adapter; leave out `adapter`, and name the folder "
                "of one that was trained as its `model`"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out training settings of a frozen policy, and missing values."""
        # A run writes its configuration with all defaults; an optimizer beside `frozen` would be refused on resuming.
        dumped: dict[str, Any] = handler(self)
        if self.frozen:
            dumped = {key: value for key, value in dumped.items() if key not in _OF_TRAINING}
        if self.adapter is None:  # so that runs of versions without adapters have the digest that they had
            dumped.pop("adapter", None)
        for key in ("base", "vision"):
            if getattr(self, key) is None:
                dumped.pop(key, None)
        return dumped


def not_frozen(policies: Mapping[Any, Any]) -> list[Any]:
    """Return the names of the policies that are not frozen, from validated or raw tables."""
    return [
        name
        for name, policy in policies.items()
        if not (policy.get("frozen") if isinstance(policy, Mapping) else getattr(policy, "frozen", False))
    ]


def with_model(policies: Any, model: Any) -> Any:
    """Return policies, validated or raw, with another model for the only one that is not frozen."""
    names = not_frozen(policies) if isinstance(policies, Mapping) else []
    if len(names) != 1:
        raise ValueError(
            "`model` is of the one policy that is not frozen; give each policy its own, in policies.NAME.model"
        )
    policy = policies[names[0]]
    given = policy.model_dump(exclude_unset=True) if isinstance(policy, PolicyConfig) else policy
    changed = {**given, "model": model} if isinstance(given, Mapping) else given
    return {**policies, names[0]: changed}
