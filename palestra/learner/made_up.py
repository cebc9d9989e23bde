"""Made-up episodes for `check_algorithm`, with several equivalent representations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.algorithms.base import Group
from palestra.tokens import token_weights
from palestra.types.calls import Chat, Floats, PolicyVersion, SamplingParams, VersionSpan
from palestra.types.messages import text_message
from palestra.types.records import EpisodeRecord, Task, TimeStep, TrainSample, Trajectory
from palestra.types.states import EpisodeState

GROUPS = ((1.0, 0.0, 0.25), (0.0, 2.0), (0.5, -0.5, 0.5, 0.0))
"""The rewards of the episodes of each group."""
_SAMPLED = 6  # tokens that each episode samples; divisible by every number of calls
_PROMPT_ID, _PADDING_ID, _FIRST_ID = 1, 2, 1000


def made_up_groups(
    *,
    rewards: Sequence[Sequence[float]] = GROUPS,
    prompt: int = 4,
    pad: int = 0,
    beside: float = float("nan"),
    calls: int = 1,
    rows: int = 1,
    alike: bool = True,
    reverse: bool = False,
) -> list[Group]:
    """Return groups of episodes whose sampled tokens have unique ids from 1000 on.

    Args:
        prompt: tokens before the first sampled one.
        pad: unsampled tokens at the end of each row.
        beside: logprob of unsampled tokens in a row.
        calls: per episode, all in one TimeStep, each continuing the one before.
        rows: per episode, among which its calls are divided.
        alike: whether every episode is split like this; otherwise only the first of each group is, and the others have
            one call and one row.
        reverse: whether to reverse each group's rows.
    """
    lengths = [
        _SAMPLED + (number + place) % 2 * _SAMPLED
        for number, group in enumerate(rewards)
        for place in range(len(group))
    ]
    weights = iter(token_weights(lengths, "seq-mean-token-mean", 64))
    found, first = [], _FIRST_ID
    for number, group in enumerate(rewards):
        episodes, of_group = [], []
        for place, reward in enumerate(group):
            length = _SAMPLED + (number + place) % 2 * _SAMPLED
            name = f"train-{number:06d}-{place:02d}"
            ids = np.arange(first, first + length, dtype=np.int32)
            first += length
            parts, pieces = (calls, rows) if alike or place == 0 else (1, 1)
            episodes.append(_trajectory(name, number, place, reward, _chats(name, ids, prompt, parts)))
            of_group += _rows(name, ids, prompt, pad, beside, parts, pieces, next(weights))
        found.append(Group(trajectories=tuple(episodes), rows=tuple(of_group[::-1] if reverse else of_group)))
    return found


def of_token(row: TrainSample, name: str) -> Floats:
    """Return a number for each sampled token that depends only on its id and `name`, float32 [N]; else NaN.

    Args:
        name: such as `old_logprobs`; numbers of different names differ by a few hundredths.
    """
    near = _logprobs(row.ids) + 0.1 * np.sin(row.ids * (1.0 + len(name)))
    return np.where(row.loss_mask, near, np.nan).astype(np.float32)


def _logprobs(ids: np.ndarray) -> np.ndarray:
    """Return the logprob at sampling of each of N tokens, [N], between -2.5 and -0.5."""
    return -1.5 + np.cos(ids * 1.7)


def _chats(name: str, ids: np.ndarray, prompt: int, calls: int) -> tuple[Chat, ...]:
    """Return the calls of an episode, with its sampled tokens divided among them."""
    found: list[Chat] = []
    for index, part in enumerate(np.array_split(ids, calls)):
        parent = found[-1] if found else None
        found.append(
            Chat(
                episode_id=name,
                fence=1,
                index=index,
                time_step=0,
                agent="agent",
                policy="policy",
                parent=parent,
                shared=0 if parent is None else parent.tokens,
                shared_messages=0 if parent is None else len(parent.messages) + 1,
                new_messages=(text_message("user", "hello"),),
                prompt_tail=np.full(prompt if parent is None else 0, _PROMPT_ID, np.int32),
                reply=text_message("assistant", "reply"),
                completion_ids=part,
                logprobs=_logprobs(part).astype(np.float32),
                versions=(VersionSpan(PolicyVersion(0, 0), len(part)),),
                finish_reason="stop",
                sampling=SamplingParams(temperature=1.0, max_tokens=64, seed=index),
                request_digest=f"{name} {index}",
                started_at=0.0,
                finished_at=1.0,
            )
        )
    return tuple(found)


def _trajectory(name: str, number: int, place: int, reward: float, chats: tuple[Chat, ...]) -> Trajectory:
    episode = EpisodeRecord(
        episode_id=name,
        kind="train",
        group_index=number,
        sample_index=place,
        task=Task(task_id=str(number), data={}),
        state=EpisodeState.COMPLETED,
        fence=1,
        attempts=1,
        rewards={"agent": reward},
        step_rewards=None,
        step_times=None,
        metadata={},
        worker_id=None,
        lease_seconds=60.0,
    )
    step = TimeStep(index=0, chats=chats, reward=None, observed_at=0.0, acted_at=1.0, terminated=True, truncated=False)
    return Trajectory(episode=episode, steps=(step,))


def _rows(
    name: str, ids: np.ndarray, prompt: int, pad: int, beside: float, calls: int, rows: int, weight: float
) -> list[TrainSample]:
    """Return the rows of an episode, each of which trains the tokens of some of its calls."""
    row = np.concatenate([np.full(prompt, _PROMPT_ID), ids, np.full(pad, _PADDING_ID)]).astype(np.int32)
    of_call = np.full(len(row), -1, np.int32)
    of_call[prompt : prompt + len(ids)] = np.concatenate(
        [np.full(len(part), index) for index, part in enumerate(np.array_split(ids, calls))]
    )
    found = []
    for chosen in np.array_split(np.arange(calls), rows):
        mask = np.isin(of_call, chosen)
        found.append(
            TrainSample(
                episode_id=name,
                policy="policy",
                ids=row,
                loss_mask=mask,
                logprobs=np.where(mask, _logprobs(row), beside).astype(np.float32),
                versions=np.where(mask[:, None], 0, -1).astype(np.int32).repeat(2, axis=1),
                calls=np.where(mask, of_call, -1).astype(np.int32),
                advantages=np.zeros(len(row), np.float32),
                loss_weights=mask * np.float32(weight),
                temperatures=np.ones(len(row), np.float32),
            )
        )
    return found
