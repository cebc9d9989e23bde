"""`PolicyConfig` and its parts: a model, how it is sampled, and how it is trained, if it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from palestra.config.section import UNLIMITED, Positive, Section

DEFAULT_CONTEXT = 4096
Share = Annotated[float, Field(ge=0, lt=1)]


class SamplingConfig(Section):
    """Sampling of training episodes. A job fixes these parameters, so that a call can't change them."""

    temperature: float = Field(1.0, gt=0, le=10, description="Softmax temperature, also used by the trainer.")
    max_tokens: Positive = Field(1024, description="Most tokens a call may sample; a call may ask for fewer.")


class OptimizerConfig(Section):
    """AdamW on float32 master weights: learning rate and its schedule, decay and clipping."""

    learning_rate: float = Field(2e-5, gt=0, le=1e3, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Learning rate after warm-up: constant, or falling from the peak, in a line or half a cosine wave, "
        "to a zero that it would reach one step after the last, as in transformers. The last of `n` steps after "
        "warm-up still trains: with 1/n of the peak where it falls in a line.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate grows in a line; the first has 1/warmup_steps of it."
    )
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="AdamW's decay rates, from 0 to less than 1.")
    epsilon: float = Field(1e-8, gt=0, le=1e3, description="AdamW's epsilon.")
    weight_decay: float = Field(
        0.0, ge=0, le=1e3, description="AdamW's decoupled weight decay; not of norms and biases."
    )
    max_grad_norm: float = Field(
        1.0, gt=0, le=UNLIMITED, description="Gradients are scaled down to this global L2 norm."
    )


class PolicyConfig(Section):
    """One model of a job: its weights, context and sampling, and its optimizer unless it is frozen."""

    model: str = Field(
        "SmolLM2-135M-Instruct",
        min_length=1,
        description="`SmolLM2-135M-Instruct` (from a Python package), `tiny-random` (made on the spot), "
        "or a Hugging Face folder or name.",
    )
    max_context: Positive = Field(
        DEFAULT_CONTEXT,
        description=f"Most tokens of prompt and reply together. The default, {DEFAULT_CONTEXT}, is lowered to the "
        "model's own limit; any other number above that limit is refused.",
    )
    sampling: SamplingConfig = SamplingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    frozen: bool = Field(
        False,
        strict=True,  # a text such as "false" would be true to those who read what is not checked yet
        description="The policy is sampled from and never trained: its weights and its version stay as they are, and "
        "its tokens enter no loss. A frozen policy has no `optimizer`.",
    )

    @model_validator(mode="after")
    def _trained_or_frozen(self) -> PolicyConfig:
        if self.frozen and "optimizer" in self.model_fields_set:
            raise ValueError("a frozen policy is never trained; leave out either `frozen` or its `optimizer`")
        return self

    @model_serializer(mode="wrap")
    def _without_unused_optimizer(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the optimizer of a frozen policy."""
        # A run writes its configuration with all defaults; an optimizer beside `frozen` would be refused on resuming.
        dumped: dict[str, Any] = handler(self)
        if self.frozen:
            dumped.pop("optimizer", None)
        return dumped


def not_frozen(policies: Mapping[Any, Any]) -> list[Any]:
    """Return the names of the policies, checked or as they were written, that are not frozen."""
    return [
        name
        for name, policy in policies.items()
        if not (policy.get("frozen") if isinstance(policy, Mapping) else getattr(policy, "frozen", False))
    ]


def with_model(policies: Any, model: Any) -> Any:
    """Return policies, checked or as they were written, of which the one that is not frozen has another model.

    Args:
        policies: by name; what is no policy stays as it is, and is refused where policies are checked.
        model: see `PolicyConfig.model`.

    Raises:
        ValueError: none or several policies are not frozen, so that it is not clear whose model it is.
    """
    names = not_frozen(policies) if isinstance(policies, Mapping) else []
    if len(names) != 1:
        raise ValueError(
            "`model` is of the one policy that is not frozen; give each policy its own, in policies.NAME.model"
        )
    policy = policies[names[0]]
    given = policy.model_dump(exclude_unset=True) if isinstance(policy, PolicyConfig) else policy
    changed = {**given, "model": model} if isinstance(given, Mapping) else given
    return {**policies, names[0]: changed}
