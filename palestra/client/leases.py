"""Operations on episodes shared by both clients, without input or output: claim, submit, release."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from palestra.client.episode import Episode
from palestra.client.exchange import Exchange, Settings, send_call
from palestra.client.protocol import ApiCall, abort_call, finish_call, push_calls, read_claim
from palestra.client.task_files import task_source
from palestra.errors import ClaimOver, Conflict, InvalidRequest, JobOver, PalestraError
from palestra.types.wire import ClaimAnswer

log = logging.getLogger("palestra.client")
GIVE_BACK_SECONDS = 5.0  # limit for giving an episode back after an error; later, its lease runs out
TaskSource = Iterable[Mapping[str, Any]] | str | Path


def claim(
    settings: Settings,
    call: ApiCall[ClaimAnswer],
    read: Callable[[ClaimAnswer], tuple[Episode | None, bool]] = read_claim,
) -> Exchange[tuple[Episode | None, bool]]:
    """Send a claim; return the episode, or None, and whether the job is over."""
    try:
        return read((yield from send_call(settings, call)))
    except ClaimOver:
        return None, False
    except JobOver:
        return None, True


def hand_in(settings: Settings, episode: Episode) -> Exchange[None]:
    """End an episode with the results set in its block."""
    if episode.reward is None and episode.named_rewards is None:
        raise InvalidRequest(f"episode {episode.episode_id}: set episode.reward before the block ends", "reward")
    metadata, named = episode.metadata or None, episode.named_rewards
    call = finish_call(episode, episode.reward, metadata=metadata, named_rewards=named, truncated=episode.truncated)
    yield from send_call(settings, call)


def give_back(settings: Settings, episode: Episode, error: BaseException) -> Exchange[bool]:
    """Release an episode because of an error in its block, and return False: the error is not settled.

    A failure is only logged: the user must see the block's own error, and the lease expires by itself.
    """
    try:
        call = abort_call(episode, f"{type(error).__name__}: {error}", discard=False)
        yield from send_call(settings, call, GIVE_BACK_SECONDS)
    except Conflict as problem:
        log.info("episode %s is not this client's any more: %s", episode.episode_id, problem)
    except PalestraError as problem:
        log.warning("episode %s was not given back, its lease runs out instead: %s", episode.episode_id, problem)
    return False


def push(settings: Settings, train: TaskSource, validation: TaskSource) -> Exchange[None]:
    """Push all tasks of a job; see `Client.push_tasks`."""
    for call in push_calls({"validation": task_source(validation), "train": task_source(train)}):
        yield from send_call(settings, call)
