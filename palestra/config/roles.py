"""Which policy plays each agent of an episode, and whose reward is to be learned from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator

MAX_AGENT = 200  # characters of an agent's name
_NUMBER = re.compile(r"-\d+(?=/|$)")  # at the end of a name, of which there are several: `solver-2`
_LAST_NUMBER = re.compile(r"-\d+$")


def is_agent_name(name: str) -> bool:
    """Return whether an agent may have this name: printable, its own and its parents' parts between slashes."""
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
        default: the policy of every agent that has no role of its own: the first one that is trained.
        named: the policy of a role, by the agent's name.
        frozen: the policies that are never trained.
        rivals: the policies that are trained, where there are several: then each learns from its own rewards alone.
    """

    default: str
    named: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    rivals: tuple[str, ...] = ()

    def policy_of(self, agent: str) -> str:
        """Return the policy that plays an agent.

        It is that of the agent's name, or of its name without the last number or without any (`agent/solver` for
        `agent/solver-2`), or of its nearest parent that has one (`planner` for `planner/search`); else the default.

        Args:
            agent: its name; a subagent's begins with its parent's and a slash.
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

    def plays_frozen(self, agent: str) -> bool:
        """Return whether a frozen policy plays an agent, beside one that is trained."""
        return self.default not in self.frozen and self.policy_of(agent) in self.frozen

    def learns(self, agent: str) -> bool:
        """Return whether an agent's reward is learned from: a trained policy plays it, or a subagent of it.

        A subagent without a reward of its own earns that of its nearest parent which has one. Where all policies are
        frozen nothing is trained, and every reward counts, as for an evaluation.
        """
        if not self.plays_frozen(agent):
            return True
        return any(name.startswith(f"{agent}/") and policy not in self.frozen for name, policy in self.named.items())

    def trained_rewards(self, rewards: Mapping[str, float]) -> Mapping[str, float]:
        """Return the rewards that are to be learned from; see `learns`.

        Args:
            rewards: of an episode, by agent.
        """
        if not self.frozen:
            return rewards
        return {agent: reward for agent, reward in rewards.items() if self.learns(agent)}

    def rewards_of(self, policy: str, rewards: Mapping[str, float]) -> Mapping[str, float]:
        """Return the rewards that one trained policy learns from: those of the agents that it plays.

        A subagent of it without a reward of its own earns that of its parent, whichever policy plays the parent.

        Args:
            policy: by name.
            rewards: of an episode, by agent.
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
