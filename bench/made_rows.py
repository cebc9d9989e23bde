"""Rows to train on, of made-up ids that every model has, for benchmarks of the trainer."""

from __future__ import annotations

import numpy as np

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
            mask = np.arange(len(ids)) >= prompt_tokens
            column = mask.astype(np.float32)
            rows.append(
                TrainSample(
                    episode_id=f"{group} {sample}",
                    policy=POLICY,
                    ids=ids,
                    loss_mask=mask,
                    logprobs=np.where(mask, np.float32(-3.0), np.float32(np.nan)),
                    versions=np.where(mask, 0, -1)[:, None].repeat(2, axis=1).astype(np.int32),
                    calls=np.where(mask, 0, -1).astype(np.int32),
                    advantages=column * np.float32(draw.normal()),
                    loss_weights=column / np.float32(prompts * samples * new_tokens),
                    temperatures=np.ones(len(ids), np.float32),
                )
            )
    return rows
