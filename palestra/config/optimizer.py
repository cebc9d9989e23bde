"""`OptimizerConfig`: the updates of a network that is trained, of a policy or of its critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from palestra.config.section import UNLIMITED, Section

Share = Annotated[float, Field(ge=0, lt=1)]


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
