"""Reward functions of users, in Palestra's form (one episode at a time) and in TRL's (a batch); rewards by name."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from palestra.config import REWARD_NAME
from palestra.errors import InvalidEnvironment, NotScored, PalestraError, RewardFailed, place_of
from palestra.threads import call, is_async
from palestra.types.calls import Chat
from palestra.types.messages import MAX_NAMED, ChatMessage, StepReward, TextPart
from palestra.waiting import ordinary_errors

FACTS = ("finish_reason", "messages", "calls", "prompt_tokens", "completion_tokens", "completion_ids")


def reward_facts(calls: Sequence[Chat]) -> dict[str, Any]:
    """Return the facts about an answer from its model calls; empty without calls.

    Args:
        calls: of the agent that answered, in order; the last one is the answer.

    Returns:
        finish_reason: why the answer ended: `stop`, `length` (it was cut), `tool_calls`, …
        messages: the conversation up to the answer, in OpenAI's shape.
        calls: the recorded calls.
        prompt_tokens: of all calls.
        completion_tokens: that all calls have sampled.
        completion_ids: token ids of the answer.
    """
    if not calls:
        return {}
    last = calls[-1]
    known = {
        "finish_reason": last.finish_reason,
        "messages": [openai_message(message) for message in (*last.messages, last.reply)],
        "calls": tuple(calls),
    }
    if not all(call.versions for call in calls):  # a worker elsewhere does not get the tokens of its calls
        return known
    return known | {
        "prompt_tokens": sum(call.prompt_tokens for call in calls),
        "completion_tokens": sum(len(call.completion_ids) for call in calls),
        "completion_ids": last.completion_ids.tolist(),
    }


def openai_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message in OpenAI's shape; text-only content is a string."""
    found = message.model_dump(exclude_defaults=True) | {"role": message.role}
    if all(isinstance(part, TextPart) for part in message.content):
        found["content"] = message.text
    return found


def asked_facts(name: str, needed: Sequence[str], wanted: Sequence[str], calls: Sequence[Chat]) -> Mapping[str, Any]:
    """Return the facts that a reward function has parameters for."""
    known = reward_facts(calls) if wanted else {}
    if missing := [fact for fact in needed if fact not in known]:
        raise InvalidEnvironment(
            f"{name} needs {' and '.join(missing)}, which is not known here: the environment is played on another "
            "machine than the job, or without a model; give the argument a default"
        )
    return {fact: known[fact] for fact in wanted if fact in known}


# Arguments that TRL's trainer passes besides texts and columns, and an environment does not have.
_ONLY_IN_TRL = ("trainer_state", "log_extra", "log_metric")
Calls = Sequence[Chat]  # of the agent that has answered, in order
OneAnswer = Callable[[Mapping[str, Any], str, Calls], Any]


class RewardFunction(Protocol):
    """A user's reward function in the common form; `calls` are the model calls of the agent that answered."""

    def __call__(self, task: Mapping[str, Any], answer: str, calls: Calls = ()) -> StepReward | Awaitable[StepReward]:
        """Return the reward of an answer, or several by name."""
        ...


def reward_function(function: Callable[..., Any] | Mapping[str, Callable[..., Any]]) -> RewardFunction:
    """Return one or several of a user's reward functions in the common form.

    A function takes `(task, answer)`, and by name any of `FACTS`: see `reward_facts`. A function in TRL's form has the
    parameter `completions`, and may also take `prompts`, the columns of the data set and `FACTS`. Its arguments and its
    result are lists with one entry per sample; here each list has one entry.

    Args:
        function: sync or async; `checked_reward` checks its result. Or several functions by name, each returning a
            number, or None for not scored.
    """
    if isinstance(function, Mapping):
        return _several(function)
    plain = _one_answer(function)

    async def awaited(task: Mapping[str, Any], answer: str, calls: Calls = ()) -> StepReward:
        with reward_failures():
            return checked_reward(function, await plain(task, answer, calls))

    def direct(task: Mapping[str, Any], answer: str, calls: Calls = ()) -> StepReward:
        with reward_failures():
            return checked_reward(function, plain(task, answer, calls))

    return awaited if is_async(function) else direct


@contextmanager
def reward_failures() -> Iterator[None]:
    """Raise RewardFailed for any exception of a reward function that is not Palestra's own: an unreachable judge is not
    the agent's loss.
    """
    try:
        with ordinary_errors():
            yield
    except PalestraError:
        raise
    except Exception as error:
        raise RewardFailed(f"{type(error).__name__}: {error}{place_of(error)}") from error


def _several(functions: Mapping[str, Callable[..., Any]]) -> RewardFunction:
    """Return a function whose reward is those of several functions, by name."""
    _check_names(functions)
    plain = {name: _one_answer(function) for name, function in functions.items()}

    def number(name: str, found: Any) -> float | None:
        return None if found is None else finite_reward(f"{name!r} ({_name(functions[name])})", found)

    async def awaited(task: Mapping[str, Any], answer: str, calls: Calls = ()) -> StepReward:
        # Functions that may block run in threads beside those that do not.
        with reward_failures():
            asked = (_asked(one, functions[name], task, answer, calls) for name, one in plain.items())
            found = await asyncio.gather(*map(_called, asked))
            return {name: number(name, value) for name, value in zip(plain, found, strict=True)}

    def direct(task: Mapping[str, Any], answer: str, calls: Calls = ()) -> StepReward:
        with reward_failures():
            return {name: number(name, one(task, answer, calls)) for name, one in plain.items()}

    return awaited if any(map(is_async, functions.values())) else direct


async def _called(function: Callable[[], Any]) -> Any:
    with ordinary_errors():
        return await call(function, "palestra-reward")


def _asked(
    plain: OneAnswer, function: Callable[..., Any], task: Mapping[str, Any], answer: str, calls: Calls
) -> Callable[[], Any]:
    """Return the call of a function, as a coroutine function if the user's is one, which needs no thread."""
    if not is_async(function):
        return partial(plain, task, answer, calls)

    async def awaited() -> Any:
        return await plain(task, answer, calls)

    return awaited


def _one_answer(function: Callable[..., Any]) -> OneAnswer:
    """Return a function `(task, answer, calls)` with the unchecked result of a user's function for this answer."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "completions" not in parameters:
        return _of_task_and_answer(function)
    needed = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
    if missing := [name for name in _ONLY_IN_TRL if name in needed]:
        raise InvalidEnvironment(
            f"{_name(function)} needs {' and '.join(missing)}, which only TRL's trainer has; give it a default"
        )

    def found(task: Mapping[str, Any], answer: str, calls: Calls) -> Any:
        own = {name: value for name, value in task.items() if takes_all or name in parameters}
        wanted = [name for name in FACTS if (takes_all or name in parameters) and name not in own]
        facts = asked_facts(_name(function), [name for name in wanted if name in needed], wanted, calls)
        if absent := [name for name in needed_columns(function) if name not in own]:
            raise InvalidEnvironment(f"{_name(function)} needs {' and '.join(absent)}, which the task does not have")
        prompt = task.get("prompt", "")
        columns = {name: [value] for name, value in {**facts, **own}.items()}
        if "prompts" in parameters or takes_all:
            columns["prompts"] = [prompt]
        said = answer if isinstance(prompt, str | int | float) else [{"role": "assistant", "content": answer}]
        return function(**(columns | {"completions": [said]}))

    def sole(found: Any) -> Any:
        if not hasattr(found, "__len__") or isinstance(found, Mapping) or len(found) != 1:
            raise InvalidEnvironment(f"{_name(function)} got one completion and returned {found!r}, not one reward")
        return found[0]

    async def awaited(task: Mapping[str, Any], answer: str, calls: Calls) -> Any:
        return sole(await found(task, answer, calls))

    return awaited if is_async(function) else lambda task, answer, calls: sole(found(task, answer, calls))


def needed_columns(function: Callable[..., Any]) -> list[str]:
    """Return the task keys that a reward function in TRL's form needs; empty for another form."""
    parameters = inspect.signature(function).parameters
    known = {"completions", "prompts", *FACTS, *_ONLY_IN_TRL}
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty and p.name not in known]
    return needed if "completions" in parameters else []


def _of_task_and_answer(function: Callable[..., Any]) -> OneAnswer:
    """Return a function of the form `(task, answer)`, with parameters for facts, in the common form."""
    name, signature = _name(function), inspect.signature(function)
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    named += [p for p in positional[2:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    wanted = list(FACTS) if takes_all else [p.name for p in named if p.name in FACTS]
    needed = [p.name for p in named if p.name in FACTS and p.default is p.empty]
    try:
        signature.bind(None, None, **dict.fromkeys(needed))
    except TypeError as error:
        raise InvalidEnvironment(
            f"{name}{signature} can't be called as {name}(task, answer): {error}; take these two, and by name any of "
            f"{', '.join(FACTS)}; or `completions` and columns as a function for TRL does"
        ) from None
    if not wanted:
        return lambda task, answer, calls: function(task, answer)
    return lambda task, answer, calls: function(task, answer, **asked_facts(name, needed, wanted, calls))


def checked_reward(function: Callable[..., Any], value: Any) -> StepReward:
    """Check the result of a reward function, and return it as a float, or floats by name. Raises NotScored if the value
    is None, so the episode is left out of training.
    """
    if value is None:
        raise NotScored(f"{_name(function)} returned None")
    return checked_names(value) if isinstance(value, Mapping) else finite_reward(_name(function), value)


def checked_names(rewards: Mapping[str, Any]) -> dict[str, float | None]:
    """Check rewards by name, and return them as floats. `rewards` = None: not scored."""
    _check_names(rewards)
    return {
        name: None if value is None else finite_reward(f"the reward {name!r}", value, "is")
        for name, value in rewards.items()
    }


def _check_names(names: Mapping[Any, Any]) -> None:
    """Raise an error for names that cannot be parts of a metric's name, an empty set, or too many."""
    for name in names:
        if not isinstance(name, str) or re.match(REWARD_NAME, name) is None or name.endswith("\n"):
            raise InvalidEnvironment(
                f"a reward's name has letters, digits, '.', '_' and '-', at most 64, and begins with a letter or a "
                f"digit; {name!r} does not"
            )
    if not 0 < len(names) <= MAX_NAMED:
        raise InvalidEnvironment(f"rewards by name are 1 to {MAX_NAMED}, not {len(names)}")


def finite_reward(owner: str, value: Any, verb: str = "returned") -> float:
    """Return a reward as a float. Raises InvalidEnvironment: it is no finite number."""
    try:
        number = float(value if not isinstance(value, str | bytes) else None)  # type: ignore[arg-type]
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        why = "it was not awaited" if inspect.iscoroutine(value) else "a reward is a number, or None"
        raise InvalidEnvironment(f"{owner} {verb} {value!r:.80}, which is no reward: {why}") from None
    if not math.isfinite(number):
        raise InvalidEnvironment(f"{owner} {verb} {number}, and a reward is finite")
    return number


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or the class of a callable object."""
    return getattr(function, "__name__", None) or type(function).__name__
