"""Gymnasium's spaces as text: instructions, parsing of actions, and observations."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from palestra.envs.tasks import final_answers

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_SHOWN_NUMBERS = 256  # of an array that is shown as text


class NoText(ValueError):
    """A space or an observation has no form as text."""


def kind_of(space: Any) -> str:
    """Return the name of a space's kind, such as `Box`: its first base class in Gymnasium."""
    return next(base.__name__ for base in type(space).__mro__ if base.__module__.startswith("gymnasium.spaces"))


def is_picture_space(space: Any) -> bool:
    """Return whether a space's observations are pictures: uint8, [height, width] with no, one or three channels."""
    if kind_of(space) != "Box" or space.dtype.name != "uint8":
        return False
    return len(space.shape) == 2 or (len(space.shape) == 3 and space.shape[2] in {1, 3})


def instruction(space: Any) -> str:
    """Describe valid replies in a sentence for the agent. Raises NoText if the kind of action has no form as text."""
    kind = kind_of(space)
    if kind == "Discrete":
        return f"Say a number from {int(space.start)} to {int(space.start + space.n - 1)}."
    if kind == "Text":
        return "Say a text."
    if kind == "Box" and space.dtype.kind in "fiu":
        count = math.prod(space.shape)
        return f"Say {count} number{'s' if count != 1 else ''}{_range(space)}."
    if kind == "MultiDiscrete":
        return (
            f"Say {space.nvec.size} whole numbers, each at least 0 and below {_numbers(space.nvec.ravel().tolist())}."
        )
    if kind == "MultiBinary":
        return f"Say {math.prod(space.shape)} numbers, each 0 or 1."
    if kind in ("Dict", "Tuple"):
        items = space.spaces.items() if kind == "Dict" else enumerate(space.spaces)
        parts = "; ".join(f"{name}: {instruction(part)}" for name, part in items)
        return f"Say a JSON {'object' if kind == 'Dict' else 'list'} of: {parts}"
    raise NoText(f"actions of {space} can't be said as text")


def action_of(space: Any, said: str) -> Any:
    """Parse a reply's action, or return None without a valid one. `said`: the reply. Its last numbers are used, as
    many as the action has; for a Dict or a Tuple it is the JSON that ends it.
    """
    kind = kind_of(space)
    if kind in ("Dict", "Tuple"):
        try:
            given = json.loads(final_answers(said, 1)[0])
        except (ValueError, RecursionError):
            return None
        return _of_json(space, given)
    if kind == "Text":
        return said if space.contains(said) else None
    return _of_numbers(space, [float(number) for number in _NUMBER.findall(said)[-_count(space) :]])


def observation_text(value: Any, names: Sequence[str] = ()) -> str:
    """Return an observation as text. `names` are those of the numbers of a one-dimensional array. Raises NoText if the
    observation is a picture, or another array that is too large to be read.
    """
    if isinstance(value, dict):
        return "\n".join(f"{name}: {observation_text(part)}" for name, part in value.items())
    if isinstance(value, tuple):
        return "\n".join(map(observation_text, value))
    shape = getattr(value, "shape", None)
    if shape is None:
        return str(value)
    if len(shape) > 2 or math.prod(shape) > _SHOWN_NUMBERS:
        raise NoText(f"an array of shape {tuple(shape)} is not read as text")
    if len(shape) == 0:
        return _number(value.item())
    if len(shape) == 2:
        return "\n".join(" ".join(map(_number, row)) for row in value.tolist())
    numbers = list(map(_number, value.tolist()))
    if names and len(names) == len(numbers):
        return ", ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))
    return ", ".join(numbers)


def _of_json(space: Any, given: Any) -> Any:
    kind = kind_of(space)
    if kind == "Dict":
        if not isinstance(given, dict) or set(given) != set(space.spaces):
            return None
        found = {name: _of_json(part, given[name]) for name, part in space.spaces.items()}
        return None if None in map(_marked, found.values()) else found
    if kind == "Tuple":
        if not isinstance(given, list) or len(given) != len(space.spaces):
            return None
        parts = tuple(_of_json(part, one) for part, one in zip(space.spaces, given, strict=True))
        return None if None in map(_marked, parts) else parts
    if kind == "Text":
        return given if isinstance(given, str) and space.contains(given) else None
    flat = given if isinstance(given, list) else [given]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in flat):
        return None
    try:
        return _of_numbers(space, [float(number) for number in flat])
    except OverflowError:
        return None


def _marked(value: Any) -> Any:
    """Return None for None and a marker for anything else: arrays cannot be compared with None by `in`."""
    return None if value is None else True


def _of_numbers(space: Any, numbers: list[float]) -> Any:
    import numpy

    if len(numbers) != _count(space) or not all(map(math.isfinite, numbers)):
        return None
    kind = kind_of(space)
    if kind == "Discrete":
        return int(numbers[0]) if numbers[0].is_integer() and space.contains(int(numbers[0])) else None
    if space.dtype.kind != "f":  # a cast would change numbers that the type does not have
        least, most = numpy.iinfo(space.dtype).min, numpy.iinfo(space.dtype).max
        if not all(number.is_integer() and least <= number <= most for number in numbers):
            return None
    with numpy.errstate(over="ignore"):
        action = numpy.array(numbers).astype(space.dtype).reshape(space.shape)
    if not numpy.isfinite(action).all():  # too large for the type
        return None
    return action if space.contains(action) else None


def _count(space: Any) -> int:
    return 1 if kind_of(space) == "Discrete" else math.prod(space.shape)


def _range(space: Any) -> str:
    low, high = space.low.ravel().tolist(), space.high.ravel().tolist()
    if set(low) == {-math.inf} and set(high) == {math.inf}:
        return ""
    if len(set(low)) == len(set(high)) == 1:
        return f" from {_number(low[0])} to {_number(high[0])}"
    return f", at least {_numbers(low)} and at most {_numbers(high)}"


def _numbers(values: Sequence[Any]) -> str:
    return ", ".join(map(_number, values))


def _number(value: Any) -> str:
    """Return a number with at most four digits behind the point."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) < 1e6 else f"{value:.4g}"
