"""What is wrong with a configuration, in one line that names the key, the value, and the nearest known key."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from palestra.config.renames import new_name, new_value

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
        if (rename := new_name(str(place[-1]), known)) is not None:
            given = first["input"]
            value = f" = {rename.values.get(given, given)!r}" if isinstance(given, str) else ""
            return f"{dotted!r} has a new name; write {'.'.join((*map(str, place[:-1]), rename.now))}{value}"
        near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
        below = [] if near else _keys_named(str(place[-1]), root)
        hint = f"did you mean {(near + below)[0]!r}?" if near or below else f"known keys here: {', '.join(known)}"
        return f"unknown key {dotted!r}; {hint}"
    message = first["msg"].removeprefix("Value error, ") + _given(first["type"], first["input"])
    if place and (now := new_value(str(place[-1]), first["input"])) is not None:
        message += f", which is {now!r} now"
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


def _keys_named(name: str, root: type[BaseModel], above: str = "") -> list[str]:
    """Return the dotted keys of `root` whose last part is `name`, with NAME for the keys of a `dict[str, Section]`."""
    found = []
    for key, field in root.model_fields.items():
        if key == name and above:
            found.append(above + key)
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                step = "" if part is field.annotation else "NAME."
                found += _keys_named(name, part, f"{above}{key}.{step}")
    return found
