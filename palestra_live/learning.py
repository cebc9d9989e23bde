"""Learning without groups: the feedback of a session against a moving mean of other sessions' feedback."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from palestra.algorithms.base import About
from palestra.algorithms.baselines import GroupAdvantages
from palestra.algorithms.credit import Returns
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.policy_gradient import PolicyGradient, clipped_loss
from palestra.config import OwnAlgorithmConfig
from palestra.types.records import Trajectory

BASELINE = "baseline"  # key in the task of a session's episode
WINDOW = 64  # sessions whose mean is a baseline


class MovingBaseline(PolicyGradient):
    """REINFORCE with the mean feedback of other sessions as baseline, which is stored with each episode."""

    config: OwnAlgorithmConfig
    about = About(
        summary="the baseline of a live session is the mean feedback of the 64 newest other sessions",
        formula="A = R - mean of the 64 newest other scores of its cluster, or of all where it has fewer; loss as in "
        "grpo",
        paper="Williams 1992, REINFORCE",
        needs=("a run of kind `live`",),
    )

    def shaped(self, trajectories: Sequence[Trajectory], returns: list[Returns]) -> list[Returns]:
        """Return the returns minus the baselines that were stored with the episodes."""
        return [
            replace(each, values={key: value - one.episode.task.data[BASELINE] for key, value in each.values.items()})
            for each, one in zip(returns, trajectories, strict=True)
        ]

    def estimate(self, groups: Sequence[Sequence[Returns]]) -> list[GroupAdvantages]:
        """Return the shaped returns as they are; see `PolicyGradient.estimate`."""
        return [
            GroupAdvantages(
                by_key=[dict(each.values) for each in returns],
                by_call=[{index: each.values[key] for index, key in each.key_of.items()} for each in returns],
                calls_without_peers=0,
            )
            for returns in groups
        ]

    def loss(self) -> LossSpec:
        """Return the clipped surrogate loss of PPO, with the configured bounds."""
        return clipped_loss(self.config)


class SessionScores:
    """The sessions with feedback that no step has used, and the scores of which baselines are means.

    Attributes:
        waiting: by session, its row of the store.
        total: how many have had a score.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Mapping[str, Any]] = {}
        self.total = 0
        # One more than a baseline needs, for the session itself.
        self._newest: deque[tuple[str, str | None, float]] = deque(maxlen=WINDOW + 1)
        self._of: dict[str | None, deque[tuple[str, str | None, float]]] = defaultdict(lambda: deque(maxlen=WINDOW + 1))

    def add(self, row: Mapping[str, Any], used: bool = False) -> None:
        """Add a session with a score, or something else to learn; `used`: a step has it, or never will."""
        if row["score"] is not None:
            one = row["session_id"], row["cluster"], row["score"]
            self._newest.append(one)
            self._of[row["cluster"]].append(one)
            self.total += 1
        if not used:
            self.waiting[row["session_id"]] = row

    def recall(self, rows: Iterable[Mapping[str, Any]], *cluster: str | None) -> None:
        """Put scores before all that were added, the newest first: those of one `cluster`, or the newest of all."""
        scores = self._of[cluster[0]] if cluster else self._newest
        for row in rows:
            if len(scores) <= WINDOW:
                scores.appendleft((row["session_id"], row["cluster"], row["score"]))
        self.total = max(self.total, len(self._newest))

    def remove(self, sessions: Collection[str]) -> None:
        """Forget sessions and their scores."""
        for scores in (self._newest, *self._of.values()):
            kept = [one for one in scores if one[0] not in sessions]
            scores.clear()
            scores.extend(kept)
        for name in sessions:
            self.waiting.pop(name, None)

    def baseline(self, session: str, cluster: str | None) -> float | None:
        """Return the baseline of a session; see `baseline_of`."""
        alike = baseline_of(session, cluster, reversed(self._of[cluster]))
        return baseline_of(session, cluster, reversed(self._newest)) if alike is None else alike


def baseline_of(session: str, cluster: str | None, scored: Iterable[tuple[str, str | None, float]]) -> float | None:
    """Return the mean of the `WINDOW` newest scores of other sessions of a cluster, or of all clusters where it has
    fewer. None: there are fewer in all, so the session has to wait.

    Args:
        cluster: None is one of its own.
        scored: (session, cluster, score) of the sessions with a score, newest first.
    """
    alike: list[float] = []
    others: list[float] = []
    for name, of, score in scored:
        if name == session:
            continue
        if len(others) < WINDOW:
            others.append(score)
        if of == cluster:
            alike.append(score)
            if len(alike) == WINDOW:
                return sum(alike) / WINDOW
    return sum(others) / WINDOW if len(others) == WINDOW else None
