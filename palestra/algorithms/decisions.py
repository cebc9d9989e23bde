"""The decisions of an episode: calls whose replies are restricted to finitely many choices, with a row
for each choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palestra.algorithms.base import StepOrder
from palestra.algorithms.credit import step_places
from palestra.algorithms.gae import earned_by
from palestra.config import TokenCredit
from palestra.types.calls import Floats
from palestra.types.records import TrainSample, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """One call: its choices, and the outcome of the chosen one.

    Attributes:
        rows: int64 [A], row index of each choice.
        places: positions of each choice's tokens in its row, A arrays.
        taken: index into `rows` of the sampled choice.
        reward: earned between this decision and the agent's next one.
        discount: factor from this decision to the next one.
        following: the agent's next decision; None: this is the last.
        ended: whether the episode ended after the last decision; False: it was cut off, and further rewards are
            unknown.
    """

    rows: NDArray[np.int64]
    places: tuple[NDArray[np.int64], ...]
    taken: int
    reward: float
    discount: float
    following: Decision | None
    ended: bool

    def logprobs(self, columns: Mapping[int, Floats]) -> NDArray[np.float64]:
        """Return the log-probability of each choice, float64 [A], from those of tokens, [N] by row index."""
        return np.array([columns[row][place].sum(dtype=np.float64) for row, place in self._choices()], np.float64)

    def at_ends(self, columns: Mapping[int, Floats]) -> NDArray[np.float64]:
        """Return the number at the last token of each choice, float64 [A], from columns [N] by row index."""
        return np.array([columns[row][place[-1]] for row, place in self._choices()], np.float64)

    def _choices(self) -> list[tuple[int, NDArray[np.int64]]]:
        return list(zip(self.rows.tolist(), self.places, strict=True))


def decisions_of(
    trajectory: Trajectory,
    rows: Mapping[int, TrainSample],
    credit: TokenCredit,
    discount: float,
    order: StepOrder = "observed",
) -> list[Decision]:
    """Return the decisions of an episode, agent by agent in order of time.

    Args:
        rows: the episode's rows by index: one for each choice of each call (`tokens.choice_rows`).
        credit: which rewards a decision earned; see `gae.chains_of`.
    """
    if trajectory.episode.reward is None:
        raise ValueError(f"episode {trajectory.episode.episode_id} has no reward")
    place_of = step_places(trajectory, order)
    of_call: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in rows.items():
        of_call[int(row.calls[np.argmax(row.loss_mask)])].append(number)
    calls: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)  # (time, call) by agent
    for chat in trajectory.chats:
        if chat.index in of_call:
            calls[chat.agent].append((place_of[chat.time_step], chat.index))
    found: list[Decision] = []
    for agent in sorted(calls):
        ordered = sorted(calls[agent])
        times = np.array([time for time, _ in ordered], np.int64)
        earned = earned_by(agent, times, trajectory, place_of, credit, discount)
        discounts = np.power(discount, np.append(np.diff(times), 1).astype(np.float64))
        following: Decision | None = None
        own: list[Decision] = []
        for place in reversed(range(len(ordered))):
            numbers = of_call[ordered[place][1]]
            following = Decision(
                rows=np.array(numbers, np.int64),
                places=tuple(np.flatnonzero(rows[number].loss_mask) for number in numbers),
                taken=_taken([rows[number] for number in numbers]),
                reward=float(earned[place]),
                discount=float(discounts[place]),
                following=following,
                ended=not trajectory.episode.truncated,
            )
            own.append(following)
        found += reversed(own)
    return found


def _taken(rows: list[TrainSample]) -> int:
    """Return which of a call's rows was sampled."""
    return next(place for place, row in enumerate(rows) if np.isfinite(row.logprobs[row.loss_mask]).all())
