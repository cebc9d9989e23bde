"""Which policy plays each agent of an episode, and whose reward is learned from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from palestra.config.algorithm_base import AlgorithmConfig
from palestra.config.section import TAG_OF_NAME, TAG_OF_TABLE, Identifier, Positive, Section

MAX_POOL = 64  # versions, each of which is one more copy of the weights in the engine
POWER = 2  # of the loss rate in `prioritized`: f_hard of AlphaStar, (1 - x)^p
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
        description="`uniform`: each version equally often; `prioritized`: with a weight of (1 - win rate) ** 2, "
        "where the win rate is that of the agents that learn against this version, over all steps that are done when "
        "an episode of a step s may be played first: up to s - 1 - `rollout.max_staleness` (PFSP: Vinyals et al. "
        "2019).",
    )
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
        """Return the relative weight of each version in the choice. `win_rates` are those of learners against a
        version, from 0 to 1; 0.5 for a missing one.
        """
        if self.choice == "uniform":
            return (1.0,) * len(versions)
        return tuple((1.0 - win_rates.get(version, 0.5)) ** POWER for version in versions)

    def draw(self, key: str, versions: Sequence[int], win_rates: Mapping[int, float]) -> int | None:
        """Return the version that plays; None: the newest weights. Equal arguments give equal results."""
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
    pool: PoolConfig | None = Field(
        None, description="Past versions of the policy play the role. None: its newest weights play it."
    )


def _plain(role: str | RoleConfig) -> str | RoleConfig:
    """Return a role without a pool as its policy's name, so that it has one form."""
    return role.policy if isinstance(role, RoleConfig) and role.pool is None else role


Role = Annotated[
    Annotated[Identifier, Tag(TAG_OF_NAME)] | Annotated[RoleConfig, Tag(TAG_OF_TABLE)],
    Discriminator(lambda given: TAG_OF_TABLE if isinstance(given, Mapping | RoleConfig) else TAG_OF_NAME),
    AfterValidator(_plain),
]


MAX_AGENT = 200  # characters of an agent's name
_NUMBER = re.compile(r"-\d+(?=/|$)")  # at the end of a name, of which there are several: `solver-2`
_LAST_NUMBER = re.compile(r"-\d+$")


def is_agent_name(name: str) -> bool:
    """Return whether a text is a valid agent name: printable, with nonempty parts between slashes."""
    return 0 < len(name) <= MAX_AGENT and name.isprintable() and "" not in name.split("/")


def _agent_name(name: str) -> str:
    if not is_agent_name(name):
        raise ValueError(f"an agent's name has 1 to {MAX_AGENT} printable characters: {name!r}")
    return name


AgentName = Annotated[str, AfterValidator(_agent_name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The policies of a job's agents.

    Attributes:
        default: the policy of agents without a role: the first trained one.
        frozen: frozen policies; for an episode, also past versions that play in it.
        rivals: the trained policies, if there are several: each learns only from its own rewards.
        pools: pools of roles played by past versions, by agent.
        untrained: patterns of agents whose calls are not trained.
    """

    default: str
    named: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    rivals: tuple[str, ...] = ()
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()

    def trains(self, agent: str) -> bool:
        """Return whether calls of an agent are trained if a trained policy plays it."""
        return not any(fnmatchcase(agent, pattern) for pattern in self.untrained)

    @property
    def newest(self) -> dict[str, str]:
        """Return the policy of each role that newest weights play, always or in some groups."""
        pools = self.pools
        return {role: name for role, name in self.named.items() if role not in pools or pools[role].latest_share}

    def of_episode(self, players: Mapping[str, str]) -> Roles:
        """Return the roles of one episode. `players`: the policy, or its past version, that plays a role with a pool,
        by agent; empty for a job without pools.
        """
        if not players:
            return self
        past = frozenset(name for name in players.values() if past_of(name) is not None)
        return replace(self, named={**self.named, **players}, frozen=self.frozen | past)

    def policy_of(self, agent: str) -> str:
        """Return the policy that plays an agent.

        The role may have the agent's name, its name without the last number or without any (`agent/solver` for
        `agent/solver-2`), or its nearest parent's (`planner` for `planner/search`); otherwise it is the default.
        """
        if not self.named:
            return self.default
        name = agent
        while name:
            for form in (name, _LAST_NUMBER.sub("", name), _NUMBER.sub("", name)):
                if form in self.named:
                    return self.named[form]
            name = name.rpartition("/")[0]
        return self.default

    @staticmethod
    def is_of(role: str, agents: Iterable[str]) -> bool:
        """Return whether a role without slashes is one of some agents, with or without a number."""
        return any(role in (agent, _LAST_NUMBER.sub("", agent)) for agent in agents)

    def plays_frozen(self, agent: str) -> bool:
        """Return whether a frozen policy plays an agent in a job that trains."""
        return self.default not in self.frozen and self.policy_of(agent) in self.frozen

    def learns(self, agent: str) -> bool:
        """Return whether an agent's reward is learned from: a trained policy plays it, or a subagent of it.

        A subagent without a reward of its own earns its nearest rewarded parent's. If all policies are frozen, every
        reward counts, as in an evaluation.
        """
        if not self.plays_frozen(agent):
            return True
        return any(name.startswith(f"{agent}/") and policy not in self.frozen for name, policy in self.named.items())

    def trained_rewards(self, rewards: Mapping[str, float]) -> Mapping[str, float]:
        """Return the rewards that are learned from; see `learns`."""
        if not self.frozen:
            return rewards
        return {agent: reward for agent, reward in rewards.items() if self.learns(agent)}

    def rewards_of(self, policy: str, rewards: Mapping[str, float]) -> Mapping[str, float]:
        """Return the rewards that one trained policy learns from: those of the agents it plays.

        Its subagent without a reward earns its parent's, whichever policy plays the parent.
        """
        if not self.rivals:
            return self.trained_rewards(rewards)
        own = {agent for agent in rewards if self.policy_of(agent) == policy}
        return {
            agent: reward
            for agent, reward in rewards.items()
            if agent in own or (self._has_below(agent, policy) and not any(one.startswith(f"{agent}/") for one in own))
        }

    def _has_below(self, agent: str, policy: str) -> bool:
        """Return whether a policy plays a subagent of an agent by a role."""
        return any(name.startswith(f"{agent}/") and other == policy for name, other in self.named.items())


def check_pools(roles: Roles, steps: int, max_staleness: int, algorithm_of: Callable[[str], AlgorithmConfig]) -> None:
    """Raise ValueError for pools without a learning signal."""
    for agent, pool in roles.pools.items():
        policy = roles.named[agent]
        if policy in roles.frozen:
            raise ValueError(
                f"roles.{agent} is a pool of {policy!r}, which is frozen and so has one version only; write "
                f"roles.{agent} = {policy!r}"
            )
        # A version of step v plays in steps after v, and later by as much as episodes are played ahead.
        if pool.every_steps + max_staleness >= steps:
            raise ValueError(
                f"roles.{agent}.pool.every_steps is {pool.every_steps}, and the job has {steps} steps: its pool would "
                "never have another version than that of step 0; lower it, or give the role to a frozen policy of "
                "the same model"
            )
        seats = [name for name, other in roles.named.items() if other == policy and name != agent]
        if pool.latest_share and (seats or policy == roles.default) and not algorithm_of(policy).credits_agents:
            raise ValueError(
                f"roles.{agent}.pool.latest_share is {pool.latest_share:g}, so that {policy!r} also plays against its "
                "newest self, and the two rewards would be added up; credit each agent with its own "
                "(algorithm.credit = 'agent' or 'step'), or set latest_share = 0"
            )
