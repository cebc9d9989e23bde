"""Group relative policy optimisation in three pure pieces.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", section 4.1.
"""

from palestra.algorithms.grpo.advantage import group_advantages, unit_advantages
from palestra.algorithms.grpo.aggregation import token_weights
from palestra.algorithms.grpo.loss import ClippedSurrogate

__all__ = ["ClippedSurrogate", "group_advantages", "token_weights", "unit_advantages"]
