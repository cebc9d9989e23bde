"""`Judge`: scores episodes when they have been played, one at a time or a whole group, before they are complete.

A package brings one by an entry point of `palestra.judges`: a class derived from `palestra.config.JudgeConfig`, which
is the table `[judge]` of a job, and whose `make` returns the judge. See `palestra_judges`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from palestra.config import Roles
from palestra.errors import ConfigError
from palestra.types.calls import Chat
from palestra.types.records import EpisodeKind, Trajectory, Verdict, VerdictKey


class VerdictBook(Protocol):
    """The verdicts of a run, on the disk. A judge records each before it returns, and asks for none that is known."""

    async def known(self, key: VerdictKey) -> Verdict | None:
        """Return a verdict that was given before, or None."""
        ...

    async def record(self, key: VerdictKey, verdict: Verdict) -> None:
        """Keep a verdict; returns when it is on disk."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGroup:
    """Episodes of one task that a judge sees together.

    Attributes:
        trajectories: the episodes with their calls: those that wait for a verdict and, for a judge of whole groups,
            those that they are compared with. A validation episode is compared with the first validated of its task.
        waiting: ids of the episodes that wait for a verdict.
        judged: by episode, the agent that earns what the judge gives: the one that learns and spoke last.
    """

    kind: EpisodeKind
    group_index: int
    trajectories: tuple[Trajectory, ...]
    waiting: frozenset[str]
    seed: int
    judged: Mapping[str, str] = field(default_factory=dict)

    def key(self, rubric: str, judge: str, ordering: int = 0) -> VerdictKey:
        """Return the key of a verdict on these episodes; the arguments are those of `VerdictKey`."""
        episodes = [trajectory.episode for trajectory in self.trajectories]
        members = tuple((episode.episode_id, episode.fence) for episode in episodes)
        return VerdictKey(
            kind=self.kind,
            group_index=self.group_index,
            members=members,
            rubric=rubric,
            judge=judge,
            ordering=ordering,
        )


class Judge(Protocol):
    """Scores episodes. It runs on an event loop of its own, in a thread, and may be asked several things at once.

    Attributes:
        whole_groups: whether it compares the episodes of a group. Else it gets one episode at a time, as soon as that
            has been played.
    """

    whole_groups: bool

    async def open(self) -> list[str]:
        """Prepare to judge; called once, on the judge's event loop.

        Returns:
            What the user has to know of the judge, such as that it agrees with few labels.

        Raises:
            PalestraError: it cannot judge; the job fails.
        """
        ...

    async def judge(self, group: JudgedGroup, book: VerdictBook) -> Mapping[str, Mapping[str, float]]:
        """Return the named rewards of each waiting episode, by its id. One that is left out is discarded.

        Raises:
            JudgeFailed: it has no verdict: all waiting episodes of `group` are discarded, and are in no mean.
            PalestraError: it cannot judge any more; the job fails.
        """
        ...

    async def close(self) -> None:
        """Close connections; called once, on the judge's event loop."""
        ...


class ProbedJudge(ABC):
    """Base of a judge whose verdicts on canned replies can be asked for, as an audit does from time to time."""

    @abstractmethod
    async def probe(self, group: JudgedGroup, book: VerdictBook) -> list[float]:
        """Return the scores of canned replies to the task of a group, each from 0 to 1; without those that failed.

        Raises:
            PalestraError: it cannot judge any more.
        """


def weighted_share(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return what named scores have of the largest weighted sum; one with a negative weight counts the other way.

    Args:
        scores: each from 0 to 1.
        weights: 1 if a name has none.

    Raises:
        ConfigError: a score is outside of these bounds, or all weights are 0.
    """
    got = most = 0.0
    for name, score in scores.items():
        if not 0.0 <= score <= 1.0:
            raise ConfigError(f"the judge of an audit scores from 0 to 1, and {name!r} is {score!r}")
        weight = weights.get(name, 1.0)
        got += abs(weight) * (score if weight >= 0 else 1 - score)
        most += abs(weight)
    if not most:
        raise ConfigError("the judge of an audit gives no score with a weight")
    return got / most


def spoken_calls(trajectory: Trajectory, players: Roles) -> list[Chat]:
    """Return the calls of the agents that learn."""
    roles = players.of_episode(trajectory.episode.players)
    return [chat for step in trajectory.steps for chat in step.chats if roles.learns(chat.agent)]


def last_speakers(trajectories: Sequence[Trajectory], players: Roles) -> dict[str, str]:
    """Return by episode the agent that learns and spoke last; without episodes in which none spoke."""
    return {one.episode.episode_id: calls[-1].agent for one in trajectories if (calls := spoken_calls(one, players))}
