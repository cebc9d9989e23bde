"""The requests of both clients and how answers are read, one function for each request."""

from __future__ import annotations

import inspect
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from palestra.client.episode import Episode, ModelEndpoint, Reward, RolloutResult
from palestra.client.plain_values import checked_amount, plain_object
from palestra.errors import InvalidRequest
from palestra.types.calls import AgentStepReward
from palestra.types.messages import ChatMessage
from palestra.types.seat_wire import ActionAccepted, ActSeat, ObserveSeat, SeatAnswer
from palestra.types.wire import (
    AbortEpisode,
    ClaimAnswer,
    ClaimEpisode,
    EndEpisode,
    EpisodeAnswer,
    HeartbeatEpisode,
    PictureKept,
    PushTasks,
    RolloutFacts,
    TaskBody,
    TasksPushed,
)

A = TypeVar("A", bound=BaseModel)

POLL_SECONDS = 20.0
HEARTBEAT_SECONDS = 10.0  # limit for the answer to a heartbeat
CHUNK_TASKS = 1000
CHUNK_BYTES = 2**20
LONGEST_PAUSE_SECONDS = 2.0  # between two attempts: workers find a restarted server within this time


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[A]):
    """One request to a data plane and the type of its answer. A `key` of None means the job's key."""

    path: str
    body: Any
    answer: type[A]
    key: str | None = None
    timeout_seconds: float = 30.0
    method: str = "POST"
    headers: Mapping[str, str | bytes] = field(default_factory=dict)


def claim_call(
    worker_id: str,
    allow_discard_timeout: float | None,
    wait_seconds: float = POLL_SECONDS,
    role: str | None = None,
    episode_id: str | None = None,
) -> ApiCall[ClaimAnswer]:
    """Build the request that claims an episode, or an external player's slot. Repeating it returns the same one.

    Args:
        allow_discard_timeout: lease in seconds; None: the job's setting.
        wait_seconds: how long the server may wait for an episode.
        role: the external player's; None: a whole episode.
        episode_id: of the only episode to claim; None: any.
    """
    with _checked():
        body = ClaimEpisode(
            worker_id=worker_id,
            request_id=uuid.uuid4().hex,
            wait_seconds=wait_seconds,
            allow_discard_timeout=None
            if allow_discard_timeout is None
            else checked_amount("allow_discard_timeout", allow_discard_timeout, above_zero=True),
            role=role,
            episode_id=episode_id,
        )
    return ApiCall("/claim_episode", body, ClaimAnswer, timeout_seconds=wait_seconds + 30)


def read_claim(answer: ClaimAnswer) -> tuple[Episode | None, bool]:
    """Return the claimed episode, or None, and whether the job is over."""
    claimed = answer.episode
    if claimed is None:
        return None, answer.status == "finished"
    policy = ModelEndpoint(
        base_url=claimed.base_url,
        api_key=claimed.api_key,
        model=claimed.model,
        version=claimed.version,
        policies=dict(claimed.policies),
        max_context=claimed.max_context,
        max_tokens=claimed.max_tokens,
    )
    episode = Episode(
        episode_id=claimed.episode_id,
        kind=claimed.kind,
        task_id=claimed.task_id,
        task=dict(claimed.task),
        policy=policy,
        lease_seconds=claimed.lease_seconds,
        players=dict(claimed.players),
    )
    return episode, False


def facts_call() -> ApiCall[RolloutFacts]:
    """Build the request for the facts that a worker of an environment needs."""
    return ApiCall("/rollout", None, RolloutFacts, method="GET")


def finish_call(episode: Episode, reward: Reward | RolloutResult | None, **parts: Any) -> ApiCall[EpisodeAnswer]:
    """Build the request that ends an episode, or drops it if a whole result has no score. `parts`: the other fields of
    a `RolloutResult`, by name; None and False: not given.
    """
    given = {name: part for name, part in parts.items() if part is not None and part is not False}
    if not isinstance(reward, RolloutResult):
        return end_call(episode, RolloutResult(reward=reward, **given))
    if given:
        name = next(iter(given))
        raise InvalidRequest(f"a RolloutResult is the whole result: set {name} in it", name)
    if not is_scored(reward):
        return abort_call(episode, "not_scored: the result has no reward", discard=True)
    return end_call(episode, reward)


def end_call(episode: Episode, result: RolloutResult) -> ApiCall[EpisodeAnswer]:
    """Build the request that submits a result. Repeating it has no effect."""
    reward, step_rewards, named_rewards, steps = result.reward, result.step_rewards, result.named_rewards, result.steps
    if (reward is None) == (named_rewards is None) and not isinstance(reward, Mapping):
        raise InvalidRequest("an episode ends with a reward or with named rewards", "reward")
    earned = None if steps is None else steps.rewards
    if step_rewards is not None and any(isinstance(one, Mapping) for one in step_rewards):
        step_rewards, earned = _by_agent(step_rewards)
    with _checked():
        body = EndEpisode(
            episode_id=episode.episode_id,
            reward=None if reward is None or isinstance(reward, Mapping) else _number(reward),
            rewards={agent: _number(value) for agent, value in reward.items()} if isinstance(reward, Mapping) else None,
            named_rewards=None
            if named_rewards is None
            else {name: None if value is None else _number(value) for name, value in named_rewards.items()},
            step_rewards=None if step_rewards is None else tuple(_number(value) for value in step_rewards),
            metadata=plain_object(result.metadata, "metadata"),
            agent_step_rewards=None if earned is None else tuple(earned),
            step_times=None if steps is None else tuple(steps.times),
            facts=None if steps is None else dict(steps.facts),
            truncated=result.truncated,
            forfeit=result.forfeit,
        )
    return ApiCall("/end_episode", body, EpisodeAnswer, episode.api_key)


def _by_agent(step_rewards: Sequence[Reward]) -> tuple[list[float], list[AgentStepReward]]:
    """Return the sum of each TimeStep's rewards by agent, and the rewards one by one."""
    earned = []
    for step, rewards in enumerate(step_rewards):
        if not isinstance(rewards, Mapping):
            raise InvalidRequest(
                f"step_rewards has rewards by agent, and {rewards!r:.60} for TimeStep {step}, which does not say whose "
                "it is; give {} where nobody earns anything",
                "step_rewards",
            )
        earned += [AgentStepReward(step, agent, _number(value)) for agent, value in rewards.items()]
    sums = [0.0] * len(step_rewards)
    for step, _, reward in earned:
        sums[step] += reward
    return sums, earned


def _number(value: Any) -> float:
    """Return a reward as a float; accepts a bool and a scalar of numpy or torch as well."""
    try:
        number = float(value if not isinstance(value, str | bytes) else None)  # type: ignore[arg-type]
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # the last: a tensor of several numbers
        number = math.nan
    if not math.isfinite(number):
        why = "was not awaited" if inspect.iscoroutine(value) else "is neither"
        raise InvalidRequest(
            f"a reward is a finite number, or None for an episode that is not to be scored; {value!r:.60} {why}",
            "reward",
        )
    return number


def is_scored(result: RolloutResult) -> bool:
    """Return whether an episode has a reward: one number, all agents' numbers, or at least one named reward."""
    if result.named_rewards is not None:
        return any(value is not None for value in result.named_rewards.values())
    return None not in result.reward.values() if isinstance(result.reward, Mapping) else result.reward is not None


@contextmanager
def _checked() -> Iterator[None]:
    """Raise InvalidRequest, before sending, for what the server would refuse."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{place}: {first['msg'].removeprefix('Value error, ')}", place) from None


def abort_call(episode: Episode, reason: str, discard: bool) -> ApiCall[EpisodeAnswer]:
    """Build the request that releases an episode. `reason`: recorded with the attempt; truncated to 2,000 characters.
    `discard`: whether to drop the episode instead of retrying it.
    """
    body = AbortEpisode(episode_id=episode.episode_id, reason=reason[:2000], discard=discard)
    return ApiCall("/abort_episode", body, EpisodeAnswer, episode.api_key)


def upload_call(data: bytes, digest: str, key: str | None) -> ApiCall[PictureKept]:
    """Build the request that uploads a picture. Repeating it has no effect. `digest` is its SHA-256, in hex; `key` an
    episode's, or None for the job's.
    """
    headers = {"content-type": "application/octet-stream"}
    return ApiCall(f"/pictures/{digest}", data, PictureKept, key, method="PUT", headers=headers)


def heartbeat_call(episode: Episode) -> ApiCall[EpisodeAnswer]:
    """Build the request that renews the lease of an episode."""
    body = HeartbeatEpisode(episode_id=episode.episode_id)
    return ApiCall("/heartbeat_episode", body, EpisodeAnswer, episode.api_key, HEARTBEAT_SECONDS)


def observe_call(episode: Episode, events_seen: int, wait_seconds: float = POLL_SECONDS) -> ApiCall[SeatAnswer]:
    """Build the request that waits until an external player has to act. `wait_seconds`: how long the server may wait
    before it answers.
    """
    body = ObserveSeat(episode_id=episode.episode_id, events_seen=events_seen, wait_seconds=wait_seconds)
    return ApiCall("/observe_seat", body, SeatAnswer, episode.api_key, timeout_seconds=wait_seconds + 30)


def act_call(episode: Episode, observation_id: str, action: str | ChatMessage) -> ApiCall[ActionAccepted]:
    """Build the request that answers an observation. Repeating it has no effect."""
    message = action if isinstance(action, ChatMessage) else None
    with _checked():
        body = ActSeat(
            episode_id=episode.episode_id,
            observation_id=observation_id,
            content=str(action) if message is None else message.text,
            reasoning_content=None if message is None else message.reasoning_content,
            tool_calls=() if message is None else message.tool_calls,
        )
    return ApiCall("/act_seat", body, ActionAccepted, episode.api_key)


def push_calls(tasks: Mapping[str, Iterable[dict[str, Any]]]) -> Iterator[ApiCall[TasksPushed]]:
    """Build the requests that push tasks by split, in chunks.

    A chunk's id is its split and position, so that an interrupted push can be repeated as a whole.
    """
    chunks = ((split, *chunk) for split, rows in tasks.items() for chunk in _chunks(rows))
    following = next(chunks, None)
    while following is not None:
        (split, start, bodies), following = following, next(chunks, None)
        final = following is None
        body = PushTasks(split=split, chunk_id=f"{split}-{start}", tasks=tuple(bodies), final=final)  # type: ignore[arg-type]
        yield ApiCall("/tasks", body, TasksPushed)


def _chunks(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, list[TaskBody]]]:
    """Yield the index of the first task of each chunk, and the chunk; a task that is too large has its own."""
    start, size, bodies = 0, 0, list[TaskBody]()
    for index, data in enumerate(rows):
        body = TaskBody(data=data)
        length = len(body.model_dump_json())
        if bodies and (len(bodies) == CHUNK_TASKS or size + length > CHUNK_BYTES):
            yield start, bodies
            start, size, bodies = index, 0, []
        size += length
        bodies.append(body)
    if bodies:
        yield start, bodies
