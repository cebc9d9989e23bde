"""Reward functions of users, in Palestra's form (one episode at a time) and in TRL's (a batch at a time)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from palestra.errors import InvalidEnvironment, NotScored
from palestra.threads import is_async

# Arguments that TRL's trainer passes besides texts and columns: an environment sees texts, and knows no trainer.
_ONLY_IN_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric")
RewardFunction = Callable[[Mapping[str, Any], str], float | Awaitable[float]]


def reward_function(function: Callable[..., Any]) -> RewardFunction:
    """Return a reward function of the form `(task, answer) -> float` from one of that form, or of TRL's.

    A function in TRL's form is recognized by its argument `completions`; it may also take `prompts` and the columns of
    the data set. Each argument is a list with one entry per sample, and so is the result; here each list has one entry.

    Args:
        function: the user's function, sync or async. Its result is checked by `finite_reward`.

    Raises:
        InvalidEnvironment: the function needs an argument that TRL's trainer has and an environment does not.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    of_batch = "completions" in parameters
    missing = [
        name for name in _ONLY_IN_TRL if name in parameters and parameters[name].default is inspect.Parameter.empty
    ]
    if of_batch and missing:
        raise InvalidEnvironment(
            f"{_name(function)} needs {' and '.join(missing)}, which only TRL's trainer has; give it a default, or "
            "play the episodes with a rollout function, whose calls may ask for token ids (return_token_ids)"
        )

    def found(task: Mapping[str, Any], answer: str) -> Any:
        if not of_batch:
            return function(task, answer)
        columns = {name: [value] for name, value in task.items() if takes_all or name in parameters}
        if "prompts" in parameters or takes_all:
            columns["prompts"] = [task.get("prompt", "")]
        return function(**(columns | {"completions": [answer]}))

    def checked(found: Any) -> float:
        if not of_batch:
            return finite_reward(function, found)
        if not hasattr(found, "__len__") or len(found) != 1:
            raise InvalidEnvironment(f"{_name(function)} got one completion and returned {found!r}, not one reward")
        return finite_reward(function, found[0])

    async def awaited(task: Mapping[str, Any], answer: str) -> float:
        return checked(await found(task, answer))

    return awaited if is_async(function) else lambda task, answer: checked(found(task, answer))


def finite_reward(function: Callable[..., Any], value: Any) -> float:
    """Check the value that a reward function returned, and return it as a float.

    Args:
        function: the reward function, for its name in messages.
        value: the returned value.

    Raises:
        NotScored: the value is None, so the episode is left out of training.
        InvalidEnvironment: the value is not a number, or not finite.
    """
    if value is None:
        raise NotScored(f"{_name(function)} returned None")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidEnvironment(f"{_name(function)} returned {value!r}, which is no reward") from None
    if not math.isfinite(number):
        raise InvalidEnvironment(f"{_name(function)} returned {number}, and a reward is finite")
    return number


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function; that of its class where it is an object that can be called."""
    return getattr(function, "__name__", None) or type(function).__name__
