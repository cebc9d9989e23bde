"""Importance correction: tokens that were sampled from other probabilities than those that are trained from.

A token may come from older weights, or from an engine that rounds otherwise than the trainer. Its behaviour
probability mu then differs from pi, that of the policy before the step. With a correction the clipped ratio is taken to
pi, and each token's loss is multiplied by a weight w made from pi / mu, as in decoupled PPO (Hilton et al. 2022, "Batch
size-invariance for policy optimization", equation 3); w is bounded as in truncated importance sampling (Ionides 2008;
Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"), or 0 beyond its bounds.
TRL's `vllm_importance_sampling_mode` has the same four modes with the same meaning (`GRPOTrainer` clamps w, or fills it
with 0 where it is masked); its lower bound is another setting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from palestra.schemas.records import Floats, TrainSample

ImportanceMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
_LARGEST = 20.0  # of a logarithm: e^20 is far beyond any limit, and finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrected:
    """Rows whose ratio is to the policy before the step, and what the correction did."""

    samples: list[TrainSample]
    metrics: dict[str, float]


def correct(
    samples: Sequence[TrainSample], logprobs: Sequence[Floats], mode: ImportanceMode, limit: float
) -> Corrected:
    """Weights times w, and behaviour logprobs replaced by those of the policy before the step.

    Args:
        samples: S rows with the logprobs that were recorded at sampling.
        logprobs: [N] for each row: of the same tokens under the policy before the step; NaN where not trained.
        mode: `token`: w is of the token; `sequence`: the product over all tokens of the call's reply, in whichever row
            they stand. `truncate`: min(w, limit); `mask`: w where 1 / limit <= w <= limit, else 0.
        limit: above 1.
    """
    raw = _ratios(samples, logprobs, whole_replies=mode.startswith("sequence"))
    found: list[TrainSample] = []
    for sample, now, ratios in zip(samples, logprobs, raw, strict=True):
        if mode.endswith("mask"):
            weights = np.where((ratios >= 1.0 / limit) & (ratios <= limit), ratios, np.float32(0.0))
        else:
            weights = np.minimum(ratios, np.float32(limit))
        found.append(replace(sample, logprobs=now, weights=np.where(sample.loss_mask, sample.weights * weights, 0.0)))
    kept = [r[s.loss_mask] for s, r in zip(samples, raw, strict=True)]
    ratios = np.concatenate([np.zeros(0, np.float32), *kept])
    outside = (ratios > limit) | ((ratios < 1.0 / limit) if mode.endswith("mask") else False)
    parts = [np.abs(now - s.logprobs)[s.loss_mask] for s, now in zip(samples, logprobs, strict=True)]
    gaps = np.concatenate([np.zeros(0, np.float32), *parts])
    return Corrected(
        samples=found,
        metrics={
            "train/importance_mean": float(ratios.mean()) if len(ratios) else 1.0,
            "train/importance_limited": float(np.mean(outside)) if len(ratios) else 0.0,
            "train/logprob_gap_mean": float(gaps.mean()) if len(gaps) else 0.0,
            "train/logprob_gap_max": float(gaps.max(initial=0.0)),
        },
    )


def _ratios(samples: Sequence[TrainSample], logprobs: Sequence[Floats], *, whole_replies: bool) -> list[Floats]:
    """[N] for each row: pi / mu of each trained token, or of the reply that it belongs to."""
    logs = [
        np.where(s.loss_mask, now.astype(np.float64) - s.logprobs, 0.0)
        for s, now in zip(samples, logprobs, strict=True)
    ]
    if whole_replies:
        sums: defaultdict[tuple[str, int], float] = defaultdict(float)
        for sample, log in zip(samples, logs, strict=True):
            for call in np.unique(sample.calls[sample.loss_mask]):
                sums[sample.episode_id, int(call)] += float(log[sample.loss_mask & (sample.calls == call)].sum())
        for sample, log in zip(samples, logs, strict=True):
            for call in np.unique(sample.calls[sample.loss_mask]):
                log[sample.loss_mask & (sample.calls == call)] = sums[sample.episode_id, int(call)]
    return [np.exp(np.clip(log, -_LARGEST, _LARGEST)).astype(np.float32) for log in logs]
