"""Weights: how much each token counts in the sum that is the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def token_weights(
    tokens_R: Sequence[int],
    aggregation: Literal["rollout", "token", "constant"],
    max_tokens: int,
) -> list[float]:
    """The weight of every trained token of each rollout.

    How a rollout is cut into calls or rows does not matter: only its number of trained tokens does.

    Args:
        tokens_R: sampled tokens of each rollout (episode) of the batch, also of those whose advantage is 0.
        aggregation: `rollout`: each rollout weighs the same, its tokens share it (GRPO, DeepSeekMath equation 3);
            `token`: each token weighs the same (DAPO, Yu et al. 2025, equation 8); `constant`: each token weighs
            1 / (rollouts x max_tokens) (Dr. GRPO, Liu et al. 2025).
        max_tokens: the divisor of `constant`.

    Returns:
        One weight a rollout, for each of its tokens; 0 where it has none.
    """
    rollouts = sum(1 for tokens in tokens_R if tokens)
    total = sum(tokens_R)
    if aggregation == "rollout":
        return [1.0 / (rollouts * tokens) if tokens else 0.0 for tokens in tokens_R]
    each = (1.0 / total if total else 0.0) if aggregation == "token" else 1.0 / (max(rollouts, 1) * max_tokens)
    return [each if tokens else 0.0 for tokens in tokens_R]
