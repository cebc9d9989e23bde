"""Reward functions of users: ours, one episode at a time, and TRL's, a batch at a time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from palestra.errors import EnvironmentMistake, NotScored

RewardFunction = Callable[[Mapping[str, Any], str], float]


def reward_function(function: Callable[..., Any]) -> RewardFunction:
    """`(task, answer) -> float` from a function of that form, or of TRL's.

    TRL's has an argument `completions`, and may have `prompts` and one for each column of the data set; all are lists
    of one entry a sample, and so is what it returns. It is known by that name.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "completions" not in parameters:
        return lambda task, answer: finite_reward(function, function(task, answer))

    def of_one(task: Mapping[str, Any], answer: str) -> float:
        columns = {name: [value] for name, value in task.items() if takes_all or name in parameters}
        if "prompts" in parameters or takes_all:
            columns["prompts"] = [task.get("prompt", "")]
        found = function(**(columns | {"completions": [answer]}))
        if not hasattr(found, "__len__") or len(found) != 1:
            raise EnvironmentMistake(f"{function.__name__} got one completion and returned {found!r}, not one reward")
        return finite_reward(function, found[0])

    return of_one


def finite_reward(function: Callable[..., Any], value: Any) -> float:
    """What a reward function returned.

    Raises:
        NotScored: it is None.
        EnvironmentMistake: it is no number, or not a finite one.
    """
    if value is None:
        raise NotScored(f"{function.__name__} returned None")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise EnvironmentMistake(f"{function.__name__} returned {value!r}, which is no reward") from None
    if not math.isfinite(number):
        raise EnvironmentMistake(f"{function.__name__} returned {number}, and a reward is finite")
    return number
