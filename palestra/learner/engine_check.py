"""Detects an engine address with another model, by comparing log-probabilities of a short text."""

from __future__ import annotations

import numpy as np

from palestra.engine.base import SAMPLE_TEXT, WorkerPool
from palestra.errors import ConfigError
from palestra.session import PolicyRuntime
from palestra.trainer.base import Trainer
from palestra.types.calls import Floats, Ids, TokenSequence
from palestra.types.records import TrainSample

# Mean difference of a token's log-probability, in nats. With SmolLM2-135M and this text, rounding to bfloat16 makes
# 0.08, weights of 8 bits make 0.07 and of 4 bits 1.3, and noise of 2 % on all weights makes 0.27.
MOST_GAP = 0.25


async def check_engine(pool: WorkerPool, trainer: Trainer, runtime: PolicyRuntime) -> None:
    """Compare log-probabilities of a text between a pool's workers and the trainer, under equal weights.

    Each worker is asked, because each may have another model.
    """
    ids = runtime.renderer.vocabulary.encode(SAMPLE_TEXT)[: runtime.config.max_context - 1]
    prompt, name = TokenSequence(ids), runtime.name
    said = await pool.scores(name, prompt)
    found = await trainer.forward(name, [_row(name, ids)], {"old_logprobs"})
    for one in said:
        gap = float(np.abs(np.array(one, np.float32) - found["old_logprobs"][0][1:]).mean())
        if not gap <= MOST_GAP:
            raise ConfigError(
                "the server of engine.url has another model than the job: the log-probabilities of a short text differ "
                f"by {gap:.2f} nats a token; start it with the model of policies.{name}, {runtime.config.model}"
            )


def _row(policy: str, ids: Ids) -> TrainSample:
    """Return a row of N tokens whose log-probabilities are requested, except for the first."""
    count = len(ids)
    nothing: Floats = np.zeros(count, np.float32)
    asked = np.arange(count) > 0
    return TrainSample(
        episode_id="",
        policy=policy,
        ids=ids,
        loss_mask=asked,
        logprobs=nothing,
        versions=np.zeros((count, 2), np.int32),
        calls=np.zeros(count, np.int32),
        advantages=nothing,
        loss_weights=asked.astype(np.float32),
        temperatures=np.ones(count, np.float32),
    )
