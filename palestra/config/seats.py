"""External players: agents of an episode played by workers outside the server, one worker each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from palestra.config.roles import AgentName
from palestra.config.section import Seconds, Section

MAX_SEATS = 64  # of an episode


class SeatsConfig(Section):
    """The agents that external workers play. The server runs the environment and all other agents."""

    roles: list[AgentName] = Field(
        [],
        max_length=MAX_SEATS,
        description="Names of the agents that are seats: a worker claims one with `role` and plays it for an episode. "
        "Empty: the job has no seats.",
    )
    takeover: Literal["worker", "policy", "replay"] = Field(
        "worker",
        description="What happens to a seat whose worker has died or has left. `worker`: another worker claims it and "
        "continues; `policy`: the policy of its role plays the rest of the episode; `replay`: the episode is given "
        "back, and played again from the start.",
    )
    wait_seconds: Seconds = Field(
        600.0,
        description="Longest time that an episode waits for a worker to claim a seat that has to act. Then the policy "
        "of its role plays it (`takeover = policy`), or the episode is given back.",
    )

    act_seconds: Seconds = Field(
        600.0,
        description="Longest time that a worker may take for an action. Then the seat is taken from it, as when its "
        "lease has run out. A shorter limit of the environment itself (`time_limits`) comes first.",
    )

    @model_validator(mode="after")
    def _are_whole_agents(self) -> SeatsConfig:
        if len(set(self.roles)) != len(self.roles):
            raise ValueError(f"a role of seats is named twice: {', '.join(map(repr, self.roles))}")
        for role in self.roles:
            if "/" in role:
                raise ValueError(f"{role!r} is a subagent, which is played by the worker of its parent's seat")
        return self

    def seat_of(self, agent: str) -> str | None:
        """Return the external player of an agent: itself, or the one that its name begins with; None: the server plays
        it.
        """
        seat = agent.partition("/")[0]
        return seat if seat in self.roles else None
