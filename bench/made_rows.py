"""Rows to train on, of made-up ids that every model has, for benchmarks of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.types.calls import Ids
from palestra.types.records import TrainSample

POLICY = "policy"
LEAST_ID, MOST_ID = 4, 250  # ids that every model has


def made_rows(seed: int, *, prompts: int, samples: int, prompt_tokens: int, new_tokens: int) -> list[TrainSample]:
    """Return rows in groups that share a prompt, with normal advantages; their loss weights sum to 1.

    Args:
        seed: of ids and advantages.
        prompts: groups.
        samples: rows of each group.
        prompt_tokens: tokens of each prompt.
        new_tokens: tokens of each row that are trained.
    """
    draw, rows = np.random.default_rng(seed), list[TrainSample]()
    for group in range(prompts):
        prompt = draw.integers(LEAST_ID, MOST_ID, prompt_tokens, dtype=np.int32)
        for sample in range(samples):
            ids = np.concatenate((prompt, draw.integers(LEAST_ID, MOST_ID, new_tokens, dtype=np.int32)))
            weight = 1.0 / (prompts * samples * new_tokens)
            rows.append(made_row(f"{group} {sample}", ids, prompt_tokens, [-3.0] * new_tokens, draw.normal(), weight))
    return rows


def made_row(
    name: str, ids: Ids, prompt_tokens: int, logprobs: Sequence[float], advantage: float, weight: float
) -> TrainSample:
    """Return a row of which all tokens behind the prompt are trained.

    Args:
        name: of its episode.
        ids: int32 [N].
        prompt_tokens: how many of them are not trained.
        logprobs: of the others, at sampling.
        advantage: of each trained token.
        weight: of each trained token in the loss.
    """
    mask = np.arange(len(ids)) >= prompt_tokens
    column, sampled = mask.astype(np.float32), np.full(len(ids), np.nan, np.float32)
    sampled[mask] = logprobs
    return TrainSample(
        episode_id=name,
        policy=POLICY,
        ids=ids,
        loss_mask=mask,
        logprobs=sampled,
        versions=np.where(mask, 0, -1)[:, None].repeat(2, axis=1).astype(np.int32),
        calls=np.where(mask, 0, -1).astype(np.int32),
        advantages=column * np.float32(advantage),
        loss_weights=column * np.float32(weight),
        temperatures=np.ones(len(ids), np.float32),
    )
