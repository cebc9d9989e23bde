"""Environment `pettingzoo`: worlds of PettingZoo with discrete actions, each of its agents an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.envs.catalog import imported
from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, decided
from palestra.errors import ConfigError, InvalidEnvironment
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage

_MOST_CHARACTERS = 4000  # of an observation as text
_MOST_ACTIONS = 1000


class PettingZooEnvironment(MultiAgentEnvironment):
    """A world of PettingZoo in its AEC form (one agent after another) or its parallel form (all at the same time).

    The roles are PettingZoo's names of the agents. Actions are numbers, restricted to the action mask if there is one.
    An illegal or late reply ends the episode with -1 for its agent, as in PettingZoo's own games.

    `describe` turns an observation into text: a number unchanged; an array of one or two dimensions as lines of
    numbers; an array of planes (height, width, planes) of zeros and ones as lines of characters: `.` if all planes are
    0, else the number of the first plane that is 1. Override it if that is hard to read.
    """

    reusable = True
    gives_choices = True
    forfeits = frozenset({Fault.ILLEGAL, Fault.LATE})

    def __init__(
        self,
        *,
        name: str = "classic/tictactoe_v3",
        parallel: bool = False,
        options: dict[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create the world.

        Args:
            name: family and name, as in `classic/rps_v2`.
            parallel: whether agents act at the same time, by PettingZoo's `parallel_env`.
            options: arguments for PettingZoo's constructor.
            clock: source of observation times; None: the system's clock.

        Raises:
            ConfigError: PettingZoo is not installed, has no such world, or its actions are not discrete.
        """
        super().__init__(clock)
        zoo = imported("pettingzoo", "'palestra[games]'")
        try:
            self._world: Any = zoo.make("parallel" if parallel else "aec", name, **(options or {}))
        except Exception as error:
            form = "parallel" if parallel else "AEC"
            raise ConfigError(f"PettingZoo can't make {name!r} in its {form} form: {error!s:.200}") from error
        self.roles = tuple(self._world.possible_agents)
        self._parallel = parallel
        for role in self.roles:
            size = getattr(self._world.action_space(role), "n", None)
            if size is None or size > _MOST_ACTIONS:
                raise ConfigError(f"the actions of {role!r} in {name!r} are not at most {_MOST_ACTIONS} discrete ones")

    def begin(self, task: Mapping[str, Any]) -> None:
        """Begin an episode with the task's seed."""
        self._ended: set[str] = set()
        found = self._world.reset(seed=int(task.get("seed", 0)))
        self._seen, self._infos = found if self._parallel else ({}, {})

    async def close(self) -> None:
        """Abandon the episode and close the world."""
        await self.abandon()
        self._world.close()

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return that the world names the next agent."""
        return decided(lambda: tuple(self._world.agents) if self._parallel else (self._world.agent_selection,))

    def view(self, role: str) -> str:
        """Return the agent's observation as text."""
        seen = self._observed(role)
        text = self.describe(seen["observation"] if isinstance(seen, dict) and "observation" in seen else seen)
        if len(text) > _MOST_CHARACTERS:
            raise InvalidEnvironment(f"an observation of {self._world} has no short text; override `describe`")
        return text

    def describe(self, seen: Any) -> str:
        """Return an observation as text; see the class.

        Args:
            seen: the observation from PettingZoo, without its action mask.
        """
        shape = getattr(seen, "shape", ())
        if len(shape) == 3 and ((seen == 0) | (seen == 1)).all():
            return "\n".join("".join(_place(planes) for planes in row) for row in seen)
        if len(shape) == 2:
            return "\n".join(" ".join(f"{number:g}" for number in row) for row in seen)
        if len(shape) > 2:
            return " ".join(f"{number:g}" for number in seen.flatten())
        return " ".join(f"{number:g}" for number in seen) if len(shape) == 1 else str(seen)

    def legal(self, role: str) -> Sequence[str]:
        """Return the numbers of the actions that the mask allows."""
        seen, space = self._observed(role), self._world.action_space(role)
        infos = self._infos if self._parallel else self._world.infos
        mask = seen.get("action_mask") if isinstance(seen, dict) else infos.get(role, {}).get("action_mask")
        first = int(getattr(space, "start", 0))
        return tuple(str(first + place) for place in range(int(space.n)) if mask is None or mask[place])

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome:
        """Make a step of the world."""
        chosen = {role: int(action.text) for role, action in actions.items()}
        if self._parallel:
            self._seen, rewards, terminated, truncated, self._infos = self._world.step(chosen)
        else:
            self._world.step(*chosen.values())
            world = self._world
            rewards, terminated, truncated = dict(world.rewards), dict(world.terminations), dict(world.truncations)
            while world.agents and (terminated.get(world.agent_selection) or truncated.get(world.agent_selection)):
                world.step(None)  # PettingZoo wants an agent that is out to be stepped once more
        ended = {role for role in self.roles if terminated.get(role) or truncated.get(role)} - self._ended
        earned = {role: float(reward) for role, reward in rewards.items() if role not in self._ended}
        paid = {role: reward for role, reward in earned.items() if reward or role in ended}  # a draw is a score, too
        self._ended |= ended
        cut = bool(ended) and not any(terminated.get(role) for role in ended)
        over = not self._world.agents
        return Outcome(rewards=paid, over=over, done=() if over else sorted(ended), truncated=cut)

    def forfeit(self, role: str, fault: Fault) -> Outcome:
        """Return -1 for the agent, and the end."""
        return Outcome(rewards={role: -1.0}, over=True, info={"result": f"{role}: {fault}"})

    def _observed(self, role: str) -> Any:
        return self._seen[role] if self._parallel else self._world.observe(role)


def _place(planes: Any) -> str:
    """Return one position of a board: the first plane that is 1, or `.`."""
    return next((str(number) for number, value in enumerate(planes) if value), ".")
