"""An episode as lists show it: those of the page, of the terminal, and of programs."""

from __future__ import annotations

from palestra.dashboard.answers import EpisodeLine
from palestra.dashboard.runs import DAMAGED
from palestra.store.browsing import EpisodeSummary
from palestra.store.search import DamagedEpisode

MOST_METADATA = 500  # characters; a list of a page has 200 episodes


def episode_line(found: EpisodeSummary | DamagedEpisode) -> EpisodeLine:
    """Return an episode as lists show it."""
    if isinstance(found, DamagedEpisode):
        return EpisodeLine(
            episode_id=found.episode_id,
            group_index=found.place.group_index,
            sample_index=found.place.sample_index,
            damaged=found.why,
        )
    try:
        return _line(found)
    except DAMAGED as error:
        return EpisodeLine(
            episode_id=found.episode_id,
            group_index=found.group_index,
            sample_index=found.sample_index,
            damaged=f"{type(error).__name__}: {error}"[:200],
        )


def _line(found: EpisodeSummary) -> EpisodeLine:
    metadata = ", ".join(f"{name}={value!r}" for name, value in found.metadata.items())
    return EpisodeLine(
        episode_id=found.episode_id,
        kind=found.kind,
        group_index=found.group_index,
        sample_index=found.sample_index,
        task_id=found.task_id,
        state=found.state,
        reward=found.reward,
        rewards=found.rewards,
        calls=found.calls,
        tokens=found.completion_tokens,
        cut=found.cut,
        attempts=found.attempts,
        forks={reason.value: count for reason, count in found.forks.items()},
        refused=found.refused,
        termination=found.termination,
        reason=found.reason,
        earlier_reason=found.earlier_reason,
        metadata=metadata if len(metadata) <= MOST_METADATA else f"{metadata[: MOST_METADATA - 1]}…",
        worker=found.worker_id,
        claimed_at=found.claimed_at,
        players=found.players,
    )
