"""What both clients say, and how they try again, without any input or output."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.client.episode import Episode, Policy
from palestra.errors import (
    Conflict,
    ConnectionLost,
    Forbidden,
    InvalidRequest,
    NotFound,
    PalestraError,
    PayloadTooLarge,
    TooManyRequests,
    Unauthorized,
)
from palestra.schemas.wire import (
    AbortEpisode,
    ClaimAnswer,
    ClaimEpisode,
    EndEpisode,
    HeartbeatEpisode,
    PushTasks,
    TaskBody,
)

POLL_SECONDS = 20.0
CHUNK_TASKS = 1000
_BY_STATUS: dict[int, type[PalestraError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: PayloadTooLarge,
    422: InvalidRequest,
    400: InvalidRequest,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request: `key` None means the job's."""

    path: str
    body: Any
    key: str | None = None
    timeout_seconds: float = 30.0


def claim_call(worker_id: str, allow_discard_timeout: float | None, wait_seconds: float = POLL_SECONDS) -> Call:
    """Ask for an episode; sent again as it is, it gets the same one."""
    body = ClaimEpisode(
        worker_id=worker_id,
        request_id=uuid.uuid4().hex,
        wait_seconds=wait_seconds,
        allow_discard_timeout=allow_discard_timeout,
    )
    return Call("/claim_episode", body, timeout_seconds=wait_seconds + 30)


def read_claim(answer: Any) -> tuple[Episode | None, bool]:
    """(the episode if there is one, whether the job is over)."""
    parsed = ClaimAnswer.model_validate(answer)
    claimed = parsed.episode
    if claimed is None:
        return None, parsed.status == "finished"
    policy = Policy(base_url=claimed.base_url, api_key=claimed.api_key, model=claimed.model, version=claimed.version)
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
) -> Call:
    """Hand in a reward; sent again as it is, it changes nothing."""
    by_agent = isinstance(reward, Mapping)
    body = EndEpisode(
        episode_id=episode.episode_id,
        reward=None if by_agent else _number(reward),
        rewards={agent: _number(value) for agent, value in reward.items()} if isinstance(reward, Mapping) else None,
        step_rewards=None if step_rewards is None else tuple(_number(value) for value in step_rewards),
        metadata=dict(metadata or {}),
    )
    return Call("/end_episode", body, episode.api_key)


def _number(value: Any) -> float:
    """Numpy and bool rewards are welcome; what is no number is left for the check that follows."""
    return value if isinstance(value, str) else float(value)  # type: ignore[return-value]


def abort_call(episode: Episode, reason: str, discard: bool) -> Call:
    """Give an episode back."""
    body = AbortEpisode(episode_id=episode.episode_id, reason=reason[:2000], discard=discard)
    return Call("/abort_episode", body, episode.api_key)


def heartbeat_call(episode: Episode) -> Call:
    """Renew a lease."""
    return Call("/heartbeat_episode", HeartbeatEpisode(episode_id=episode.episode_id), episode.api_key)


def push_calls(tasks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Call]:
    """Tasks by split, in chunks named by their place, so that a push that broke off can be sent again whole."""
    chunks = [
        (split, start, rows[start : start + CHUNK_TASKS])
        for split, rows in tasks.items()
        for start in range(0, len(rows), CHUNK_TASKS)
    ]
    for number, (split, start, rows) in enumerate(chunks):
        bodies = tuple(_task_body(row) for row in rows)
        final = number == len(chunks) - 1
        chunk_id = f"{split}-{start}"
        yield Call("/tasks", PushTasks(split=split, chunk_id=chunk_id, tasks=bodies, final=final))  # type: ignore[arg-type]


def _task_body(row: Mapping[str, Any]) -> TaskBody:
    data = dict(row)
    return TaskBody(id=str(data.pop("id")) if "id" in data else None, data=data)


def error_of(status: int, answer: Any) -> PalestraError:
    """The error that an answer stands for."""
    message = f"the server answered {status}"
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        message = str(answer["error"].get("message", message))
    if status == 429:
        return TooManyRequests(message)
    if status >= 500:
        return ConnectionLost(message)
    return _BY_STATUS.get(status, PalestraError)(message)


def may_retry(status: int) -> bool:
    """All calls are idempotent, so those that the server could not serve now are sent again."""
    return status == 429 or status >= 500


def backoff_seconds(attempt: int, draw: random.Random) -> float:
    """0.1, 0.2, 0.4, … up to 5 s, each shortened by up to a half at random."""
    return min(5.0, 0.1 * 2.0**attempt) * (0.5 + draw.random() / 2)
