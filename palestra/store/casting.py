"""Assigns policy versions to roles that have a pool, when an episode is claimed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import orjson
from sqlalchemy import Connection, bindparam, select

from palestra.config import Roles, past_name, past_of
from palestra.database.sqlite import Prepared
from palestra.store.tables import OF_GROUP, episodes, groups
from palestra.types.records import EpisodeRecord
from palestra.types.states import EpisodeState, GroupState

_STEP = Prepared(
    select(groups.c.step).where(groups.c.kind == bindparam("kind"), groups.c.group_index == bindparam("group_index"))
)
_RESULTS = Prepared(
    select(episodes.c.players, episodes.c.rewards)
    .join(groups, OF_GROUP)
    .where(
        groups.c.kind == "train",
        groups.c.state == GroupState.READY.value,
        groups.c.step > bindparam("after"),
        groups.c.step <= bindparam("until"),
        episodes.c.state == EpisodeState.COMPLETED.value,
        episodes.c.players.is_not(None),
    )
)


class Casting:
    """Draws the playing versions from the job's seed and the store.

    The step of an episode's group alone decides which versions exist and which results count, not the learner's
    progress, so an attempt meets the same versions after a restart.
    """

    def __init__(self, roles: Roles, seed: int, max_staleness: int) -> None:
        self.roles, self.done = roles, 0
        self._seed, self._ahead = seed, max_staleness
        self._counted = 0  # the results of all steps up to this one are in the totals
        self._totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # points, games

    def players(self, connection: Connection, episode: EpisodeRecord) -> dict[str, str]:
        """Return the player of each role that has a pool: a past version, or the policy itself.

        All episodes of a group have the same players, because their rewards are compared with each other.
        """
        done = self._done_before(connection, episode)
        found: dict[str, str] = {}
        for role, pool in sorted(self.roles.pools.items()):
            policy, versions = self.roles.named[role], pool.versions(done)
            rates: Mapping[int, float] = {}
            if pool.choice == "prioritized":
                rates = {version: self._win_rate(connection, done, past_name(policy, version)) for version in versions}
            version = pool.draw(f"{self._seed}/{episode.kind}/{episode.group_index}/{role}", versions, rates)
            found[role] = policy if version is None else past_name(policy, version)
        return found

    def _done_before(self, connection: Connection, episode: EpisodeRecord) -> int:
        """Return how many steps are done, at least, whenever an episode is played."""
        row = _STEP.row(connection, {"kind": episode.kind, "group_index": episode.group_index})
        if row is None:  # outside the schedule
            return self.done
        return int(row.step) if episode.kind == "validation" else max(int(row.step) - 1 - self._ahead, 0)

    def _win_rate(self, connection: Connection, done: int, version: str) -> float:
        """Return the share of points against a version, with half a point of one more, drawn game."""
        if done < self._counted:
            self._counted = 0
            self._totals.clear()
        if done > self._counted:
            for row in _RESULTS.rows(connection, {"after": self._counted, "until": done}):
                for name, points in results(self.roles, orjson.loads(row.players), orjson.loads(row.rewards)).items():
                    self._totals[name][0] += points
                    self._totals[name][1] += 1.0
            self._counted = done
        points, games = self._totals.get(version, (0.0, 0.0))
        return (points + 0.5) / (games + 1.0)


def results(roles: Roles, players: Mapping[str, str], rewards: Mapping[str, float]) -> dict[str, float]:
    """Return the trained policies' result against each past version: 1 won, 0.5 drawn, 0 lost.

    Compares the mean rewards of the trained policies' agents and of the version's agents. A version without rewards is
    left out.
    """
    cast = roles.of_episode(players)
    played = {agent: cast.policy_of(agent) for agent in rewards}
    ours = [rewards[agent] for agent, policy in played.items() if policy not in cast.frozen]
    found: dict[str, float] = {}
    for version in sorted({policy for policy in played.values() if past_of(policy) is not None}):
        theirs = [rewards[agent] for agent, policy in played.items() if policy == version]
        if ours:
            won = sum(ours) / len(ours) - sum(theirs) / len(theirs)
            found[version] = 0.5 if won == 0 else float(won > 0)
    return found
