"""The loss of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a job with a scripted engine loads no torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """-min(ratio x A, clip(ratio, 1 - low, 1 + high) x A), with ratio = pi(token) / behaviour(token).

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; with unequal bounds as in DAPO (Yu et
    al. 2025, section 3.1). The behaviour policy is the one that sampled, at the temperature at which it sampled.
    """

    clip_low: float
    clip_high: float

    def __call__(
        self,
        logprobs_T: Tensor,
        behaviour_T: Tensor,
        advantages_T: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of T tokens, and what to report of each.

        Args:
            logprobs_T: [T] float32, of the policy, with gradient.
            behaviour_T: [T] float32, as they were recorded at sampling.
            advantages_T: [T] float32.

        Returns:
            [T] losses, and [T] tensors `ratio` and `clipped` (1 where the clipped term is the smaller one).
        """
        ratio = (logprobs_T - behaviour_T).exp()
        plain = ratio * advantages_T
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages_T
        report = {"ratio": ratio.detach(), "clipped": (bounded < plain).detach().float()}
        return -plain.minimum(bounded), report
