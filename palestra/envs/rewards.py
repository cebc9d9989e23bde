"""Reward functions of users, in Palestra's form (one episode at a time) and in TRL's (a batch); rewards by name."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from palestra.config import REWARD_NAME
from palestra.errors import InvalidEnvironment, NotScored, PalestraError, RewardFailed, place_of
from palestra.threads import call, is_async
from palestra.types.messages import MAX_NAMED, StepReward

# Arguments that TRL's trainer passes besides texts and columns: an environment sees texts, and knows no trainer.
_ONLY_IN_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric")
RewardFunction = Callable[[Mapping[str, Any], str], StepReward | Awaitable[StepReward]]


def reward_function(function: Callable[..., Any] | Mapping[str, Callable[..., Any]]) -> RewardFunction:
    """Return a reward function of the form `(task, answer) -> reward` from one of that form, of TRL's, or several.

    A function in TRL's form is recognized by its argument `completions`; it may also take `prompts` and the columns of
    the data set. Each argument is a list with one entry per sample, and so is the result; here each list has one entry.

    Args:
        function: the user's function, sync or async. Its result is checked by `checked_reward`. Or several functions by
            name, which return a number each, or None for what they do not score.

    Raises:
        InvalidEnvironment: a function needs an argument that TRL's trainer has and an environment does not, or a name
            can't be that of a reward.
    """
    if isinstance(function, Mapping):
        return _several(function)
    plain = _one_answer(function)

    async def awaited(task: Mapping[str, Any], answer: str) -> StepReward:
        with reward_failures():
            return checked_reward(function, await plain(task, answer))

    def direct(task: Mapping[str, Any], answer: str) -> StepReward:
        with reward_failures():
            return checked_reward(function, plain(task, answer))

    return awaited if is_async(function) else direct


@contextmanager
def reward_failures() -> Iterator[None]:
    """Mark what a reward function raises as its own failure: a judge that can't be asked is no agent's loss.

    Raises:
        RewardFailed: the block has raised what is no error of Palestra's own.
    """
    try:
        yield
    except PalestraError:
        raise
    except Exception as error:
        raise RewardFailed(f"{type(error).__name__}: {error}{place_of(error)}") from error


def _several(functions: Mapping[str, Callable[..., Any]]) -> RewardFunction:
    """Return a function whose reward is those of several functions, by their names."""
    _check_names(functions)
    plain = {name: _one_answer(function) for name, function in functions.items()}

    def number(name: str, found: Any) -> float | None:
        return None if found is None else _finite(f"{name!r} ({_name(functions[name])})", found)

    async def awaited(task: Mapping[str, Any], answer: str) -> StepReward:
        # Functions that may block run in threads beside those that do not.
        with reward_failures():
            found = await asyncio.gather(*(call(_asked(f, task, answer), "palestra-reward") for f in plain.values()))
            return {name: number(name, value) for name, value in zip(plain, found, strict=True)}

    def direct(task: Mapping[str, Any], answer: str) -> StepReward:
        with reward_failures():
            return {name: number(name, one(task, answer)) for name, one in plain.items()}

    return awaited if any(map(is_async, functions.values())) else direct


def _asked(function: Callable[..., Any], task: Mapping[str, Any], answer: str) -> Callable[[], Any]:
    return partial(function, task, answer)


def _one_answer(function: Callable[..., Any]) -> Callable[[Mapping[str, Any], str], Any]:
    """Return a function `(task, answer)` whose result is that of a user's function for this answer, unchecked.

    Raises:
        InvalidEnvironment: see `reward_function`.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "completions" not in parameters:
        _check_two(function)
        return function
    missing = [
        name for name in _ONLY_IN_TRL if name in parameters and parameters[name].default is inspect.Parameter.empty
    ]
    if missing:
        raise InvalidEnvironment(
            f"{_name(function)} needs {' and '.join(missing)}, which only TRL's trainer has; give it a default, or "
            "play the episodes with a rollout function, whose calls may ask for token ids (return_token_ids)"
        )

    def found(task: Mapping[str, Any], answer: str) -> Any:
        columns = {name: [value] for name, value in task.items() if takes_all or name in parameters}
        if "prompts" in parameters or takes_all:
            columns["prompts"] = [task.get("prompt", "")]
        return function(**(columns | {"completions": [answer]}))

    def sole(found: Any) -> Any:
        if not hasattr(found, "__len__") or isinstance(found, Mapping) or len(found) != 1:
            raise InvalidEnvironment(f"{_name(function)} got one completion and returned {found!r}, not one reward")
        return found[0]

    async def awaited(task: Mapping[str, Any], answer: str) -> Any:
        return sole(await found(task, answer))

    return awaited if is_async(function) else lambda task, answer: sole(found(task, answer))


def _check_two(function: Callable[..., Any]) -> None:
    """Refuse a function that can't be called with a task and an answer.

    Raises:
        InvalidEnvironment: it takes fewer arguments, or needs more.
    """
    name, signature = _name(function), inspect.signature(function)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InvalidEnvironment(
            f"{name}{signature} can't be called as {name}(task, answer): {error}; take these two, or `completions` and "
            "columns as a function for TRL does"
        ) from None


def checked_reward(function: Callable[..., Any], value: Any) -> StepReward:
    """Check the value that a reward function returned, and return it as a float, or as floats by name.

    Args:
        function: the reward function, for its name in messages.
        value: the returned value.

    Raises:
        NotScored: the value is None, so the episode is left out of training.
        InvalidEnvironment: the value is not a number, or not finite; or one of several is not, or has no fitting name.
    """
    if value is None:
        raise NotScored(f"{_name(function)} returned None")
    return checked_names(value) if isinstance(value, Mapping) else _finite(_name(function), value)


def checked_names(rewards: Mapping[str, Any]) -> dict[str, float | None]:
    """Check rewards by name, and return them as floats.

    Args:
        rewards: by name; None in place of one: not scored.

    Raises:
        InvalidEnvironment: a name can't be that of a reward, or a value is no finite number.
    """
    _check_names(rewards)
    return {
        name: None if value is None else _finite(f"the reward {name!r}", value, "is") for name, value in rewards.items()
    }


def _check_names(names: Mapping[Any, Any]) -> None:
    """Refuse names that can't be parts of the name of a metric, none at all, and too many."""
    for name in names:
        if not isinstance(name, str) or re.match(REWARD_NAME, name) is None or name.endswith("\n"):
            raise InvalidEnvironment(
                f"a reward's name has letters, digits, '.', '_' and '-', at most 64, and begins with a letter or a "
                f"digit; {name!r} does not"
            )
    if not 0 < len(names) <= MAX_NAMED:
        raise InvalidEnvironment(f"rewards by name are 1 to {MAX_NAMED}, not {len(names)}")


def _finite(owner: str, value: Any, verb: str = "returned") -> float:
    """Return a value as a float.

    Args:
        owner: whose reward it is, for messages.
        value: what was given.
        verb: of the message.

    Raises:
        InvalidEnvironment: it is not a number, or not finite.
    """
    try:
        number = float(value if not isinstance(value, str | bytes) else None)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        why = "it was not awaited" if inspect.iscoroutine(value) else "a reward is a number, or None"
        raise InvalidEnvironment(f"{owner} {verb} {value!r}, which is no reward: {why}") from None
    if not math.isfinite(number):
        raise InvalidEnvironment(f"{owner} {verb} {number}, and a reward is finite")
    return number


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function; that of its class where it is an object that can be called."""
    return getattr(function, "__name__", None) or type(function).__name__
