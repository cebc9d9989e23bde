"""Gymnasium's environments as worlds of text: discrete or text spaces. Gymnasium is imported when one is made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.envs.environment import Environment
from palestra.errors import ConfigError, EnvironmentMistake

_NUMBER = re.compile(r"-?\d+")


class GymnasiumEnvironment(Environment):
    """Any registered environment whose actions are discrete or text.

    The task may have `seed` and `options`, which go to `reset`. An action is the name of one, its number, or text for a
    text space; the first that is found in what the agent says. One that is none ends the episode with
    `impossible_reward`: the world was never asked.
    """

    reusable = True

    def __init__(
        self,
        name: str,
        *,
        actions: Sequence[str] = (),
        rules: str = "",
        impossible_reward: float = 0.0,
        **settings: Any,
    ) -> None:
        """Args:
            name: as Gymnasium has it, for example `Taxi-v3`.
            actions: names for the numbers of a discrete space, in order; none: numbers.
            rules: what the agent is told at first.
            impossible_reward: for what is no action.
            settings: for `gymnasium.make`.

        Raises:
            ConfigError: Gymnasium is not installed, or has no such environment, or its actions are of another kind.
        """
        gymnasium = imported_gymnasium()
        try:
            self._world: Any = gymnasium.make(name, **settings)
        except gymnasium.error.Error as error:
            raise ConfigError(f"Gymnasium can't make {name!r}: {error}") from error
        space: Any = self._world.action_space
        kinds: Any = gymnasium.spaces
        if not isinstance(space, kinds.Discrete | kinds.Text):
            raise ConfigError(f"the actions of {name!r} are {space}; only discrete and text spaces can be played")
        self._first = int(space.start) if isinstance(space, kinds.Discrete) else None
        self._actions = [action.lower() for action in actions]
        if self._actions and (self._first is None or len(actions) != space.n):
            raise ConfigError(f"{name!r} has the actions {space}, and {len(actions)} names are given")
        self._rules, self._impossible = rules, impossible_reward

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin with the task's seed and options."""
        seen, info = self._world.reset(seed=task.get("seed"), options=task.get("options"))
        text = self.describe(seen)
        return f"{self._rules}\n{text}" if self._rules else text, dict(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do what the agent said, if it is an action."""
        chosen = self._chosen(action)
        if chosen is None:
            return "impossible action", self._impossible, True, False, {"impossible": True}
        seen, reward, terminated, truncated, info = self._world.step(chosen)
        return self.describe(seen), float(reward), bool(terminated), bool(truncated), dict(info)

    def close(self) -> None:
        """Close the world."""
        self._world.close()

    def describe(self, seen: Any) -> str:
        """What the agent reads of an observation. Override it for a world that can be told better.

        Raises:
            EnvironmentMistake: it has no short text.
        """
        text = str(seen)
        if len(text) > 2000:
            raise EnvironmentMistake(f"an observation of {self._world} has no short text; override `describe`")
        return text

    def _chosen(self, said: str) -> Any:
        """The action; None: it is none."""
        if self._first is None:
            return said if self._world.action_space.contains(said) else None
        if self._actions:
            places = [(said.lower().find(name), number) for number, name in enumerate(self._actions)]
            found = [(place, number) for place, number in places if place >= 0]
            if found:
                return self._first + min(found)[1]
        match = _NUMBER.search(said)
        number = int(match[0]) if match and len(match[0]) < 10 else None
        return number if number is not None and self._world.action_space.contains(number) else None


def imported_gymnasium() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("this environment needs Gymnasium; run: pip install gymnasium") from None
    return gymnasium
