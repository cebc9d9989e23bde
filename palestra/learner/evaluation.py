"""Validation during training: episodes use the same claims and are sampled greedily, while no step is trained."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from palestra.algorithms.named_rewards import reward_means
from palestra.config import AlgorithmConfig, Roles
from palestra.engine.base import SAMPLE_TEXT, WorkerPool
from palestra.errors import ConfigError
from palestra.learner.metrics import validation_metrics
from palestra.learner.shares import played_by_policies, rewards_of
from palestra.session import PolicyRuntime
from palestra.store import Groups
from palestra.threads import in_thread
from palestra.trainer.base import Trainer
from palestra.types.calls import Floats, Ids, TokenSequence
from palestra.types.metrics import NORMAL_95, WIN_RATE, of_policy
from palestra.types.records import EpisodeRecord, Task, TrainSample
from palestra.types.states import EpisodeState

PIECE = 500  # tasks that are read and registered at a time
_HALVINGS = 50  # of the range in which a bound lies: to 1e-15


async def validate(
    groups: Groups,
    tasks: Sequence[Task],
    done: int,
    roles: Roles,
    algorithm: AlgorithmConfig,
    environments: bool = False,
    compared: str | None = None,
) -> dict[str, float]:
    """Score every validation task once, and return the metrics.

    Discarded episodes do not count as 0: the metrics report how many tasks are in the mean. Episodes scored before a
    restart are not repeated. Each task becomes a group of one episode. Rewards of agents played by frozen policies are
    not counted; `algorithm` weights named rewards, if at most one policy is trained. With `environments` the mean
    rewards of each are reported as well. `compared` names the reward that compares an episode with that of the first
    validation, which has no win rate itself.
    """
    started = time.monotonic()
    known = await groups.of_step("validation", done)
    first = known[0][0].group_index if known else await groups.next_index("validation")
    # After a restart, registering an existing group changes nothing.
    for start in range(0, len(tasks), PIECE):
        piece = await in_thread(partial(_piece, tasks, start))
        added = {first + start + number: (task,) for number, task in enumerate(piece)}
        await groups.register_many("validation", done, added, 1)
    await groups.wait_settled("validation", done)
    episodes = [episode for _, members in await groups.of_step("validation", done) for episode in members]
    scored = [e for e in episodes if e.state is EpisodeState.COMPLETED and e.rewards is not None]
    replies, cut = await groups.replies_of_step("validation", done)
    row = {
        "validation/scored": float(len(scored)),
        "validation/total": float(len(episodes)),
        "validation/replies": float(replies),
        "validation/replies_cut": float(cut),
        "validation/attempts_replayed": float(sum(e.replays for e in episodes)),
        "time/validation_seconds": time.monotonic() - started,
    }
    row |= validation_metrics(scored, roles, algorithm) if environments else {}
    row |= _win_rate(scored, compared) if compared is not None and first > 0 else {}
    return row | (_means_of_rivals(scored, roles) if roles.rivals else _means(scored, roles, algorithm))


def _piece(tasks: Sequence[Task], start: int) -> Sequence[Task]:
    return tasks[start : start + PIECE]


def _means(episodes: Sequence[EpisodeRecord], roles: Roles, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return the mean rewards if at most one policy is trained; arguments as in `validate`."""
    rewards = rewards_of(episodes, roles, algorithm)
    named = reward_means([e.named_rewards for e, _ in played_by_policies(episodes)])
    row = {f"validation/rewards/{name}": mean for name, mean in named.items()}
    return row | ({"validation/reward_mean": sum(rewards) / len(rewards)} if rewards else {})


def _win_rate(episodes: Sequence[EpisodeRecord], name: str) -> dict[str, float]:
    """Return the win rate by a named reward, of which 0.5 is a tie, with its interval; {} without a comparison."""
    found = [value for e in episodes if e.named_rewards and (value := e.named_rewards.get(name)) is not None]
    if not found:
        return {}
    rate = win_rate(sum(value > 0.5 for value in found), sum(value < 0.5 for value in found), len(found))
    return {WIN_RATE: rate.mean, f"{WIN_RATE}_low": rate.low, f"{WIN_RATE}_high": rate.high}


def _means_of_rivals(episodes: Sequence[EpisodeRecord], roles: Roles) -> dict[str, float]:
    """Return for each of several trained policies its mean reward over the episodes in which it has one."""
    row = {}
    for policy in roles.rivals:
        scored = [(e, own) for e in episodes if (own := e.rewards_by_policies) is not None]
        found = [roles.of_episode(e.players).rewards_of(policy, own) for e, own in scored]
        rewards = [float(sum(one.values())) for one in found if one]
        if rewards:
            row[of_policy("validation/reward_mean", policy)] = sum(rewards) / len(rewards)
    return row


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


class WinRate(NamedTuple):
    """The mean over tasks of 1 for a win, 0.5 for a tie and 0 for a loss, with its 95 % interval."""

    mean: float
    low: float
    high: float


def win_rate(wins: int, losses: int, tasks: int) -> WinRate:
    """Return the win rate of at least one task; what is neither won nor lost is a tie.

    The interval is the score interval of a difference of paired proportions (Tango 1998, Statistics in Medicine 17,
    891-908): all differences that a score test at 5 % does not reject. Without ties it is Wilson's.
    """
    difference = (wins - losses) / tasks

    def bound(end: float, sign: int) -> float:
        inside, outside = difference, end
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            if sign * _score(wins, losses, tasks, middle) < NORMAL_95:
                inside = middle
            else:
                outside = middle
        return (1 + inside) / 2

    return WinRate((1 + difference) / 2, bound(-1.0, 1), bound(1.0, -1))


def _score(wins: int, losses: int, tasks: int, difference: float) -> float:
    """Return the score statistic of a difference; the probability of a loss is estimated under it."""
    b = (2 * tasks - wins + losses) * difference - wins - losses
    lost = (math.sqrt(b * b + 8 * tasks * losses * difference * (1 - difference)) - b) / (4 * tasks)
    variance = tasks * (2 * lost + difference * (1 - difference))
    excess = wins - losses - tasks * difference
    return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)
