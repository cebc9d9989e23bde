"""Gymnasium's environments as worlds of text, for action spaces that are discrete or text.

Gymnasium is imported only when an environment is created, because it is an optional dependency.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.envs.environment import Environment
from palestra.errors import ConfigError, EnvironmentMistake

_NUMBER = re.compile(r"-?\d+")


class GymnasiumEnvironment(Environment):
    """Any registered Gymnasium environment whose actions are discrete or text.

    A task may have the keys `seed` and `options`, which go to Gymnasium's `reset`. The agent's action is the first name
    of an action, or number, in its reply; for a text space it is the reply itself. A reply without a valid action ends
    the episode with `impossible_reward` and never reaches the world.
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
        """Create the world with `gymnasium.make`.

        Args:
            name: Gymnasium's name of the environment, for example `Taxi-v3`.
            actions: names for the numbers of a discrete space, in order; empty: the agent says numbers.
            rules: text before the first observation of each episode.
            impossible_reward: reward of a reply that has no valid action.
            **settings: arguments for `gymnasium.make`.

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
        """Begin an episode with the task's seed and options, and return the rules and the first observation."""
        seen, info = self._world.reset(seed=task.get("seed"), options=task.get("options"))
        text = self.describe(seen)
        return f"{self._rules}\n{text}" if self._rules else text, dict(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the first valid action that the reply names, or end the episode if there is none."""
        chosen = self._chosen(action)
        if chosen is None:
            return "impossible action", self._impossible, True, False, {"impossible": True}
        seen, reward, terminated, truncated, info = self._world.step(chosen)
        return self.describe(seen), float(reward), bool(terminated), bool(truncated), dict(info)

    def close(self) -> None:
        """Close the Gymnasium environment and release what it holds."""
        self._world.close()

    def describe(self, seen: Any) -> str:
        """Return an observation of the world as text for the agent. Override this where `str` of it reads badly.

        Args:
            seen: the observation, as Gymnasium returned it.

        Raises:
            EnvironmentMistake: the text is longer than 2,000 characters.
        """
        text = str(seen)
        if len(text) > 2000:
            raise EnvironmentMistake(f"an observation of {self._world} has no short text; override `describe`")
        return text

    def _chosen(self, said: str) -> Any:
        """Return the action that the reply names, in the form of the action space, or None."""
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
    """Import Gymnasium and return the module.

    Raises:
        ConfigError: Gymnasium is not installed.
    """
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("this environment needs Gymnasium; run: pip install gymnasium") from None
    return gymnasium
