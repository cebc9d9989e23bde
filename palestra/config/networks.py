"""Networks in addition to the trained policy: a reference, a critic, a served teacher."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from palestra.config.section import UNLIMITED, Positive, Section

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW on float32 master weights: learning rate and its schedule, decay and clipping."""

    learning_rate: float = Field(
        2e-5,
        gt=0,
        le=1e3,
        description="Peak learning rate. A policy with an adapter has other defaults: 2e-4, a warm-up of 10 steps, and "
        "`inverse_sqrt`.",
    )
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = Field(
        "constant",
        description="Learning rate after warm-up: constant, or falling from the peak, in a line or half a cosine wave, "
        "to a zero that it would reach one step after the last, as in transformers. The last of `n` steps after "
        "warm-up still trains: with 1/n of the peak where it falls in a line. `inverse_sqrt` falls by the root of the "
        "steps, to half in four times the warm-up, however many steps follow.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate grows in a line; the first has 1/warmup_steps of it."
    )
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="AdamW's decay rates, from 0 to less than 1.")
    weight_decay: float = Field(
        0.0, ge=0, le=1e3, description="AdamW's decoupled weight decay; not of norms and biases."
    )
    max_grad_norm: float = Field(
        1.0, gt=0, le=UNLIMITED, description="Gradients are scaled down to this global L2 norm."
    )


def reference_of(policy: str) -> str:
    """Return the name of a policy's reference among policies' names, which have no slash."""
    return f"{policy}/reference"


class KLConfig(Section):
    """A KL penalty with a reference policy: one more copy of the weights, unless an adapter is trained."""

    reference: str | None = Field(
        None,
        min_length=1,
        description="Model of the reference policy, named like `policies.NAME.model`, with the same tokenizer. None: "
        "the trained policy as it was at the start, which for a new adapter is its base without it.",
    )
    coefficient: float = Field(
        0.0, ge=0, description="Factor of the penalty, in the first step if there is a `target`. 0: measured only."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="The term of a token (Schulman 2020), with x = log pi - log reference: `k1`: x; `k2`: x^2 / 2; "
        "`k3`: exp(-x) - 1 + x. In the loss k2 has the gradient of KL(pi || reference), k3 that of KL(reference || pi) "
        "(GRPO's), and k1 none on average; in the reward k1 is the divergence itself.",
    )
    place: Literal["loss", "reward"] = Field(
        "loss",
        description="`loss`: added to the loss of each token; `reward`: taken from the reward of each token, before "
        "advantages (Ziegler et al. 2019), by algorithms with a critic.",
    )
    target: float | None = Field(
        None,
        gt=0,
        description="Divergence in nats a token, by `estimator`, at sampling, near which the coefficient is kept: "
        "after each step it is multiplied by 1 + 0.1 x clip(KL / target - 1, -0.2, 0.2) (Ziegler et al. 2019). None: "
        "the coefficient is fixed. Refused for recorded episodes (`sft`, `dpo`), which the policy does not sample.",
    )

    @model_validator(mode="after")
    def _adapts_something(self) -> KLConfig:
        if self.target is not None and not self.coefficient:
            raise ValueError("a coefficient of 0 stays 0 whatever the target is; give the first step's coefficient")
        return self


class TeacherServerConfig(Section):
    """A teacher model's server: any with OpenAI's `/v1/completions` that echoes a prompt's logprobs."""

    url: str = Field(
        description="URL of the server without /v1, such as `http://10.0.0.5:8000`: vLLM, SGLang, or a Palestra that "
        "serves a model (`kind = 'inference'`)."
    )
    model: str | None = Field(None, description="Name of the model on the server. None: the only one that it lists.")
    key_variable: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the server's key. The key itself is never in a configuration. "
        "None: the server needs none.",
    )
    max_concurrency: Positive = Field(8, description="Rows that are asked for at the same time.")
    timeout_seconds: float = Field(120.0, gt=0, description="Limit of one request.")


class CriticConfig(Section):
    """The critic: a copy of the policy's model, or an adapter of its own, with a value head and its own optimizer."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5)
    epochs: Positive = Field(
        1,
        description="Optimizer steps of the critic made from one batch. Those after the first leave out values that "
        "have moved by more than 0.2 already, so scale larger rewards down.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="The first so many of the policy's steps (those of `updates`), in which only the critic is "
        "trained, so that its values mean something.",
    )


class TwinCriticConfig(Section):
    """The critic of `sac`: like that of `ppo`, with two value heads and a target copy."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5)
    warmup_steps: int = Field(
        0,
        ge=0,
        description="The first so many of the policy's steps (those of `updates`), in which only the critic is "
        "trained, so that its values mean something.",
    )
