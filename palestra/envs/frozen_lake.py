"""Environment `frozen-lake`: Gymnasium's FrozenLake, with the map as text."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from palestra.envs.gymnasium_worlds import GymnasiumEnvironment, imported_gymnasium
from palestra.envs.splits import Split, draw_tasks

_NAME = "FrozenLake-v1"
_MAP_SIZE = 4
_FROZEN = 0.8  # probability that a field of a random map is ice, not a hole


class FrozenLake(GymnasiumEnvironment):
    """A walk over ice with holes, where `@` on the map is the agent.

    A task may have the keys `map` (rows of the letters S, F, H and G) and `seed`, which matters on slippery ice only.
    """

    def __init__(self, *, size: int = 4, is_slippery: bool = False, impossible_reward: float = 0.0) -> None:
        """Create the environment.

        Args:
            size: 4 or 8, the size of the map for tasks that have none.
            is_slippery: whether a step may go sideways.
            impossible_reward: reward of a reply that names no direction; it ends the episode.

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

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin an episode on the task's map.

        Raises:
            ValueError: the task's `map` is not a map.
        """
        rows = task.get("map")
        if rows != self._map:
            world = imported_gymnasium().make(_NAME, **self._settings, desc=None if rows is None else _checked(rows))
            self._world.close()
            self._world, self._map = world, rows
        return super().reset(task)

    def describe(self, seen: Any) -> str:
        """Return the map as lines of text, with `@` at the agent's place."""
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
    """Draw random maps of 4 x 4 on which G can be reached. The splits share no map.

    Args:
        split: the split to draw from.
        count: number of tasks.
        seed: other seeds draw other tasks of the same split.

    Returns:
        `count` distinct tasks with the keys `id`, `map` and `seed`.

    Raises:
        ConfigError: Gymnasium is not installed, or the split has fewer than `count` tasks.
    """
    imported_gymnasium()
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    def draw(source: random.Random) -> dict[str, Any]:
        number = source.randrange(2**31)
        rows = [str(row) for row in generate_random_map(size=_MAP_SIZE, p=_FROZEN, seed=number)]
        return {"id": "/".join(rows), "map": rows, "seed": number}

    return draw_tasks(split, count, seed, draw)
