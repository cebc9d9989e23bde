"""Environments of Gymnasium as worlds of text, and FrozenLake with its map as text."""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from palestra.envs import ConcurrentEnvironment
from palestra.envs.catalog import imported
from palestra.envs.environment import Environment, Reset, Step
from palestra.envs.tasks import Split, draw_tasks
from palestra.errors import ConfigError, InvalidEnvironment
from palestra_worlds.gymnasium_spaces import NoText, action_of, instruction, is_picture_space, observation_text

View = Literal["text", "picture", "render"]


_NAME = "FrozenLake-v1"
_MAP_SIZE = 4
_FROZEN = 0.8  # probability that a field of a random map is ice, not a hole


class GymnasiumEnvironment(Environment):
    """Any environment of Gymnasium whose actions have a form as text; `palestra.train(environment=…)` creates one
    automatically.

    A task may have the keys `seed` and `options` for Gymnasium's `reset`. The agent's action is the last name of an
    action, or number, in its reply; for a space of several numbers it is that many numbers, for a Dict or a Tuple it is
    the JSON that ends the reply, and for a text space it is the reply itself.

    If a reply has no valid action, such as a number out of range, a random action is taken, drawn by the task's seed;
    the agent's reward is min(reward, 0) - 1, which is always less than that action's. With `impossible_reward` the
    episode ends instead, and the reply never reaches the world.
    """

    reusable = True

    def __init__(
        self,
        world: Any,
        *,
        actions: Sequence[str] = (),
        features: Sequence[str] = (),
        rules: str = "",
        impossible_reward: float | None = None,
        enforce: bool = False,
        observation: View = "text",
        **settings: Any,
    ) -> None:
        """Create the world.

        Args:
            world: Gymnasium's name of the environment, for example `Taxi-v3`, or its class. Or an instance, which is
                recreated by its `spec`, or copied if it has none, because each episode needs its own.
            actions: names for the numbers of a discrete space, in order; empty: the agent says numbers.
            features: names for the numbers of a one-dimensional observation, in order; empty: numbers are shown without
                names.
            rules: text before the first observation of each episode; empty: a description of valid replies, unless any
                text is valid.
            impossible_reward: reward of a reply without a valid action, which then ends the episode; None: another
                action replaces it, see the class.
            enforce: whether the model can only sample valid actions, for a discrete space.
            observation: `text`; `picture`, the observation, a uint8 array [height, width], [height, width, 1] or
                [height, width, 3]; or `render`, the result of the world's `render`.
            **settings: arguments for `gymnasium.make` or the class; with `render`, `render_mode` is `rgb_array`.

        Raises:
            ConfigError: Gymnasium or the environment is not installed, its actions are of an unsupported kind, or its
                observations are not pictures.
        """
        gymnasium = imported("gymnasium", "gymnasium")
        if observation == "render":
            settings["render_mode"] = "rgb_array"
        name = world if isinstance(world, str) else getattr(world, "__name__", type(world).__name__)
        self._world: Any = _made(world, name, settings)
        space: Any = self._world.action_space
        kinds: Any = gymnasium.spaces
        try:
            told = instruction(space)
        except NoText as error:
            raise ConfigError(f"{name!r} can't be played: {error}") from error
        discrete = isinstance(space, kinds.Discrete)
        self._first = int(space.start) if discrete else 0
        self._actions = [action.lower() for action in actions]
        if self._actions and (not discrete or len(actions) != space.n):
            raise ConfigError(f"{name!r} has the actions {space}, and {len(actions)} names are given")
        if self._actions:
            told = f"Say {', '.join(actions[:-1])} or {actions[-1]}." if len(actions) > 1 else f"Say {actions[0]}."
        longest = "|".join(re.escape(name) for name in sorted(self._actions, key=len, reverse=True))
        self._named = re.compile(longest) if longest else None
        self._rules = rules or ("" if isinstance(space, kinds.Text) else told)
        if enforce:
            if not discrete:
                raise ConfigError(f"{name!r} has the actions {space}, of which there is no list to hold replies to")
            self.choices = tuple(actions) or tuple(str(self._first + number) for number in range(int(space.n)))
            self.gives_choices = True
        self._features, self._impossible, self._view = tuple(features), impossible_reward, observation
        self.forfeit_reward = min(0.0, -1.0 if impossible_reward is None else impossible_reward)
        if observation == "picture" and not is_picture_space(self._world.observation_space):
            raise ConfigError(
                f"the observations of {name!r} are {self._world.observation_space}, and no pictures; take "
                "observation = 'render' where the world can draw itself"
            )

    def reset(self, task: Mapping[str, Any]) -> Reset:
        """Begin an episode with the task's seed and options, and return the rules and the first observation."""
        seen, info = self._world.reset(seed=task.get("seed"), options=task.get("options"))
        self._world.action_space.seed(task.get("seed") or 0)
        shown = self._shown(seen)
        if not self._rules:
            return shown, dict(info)
        return f"{self._rules}\n{shown}" if isinstance(shown, str) else [self._rules, shown], dict(info)

    def _shown(self, seen: Any) -> Any:
        """Return the agent's view: a text, or a picture as an array."""
        if self._view == "text":
            return self.describe(seen)
        return seen if self._view == "picture" else self._world.render()

    def step(self, action: str) -> Step:
        """Take the last action in the reply; see the class for a reply without one."""
        chosen = self._chosen(action)
        if chosen is not None:
            seen, reward, terminated, truncated, info = self._world.step(chosen)
            return self._shown(seen), float(reward), bool(terminated), bool(truncated), dict(info)
        if self._impossible is not None:
            return "impossible action", self._impossible, True, False, {"impossible": True}
        seen, reward, terminated, truncated, info = self._world.step(self._world.action_space.sample())
        shown, said = self._shown(seen), "That was no possible action; another one was taken."
        told = f"{said}\n{shown}" if isinstance(shown, str) else [said, shown]
        paid = min(float(reward), 0.0) - 1.0
        return told, paid, bool(terminated), bool(truncated), dict(info) | {"impossible": True}

    def close(self) -> None:
        """Close the Gymnasium environment and release its resources."""
        self._world.close()

    def describe(self, seen: Any) -> str:
        """Return an observation as text for the agent. Override this if `str` of it is hard to read.

        Args:
            seen: the observation from Gymnasium.

        Raises:
            InvalidEnvironment: the observation has no form as text, or its text is longer than 2,000 characters.
        """
        try:
            text = observation_text(seen, self._features)
        except NoText as error:
            raise InvalidEnvironment(
                f"an observation of {self._world}: {error}; override `describe`, or take observation = "
                "'picture' or 'render'"
            ) from error
        if len(text) > 2000:
            raise InvalidEnvironment(f"an observation of {self._world} has no short text; override `describe`")
        return text

    def _chosen(self, said: str) -> Any:
        """Return the action in the reply, in the form of the action space, or None."""
        if self._named is not None and (names := self._named.findall(said.lower())):
            return self._first + self._actions.index(names[-1])
        return action_of(self._world.action_space, said)


def adapted_world(world: Any) -> Callable[[], Any] | None:
    """Return a factory for a class, an instance or a registered name of Gymnasium, or for what a function makes, which
    may be another environment; None: it is none of these.

    Raises:
        ConfigError: it is a name as Gymnasium's are, such as `Taxi-v3`, and no environment is registered under it.
    """
    if callable(world) and not isinstance(world, type):
        return (
            world
            if isinstance(world, partial) and world.func in (_of_factory, GymnasiumEnvironment)
            else partial(_of_factory, world)
        )
    if "gymnasium" not in sys.modules and (not isinstance(world, str) or find_spec("gymnasium") is None):
        return None
    gymnasium = imported("gymnasium", "gymnasium")
    if isinstance(world, str):
        known = world.rpartition(":")[2] in gymnasium.registry
        if not known and re.search(r"-v\d+$", world):
            try:
                gymnasium.spec(world)
            except (gymnasium.error.Error, ImportError) as error:
                raise ConfigError(f"Gymnasium has no {world!r}: {error}") from error
            known = True  # the module before the colon has registered it
    else:
        known = isinstance(world, gymnasium.Env) or (isinstance(world, type) and issubclass(world, gymnasium.Env))
    return partial(GymnasiumEnvironment, world) if known else None


def _of_factory(make: Callable[[], Any]) -> Any:
    """Return the environment that a function makes, adapted if it is Gymnasium's."""
    made = make()
    if isinstance(made, Environment | ConcurrentEnvironment):
        return made
    if callable(made) or isinstance(made, str) or (found := adapted_world(made)) is None:
        raise InvalidEnvironment(f"`make` returned a {type(made).__name__}, which is no environment")
    return found()


def _made(world: Any, name: str, settings: Mapping[str, Any]) -> Any:
    """Return a new world for a name, a class or an instance."""
    gymnasium = imported("gymnasium", "gymnasium")
    try:
        if isinstance(world, str):
            return gymnasium.make(world, **settings)
        if not isinstance(world, gymnasium.Env):
            return world(**settings)
        # A wrapper that does not record its arguments can't be made again.
        if world.spec is not None and all(one.kwargs is not None for one in world.spec.additional_wrappers):
            return gymnasium.make(world.spec, **settings)
    except gymnasium.error.Error as error:
        raise ConfigError(f"Gymnasium can't make {name!r}: {error}") from error
    if settings:
        raise ConfigError(
            f"{', '.join(settings)}: this {name} is copied, and takes no settings; give its class or name"
        )
    try:
        return copy.deepcopy(world)
    except Exception as error:
        raise ConfigError(
            f"each episode needs a {name} of its own, and this one can't be copied ({type(error).__name__}: {error}); "
            f"give its class, or `lambda: {name}(…)`"
        ) from error


class FrozenLake(GymnasiumEnvironment):
    """A walk over ice with holes; `@` on the map is the agent.

    A task may have the keys `map` (rows of the letters S, F, H and G) and `seed`, which only matters on slippery ice.
    """

    def __init__(self, *, size: int = 4, is_slippery: bool = False, impossible_reward: float = 0.0) -> None:
        """Create the environment.

        Args:
            size: 4 or 8, the size of the map for tasks that have none.
            is_slippery: whether a step may go sideways.
            impossible_reward: reward of a reply that names no direction, which ends the episode.

        Raises:
            ValueError: there is no map of this size.
            ConfigError: Gymnasium is not installed.
        """
        if size not in (4, 8):
            raise ValueError(f"there are maps of size 4 and 8, and none of {size}")
        super().__init__(
            _NAME,
            actions=("left", "down", "right", "up"),
            rules="Reach G from S over F; H is a hole. Say left, down, right or up.",
            impossible_reward=impossible_reward,
            map_name=f"{size}x{size}",
            is_slippery=is_slippery,
        )
        self._settings: dict[str, Any] = {"map_name": f"{size}x{size}", "is_slippery": is_slippery}
        self._map: list[str] | None = None  # the present world's map; None: the default one of its size

    def reset(self, task: Mapping[str, Any]) -> Reset:
        """Begin an episode on the task's map.

        Raises:
            ValueError: the task's `map` is not a map.
        """
        rows = task.get("map")
        if rows != self._map:
            world = imported("gymnasium", "gymnasium").make(
                _NAME, **self._settings, desc=None if rows is None else _checked(rows)
            )
            self._world.close()
            self._world, self._map = world, rows
        return super().reset(task)

    def describe(self, seen: Any) -> str:
        """Return the map as lines of text, with `@` at the agent's position."""
        rows = [[letter.decode() for letter in row] for row in self._world.unwrapped.desc]
        row, column = divmod(int(seen), len(rows[0]))
        rows[row][column] = "@"
        return "\n".join("".join(line) for line in rows)


def _checked(rows: Any) -> list[str]:
    good = isinstance(rows, list) and rows and all(isinstance(row, str) and len(row) == len(rows[0]) for row in rows)
    letters = "".join(rows) if good else ""
    if not letters or set(letters) - set("SFHG") or letters.count("S") != 1 or "G" not in letters:
        raise ValueError(f"a map is a list of rows of S, F, H and G, with one S and a G, and not {rows!r}")
    return list(rows)


def frozen_lake_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw random maps of 4 x 4 on which G can be reached; keys `id`, `map` and `seed`. The splits share no map."""
    imported("gymnasium", "gymnasium")
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    def draw(source: random.Random) -> dict[str, Any]:
        number = source.randrange(2**31)
        rows = [str(row) for row in generate_random_map(size=_MAP_SIZE, p=_FROZEN, seed=number)]
        return {"id": "/".join(rows), "map": rows, "seed": number}

    return draw_tasks(split, count, seed, draw)
