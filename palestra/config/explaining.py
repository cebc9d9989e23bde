"""What is wrong with a configuration, in one line that names the key, the value, and the nearest known key."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

SHOWN = (int, float, str, bool, type(None), list, tuple)  # values that are short enough to be shown, if cut


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Return the first mistake in words.

    Args:
        error: what pydantic found.
        root: the section that was checked; the keys in `error` are below it.
    """
    first = error.errors()[0]
    place = tuple(first["loc"])
    dotted = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        known = _known_keys(root, place[:-1])
        near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
        return f"unknown key {dotted!r}; {hint}"
    message = first["msg"].removeprefix("Value error, ") + _given(first["type"], first["input"])
    return f"{dotted}: {message}" if dotted else message


def _given(kind: str, value: Any) -> str:
    """Return the value that was refused, where the message does not speak of it."""
    if kind == "value_error" or not isinstance(value, SHOWN):
        return ""
    shown = repr(value)
    return f"; it is {shown if len(shown) <= 60 else shown[:59] + '…'}"


def _known_keys(root: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the fields of the section at `path`, walking through `dict[str, Section]`."""
    model = root
    steps = iter(path)
    for step in steps:
        annotation = model.model_fields[str(step)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
        else:
            model = next(a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel))
            next(steps, None)
    return list(model.model_fields)
