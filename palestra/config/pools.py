"""A role that is played by past versions of a trained policy: its settings, and the versions of a step."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from palestra.config.section import TAG_OF_NAME, TAG_OF_TABLE, Identifier, Positive, Section

MAX_POOL = 64  # versions, each of which is one more copy of the weights in the engine
_PAST = re.compile(r"(?P<policy>[^@]+)@(?P<step>\d+)")
_LATEST_LAST = 2**64


def past_name(policy: str, step: int) -> str:
    """Return the name of a policy's version after a step: `white@5`."""
    return f"{policy}@{step}"


def past_of(name: str) -> tuple[str, int] | None:
    """Return policy and step of a past version's name; None: it names a policy."""
    found = _PAST.fullmatch(name)
    return None if found is None else (found["policy"], int(found["step"]))


class PoolConfig(Section):
    """Past versions of a policy that play a role: which to keep, and how to choose one for an episode."""

    every_steps: Positive = Field(
        5, description="A version is added after every so many steps; the first one has the weights of step 0."
    )
    size: Positive = Field(
        8,
        le=MAX_POOL,
        description="Versions in the pool, the newest ones. Each is one more copy of the policy's weights in the "
        "engine's memory, and one on the disk.",
    )
    choice: Literal["uniform", "prioritized"] = Field(
        "uniform",
        description="`uniform`: each version equally often; `prioritized`: with a weight of (1 - win rate) ** `power`, "
        "where the win rate is that of the agents that learn against this version, over all steps that are done when "
        "an episode of a step s may be played first: up to s - 1 - `rollout.max_staleness` (PFSP: Vinyals et al. "
        "2019).",
    )
    power: float = Field(2.0, gt=0, le=16, description="Exponent of `prioritized`: how much more the hard ones count.")
    latest_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the groups in which the newest version plays the role; it then learns from the role's "
        "reward. 0: the role is always played by a past version, and nothing is learned from it.",
    )

    def versions(self, done: int) -> tuple[int, ...]:
        """Return the pool's versions, oldest first, by the step that made them."""
        return tuple(range(0, done + 1, self.every_steps))[-self.size :]

    def weights(self, versions: Sequence[int], win_rates: Mapping[int, float]) -> tuple[float, ...]:
        """Return the relative weight of each version in the choice.

        Args:
            win_rates: of learners against a version, from 0 to 1; 0.5 for a missing one.
        """
        if self.choice == "uniform":
            return (1.0,) * len(versions)
        return tuple((1.0 - win_rates.get(version, 0.5)) ** self.power for version in versions)

    def draw(self, key: str, versions: Sequence[int], win_rates: Mapping[int, float]) -> int | None:
        """Return the version that plays; None: the newest weights. Equal arguments give equal results.

        Args:
            win_rates: see `weights`.
        """
        digest = hashlib.sha256(key.encode()).digest()
        latest, place = (int.from_bytes(part, "big") / _LATEST_LAST for part in (digest[:8], digest[8:16]))
        if latest < self.latest_share:
            return None
        weights = self.weights(versions, win_rates)
        left = place * sum(weights)
        for version, weight in zip(versions, weights, strict=True):
            left -= weight
            if left < 0:
                return version
        return versions[-1]  # by the rounding of the sum


class RoleConfig(Section):
    """Who plays a role: the newest weights of a policy, or its past versions."""

    policy: Identifier = Field(description="Name of the policy; of a pool, one that is trained.")
    versions: Literal["latest", "pool"] = Field(
        "latest", description="`latest`: its newest weights, as where the role is only a name; `pool`: past versions."
    )
    pool: PoolConfig | None = Field(None, description="Settings of the pool.")

    @model_validator(mode="before")
    @classmethod
    def _pool_has_settings(cls, data: Any) -> Any:
        """Take the defaults of a pool where there is one and no setting is given."""
        if isinstance(data, Mapping) and data.get("versions") == "pool" and data.get("pool") is None:
            return {**data, "pool": {}}
        return data

    @model_validator(mode="after")
    def _settings_are_used(self) -> RoleConfig:
        if self.versions == "latest" and self.pool is not None:
            raise ValueError('a role has a `pool` only with versions = "pool"; set that, or leave the pool out')
        return self


def _plain(role: str | RoleConfig) -> str | RoleConfig:
    """Return a role without a pool as its policy's name, so that it has one form."""
    return role.policy if isinstance(role, RoleConfig) and role.versions == "latest" else role


Role = Annotated[
    Annotated[Identifier, Tag(TAG_OF_NAME)] | Annotated[RoleConfig, Tag(TAG_OF_TABLE)],
    Discriminator(lambda given: TAG_OF_TABLE if isinstance(given, Mapping | RoleConfig) else TAG_OF_NAME),
    AfterValidator(_plain),
]
