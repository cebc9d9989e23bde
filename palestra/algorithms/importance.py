"""Importance sampling: corrects for tokens that were sampled with other probabilities than those of the trained policy.

A token may come from older weights, or from an engine that rounds differently from the trainer. Its sampling
probability mu then differs from pi, the probability under the policy before the step. With a correction, the clipped
ratio is taken to pi, and each token's loss is multiplied by a weight w made from pi / mu, as in decoupled PPO (Hilton
et al. 2022, "Batch size-invariance for policy optimization", equation 3). w is bounded as in truncated importance
sampling (TIS: Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"),
or is 0 beyond its bounds (masked importance sampling, MIS). TRL's `vllm_importance_sampling_mode` has the same four
modes with the same meaning (`GRPOTrainer` clamps w, or sets it to 0 where it is masked); its lower bound is a separate
setting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palestra.types.calls import Floats
from palestra.types.metrics import Metric
from palestra.types.records import TrainSample

ImportanceMode = Literal["token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]
IMPORTANCE_METRICS = (
    Metric(
        "importance_mean",
        "ratio",
        "Mean over trained tokens of pi(before the step) / mu(sampled), of the token or its reply; where corrected.",
    ),
    Metric(
        "importance_limited",
        "ratio",
        "Share of trained tokens whose ratio was truncated to `importance_limit`, or masked: weight 0.",
    ),
)
_LARGEST = 20.0  # bound of |log ratio|: e^20 is far beyond any limit, and finite


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceWeights:
    """The weights w, float32 [N] for each row, and the values of `IMPORTANCE_METRICS` by name."""

    weights: list[Floats]
    metrics: dict[str, float]


def importance_weights(
    rows: Sequence[TrainSample], old_logprobs: Sequence[Floats], mode: ImportanceMode, limit: float
) -> ImportanceWeights:
    """Return the factors of the token losses.

    Args:
        rows: with the logprobs recorded at sampling.
        old_logprobs: float32 [N] for each row: logprobs of the same tokens under the policy before the step; NaN where
            a token is not trained.
        mode: `token`: w is a token's ratio; `sequence`: the product of the ratios of all tokens of the call's reply, in
            whichever rows they are. `truncate`: min(w, limit); `mask`: w where 1 / limit <= w <= limit, else 0.
        limit: the largest weight, above 1.
    """
    raw = _ratios(rows, old_logprobs, whole_replies=mode.startswith("sequence"))
    weights: list[Floats] = []
    for ratios in raw:
        if mode.endswith("mask"):
            weights.append(np.where((ratios >= 1.0 / limit) & (ratios <= limit), ratios, np.float32(0.0)))
        else:
            weights.append(np.minimum(ratios, np.float32(limit)))
    kept = [ratios[row.loss_mask] for row, ratios in zip(rows, raw, strict=True)]
    ratios = np.concatenate([np.zeros(0, np.float32), *kept])
    outside = (ratios > limit) | ((ratios < 1.0 / limit) if mode.endswith("mask") else False)
    return ImportanceWeights(
        weights=weights,
        metrics={
            "importance_mean": float(ratios.mean()) if len(ratios) else 1.0,
            "importance_limited": float(np.mean(outside)) if len(ratios) else 0.0,
        },
    )


def _ratios(rows: Sequence[TrainSample], old_logprobs: Sequence[Floats], *, whole_replies: bool) -> list[Floats]:
    """Return float32 [N] for each row: pi / mu of each trained token, or of the reply it belongs to; else 1."""
    logs = [
        np.where(row.loss_mask, old.astype(np.float64) - row.logprobs, 0.0)
        for row, old in zip(rows, old_logprobs, strict=True)
    ]
    if whole_replies:
        sums: defaultdict[tuple[str, int], float] = defaultdict(float)
        # A reply may be cut into several rows, so all sums are complete before one is written back.
        for row, log in zip(rows, logs, strict=True):
            for call in np.unique(row.calls[row.loss_mask]):
                sums[row.episode_id, int(call)] += float(log[row.loss_mask & (row.calls == call)].sum())
        for row, log in zip(rows, logs, strict=True):
            for call in np.unique(row.calls[row.loss_mask]):
                log[row.loss_mask & (row.calls == call)] = sums[row.episode_id, int(call)]
    return [np.exp(np.clip(log, -_LARGEST, _LARGEST)).astype(np.float32) for log in logs]
