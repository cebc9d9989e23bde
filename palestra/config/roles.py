"""Which policy plays each agent of an episode, and whose reward is learned from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import AfterValidator

from palestra.config.algorithm_base import AlgorithmConfig
from palestra.config.pools import PoolConfig, past_of

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
        named: policy by agent.
        frozen: frozen policies; for an episode, also past versions that play in it.
        rivals: the trained policies, if there are several: each learns only from its own rewards.
        pools: pools of roles played by past versions, by agent.
    """

    default: str
    named: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    rivals: tuple[str, ...] = ()
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)

    @property
    def newest(self) -> dict[str, str]:
        """Return the policy of each role that newest weights play, always or in some groups."""
        pools = self.pools
        return {role: name for role, name in self.named.items() if role not in pools or pools[role].latest_share}

    def of_episode(self, players: Mapping[str, str]) -> Roles:
        """Return the roles of one episode.

        Args:
            players: the policy, or its past version, that plays a role with a pool, by agent; empty for a job without
                pools.
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
    """Raise ValueError for pools without a learning signal.

    Args:
        algorithm_of: returns a policy's algorithm, which decides how calls are credited.
    """
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
