"""What both clients say: one function a request."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError

from palestra.client.arguments import checked_amount
from palestra.client.episode import Episode, ModelEndpoint
from palestra.errors import InvalidRequest
from palestra.schemas.wire import (
    AbortEpisode,
    ClaimAnswer,
    ClaimEpisode,
    EndEpisode,
    EpisodeAnswer,
    HeartbeatEpisode,
    PushTasks,
    TaskBody,
    TasksPushed,
)

A = TypeVar("A", bound=BaseModel)

POLL_SECONDS = 20.0
HEARTBEAT_SECONDS = 10.0  # the longest that a heartbeat may wait for its answer
CHUNK_TASKS = 1000
CHUNK_BYTES = 2**20
LONGEST_PAUSE_SECONDS = 2.0  # between two tries; a server that is back waits so long for its workers


@dataclass(frozen=True, slots=True)
class Call(Generic[A]):
    """One request: `key` None means the job's."""

    path: str
    body: Any
    answer: type[A]
    key: str | None = None
    timeout_seconds: float = 30.0


def claim_call(
    worker_id: str, allow_discard_timeout: float | None, wait_seconds: float = POLL_SECONDS
) -> Call[ClaimAnswer]:
    """Ask for an episode; sent again as it is, it gets the same one."""
    body = ClaimEpisode(
        worker_id=worker_id,
        request_id=uuid.uuid4().hex,
        wait_seconds=wait_seconds,
        allow_discard_timeout=None
        if allow_discard_timeout is None
        else checked_amount("allow_discard_timeout", allow_discard_timeout, above_zero=True),
    )
    return Call("/claim_episode", body, ClaimAnswer, timeout_seconds=wait_seconds + 30)


def read_claim(answer: ClaimAnswer) -> tuple[Episode | None, bool]:
    """(the episode if there is one, whether the job is over)."""
    claimed = answer.episode
    if claimed is None:
        return None, answer.status == "finished"
    policy = ModelEndpoint(
        base_url=claimed.base_url, api_key=claimed.api_key, model=claimed.model, version=claimed.version
    )
    episode = Episode(
        episode_id=claimed.episode_id,
        kind=claimed.kind,
        task_id=claimed.task_id,
        task=dict(claimed.task),
        policy=policy,
        lease_seconds=claimed.lease_seconds,
    )
    return episode, False


def end_call(
    episode: Episode,
    reward: float | Mapping[str, float],
    step_rewards: Sequence[float] | None,
    metadata: Mapping[str, Any] | None,
) -> Call[EpisodeAnswer]:
    """Hand in a reward; sent again as it is, it changes nothing.

    Raises:
        InvalidRequest: a reward that is no finite number, or metadata that is no JSON.
    """
    by_agent = isinstance(reward, Mapping)
    with _checked():
        body = EndEpisode(
            episode_id=episode.episode_id,
            reward=None if by_agent else _number(reward),
            rewards={agent: _number(value) for agent, value in reward.items()} if isinstance(reward, Mapping) else None,
            step_rewards=None if step_rewards is None else tuple(_number(value) for value in step_rewards),
            metadata=dict(metadata or {}),
        )
    return Call("/end_episode", body, EpisodeAnswer, episode.api_key)


def _number(value: Any) -> float:
    """Return a reward as a float; a bool, and a scalar of numpy or torch, are welcome."""
    try:
        number = float(value if not isinstance(value, str | bytes) else None)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(
            f"a reward is a finite number, or None for an episode that is not to be scored; {value!r:.60} is neither",
            "reward",
        )
    return number


def is_scored(reward: Any) -> TypeGuard[float | Mapping[str, float]]:
    """Whether an episode has a reward: it is not None, and no agent's is."""
    return None not in reward.values() if isinstance(reward, Mapping) else reward is not None


@contextmanager
def _checked() -> Iterator[None]:
    """What the server would refuse is refused here, with the same error."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{place}: {first['msg'].removeprefix('Value error, ')}", place) from None


def abort_call(episode: Episode, reason: str, discard: bool) -> Call[EpisodeAnswer]:
    """Give an episode back."""
    body = AbortEpisode(episode_id=episode.episode_id, reason=reason[:2000], discard=discard)
    return Call("/abort_episode", body, EpisodeAnswer, episode.api_key)


def heartbeat_call(episode: Episode) -> Call[EpisodeAnswer]:
    """Renew a lease."""
    body = HeartbeatEpisode(episode_id=episode.episode_id)
    return Call("/heartbeat_episode", body, EpisodeAnswer, episode.api_key, HEARTBEAT_SECONDS)


def push_calls(tasks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Call[TasksPushed]]:
    """Tasks by split, in chunks named by their place, so that a push that broke off can be sent again whole."""
    chunks = [(split, start, bodies) for split, rows in tasks.items() for start, bodies in _chunks(rows)]
    for number, (split, start, bodies) in enumerate(chunks):
        final = number == len(chunks) - 1
        body = PushTasks(split=split, chunk_id=f"{split}-{start}", tasks=tuple(bodies), final=final)  # type: ignore[arg-type]
        yield Call("/tasks", body, TasksPushed)


def _chunks(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, list[TaskBody]]]:
    """(index of the first task, tasks): at most CHUNK_TASKS, and CHUNK_BYTES unless one task alone is larger."""
    start, size, bodies = 0, 0, list[TaskBody]()
    for index, row in enumerate(rows):
        body = _task_body(row)
        length = len(body.model_dump_json())
        if bodies and (len(bodies) == CHUNK_TASKS or size + length > CHUNK_BYTES):
            yield start, bodies
            start, size, bodies = index, 0, []
        size += length
        bodies.append(body)
    if bodies:
        yield start, bodies


def _task_body(row: Mapping[str, Any]) -> TaskBody:
    if not isinstance(row, Mapping):
        raise InvalidRequest(
            f"a task is a JSON object, such as {{'text': {str(row)[:40]!r}}}; {row!r:.60} is a {type(row).__name__}",
            "tasks",
        )
    data = dict(row)
    name = data.pop("id", None)
    with _checked():
        return TaskBody(id=None if name is None else str(name), data=data)
