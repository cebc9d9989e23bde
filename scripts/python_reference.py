"""docs/reference/python.md: the Python API, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import palestra
import palestra_harness
import palestra_judges
import palestra_lab
import palestra_screens
import palestra_worlds
from palestra import errors, sandbox
from palestra.client import exchange
from palestra.client.worker import Worker
from palestra.types.values import Value
from palestra_control import job

FURTHER: tuple[Any, ...] = (Worker, job.Job, job.JobEvent)  # what the exported names give back, or are made for
SANDBOXES = ("sandbox", "Sandbox", "Finished", "SandboxProvider")
BESIDE: tuple[ModuleType, ...] = (palestra_worlds, palestra_screens, palestra_harness, palestra_judges, palestra_lab)
ATTRIBUTES = "Attributes:"
SECTIONS = ("Args:", ATTRIBUTES, "Raises:", "Returns:", "Yields:")
_INTRODUCTION = """# Python API

```python
from palestra import Client, ControlClient, JobConfig, evaluate, train
from palestra import errors  # every error
```

`import palestra` loads neither torch nor ray; names are loaded when they are first used. All errors are
`palestra.errors.PalestraError`. `train` and `evaluate` also work where an event loop is running (a notebook): the job
then runs in a thread of its own. The configuration's fields are in [configuration.md](configuration.md), the HTTP
routes in [api.md](api.md).

An episode, as a script plays it:

<!-- test: needs a server -->
```python
from pathlib import Path

from palestra import Client

with Client("http://127.0.0.1:7411", api_key=Path("runs/job/api_key").read_text()) as client:
    with client.episode() as episode:
        if episode is not None:  # None: the job is over
            ...  # call episode.base_url with episode.api_key, and say model=episode.model
            episode.reward = 1.0
```

The block renews the lease as long as it is open, hands in the reward at its end, and gives the episode back where it
raises. With `begin_episode` and `end_episode` in its place, only the episode's model calls and `heartbeat` renew the
lease; give an episode that failed back with `abort_episode`, or it stays claimed until the lease runs out."""


def python_page() -> str:
    """Return the page: the names that `palestra` exports, what belongs to them, and all errors."""
    lines = [_INTRODUCTION, "", "## Exported by `palestra`"]
    for name in palestra.__all__:
        lines += _entry(getattr(palestra, name), "palestra")
    for package in BESIDE:
        lines += ["", f"## Exported by `{package.__name__}`", "", _flowed(package.__doc__ or "")]
        for name in package.__all__:
            lines += _entry(getattr(package, name), package.__name__)
    lines += ["", "## `palestra.sandbox`"]
    for name in SANDBOXES:
        lines += _entry(getattr(sandbox, name), "palestra.sandbox")
    lines += ["", "## Beside them"]
    for found in FURTHER:
        lines += _entry(found, found.__module__)
    lines += ["", "## How clients send", "", _flowed(exchange.__doc__ or "")]
    lines += ["", "## Errors", "", *_errors(errors)]
    return "\n".join(lines) + "\n"


def _entry(found: Any, home: str) -> Iterator[str]:
    yield from ("", f"### `{home}.{found.__name__}`", "")
    if not inspect.isclass(found):
        yield from ("```python", f"{found.__name__}{_signature(found)}", "```", "", *_described(found))
        return
    if issubclass(found, BaseModel):
        yield from (*_described(found), "", "See [configuration.md](configuration.md) for its fields.")
        return
    if found.__init__ is not object.__init__:
        yield from ("```python", f"{found.__name__}{_signature(found)}", "```", "")
    meanings: dict[str, str]
    described, meanings = _described(found), {}
    if dataclasses.is_dataclass(found):
        described, meanings = _without_attributes(described)
    yield from described
    if issubclass(found, Value):
        yield from ("", *_described(Value))
    if not dataclasses.is_dataclass(found) and "__init__" in vars(found) and found.__init__.__doc__:
        yield from ("", *_described(found.__init__))
    if dataclasses.is_dataclass(found):
        yield from ("", *_fields(found, meanings))
    for name, member in vars(found).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        target = member.fget if isinstance(member, property) else member
        if target is None or not target.__doc__:
            continue
        head = name if isinstance(member, property) else f"{name}{_signature(member)}"
        start = "async " if inspect.iscoroutinefunction(member) else ""
        yield from ("", f"#### `{start}{head}`", "", *_described(member))


def _signature(found: Any) -> str:
    """Parameters with their annotations and defaults, without `self`."""
    signature = inspect.signature(found)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature.replace(parameters=kept)))
    text = re.sub(r"\b(?:palestra|collections|httpx2)\.[\w.]*\.(\w+)", r"\1", text)
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    return re.sub(r"<factory>|<object object at 0x[0-9a-f]+>", "…", text).removesuffix(" -> None")


def _fields(found: Any, meanings: Mapping[str, str]) -> Iterator[str]:
    """Yield a list item for each public field of a dataclass.

    Args:
        found: the dataclass.
        meanings: what its docstring says of its fields. For a field that the docstring leaves out, the comment behind
            it in the source is taken.
    """
    source = inspect.getsource(found)
    for field in dataclasses.fields(found):
        if field.name.startswith("_"):
            continue
        comment = re.search(rf"^    {field.name}: [^#\n]*#\s*(.*)$", source, re.MULTILINE)
        meaning = meanings.get(field.name) or (comment.group(1) if comment is not None else "")
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        yield f"- `{field.name}: {kind}`{' – ' + meaning if meaning else ''}"


def _without_attributes(lines: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split a docstring made by `_described` into its lines without the attributes, and the meaning of each attribute.

    A dataclass's fields are listed with their types, so the attributes would otherwise be listed twice.
    """
    heading = f"**{ATTRIBUTES[:-1]}**"
    if heading not in lines:
        return list(lines), {}
    start = lines.index(heading)
    end = next((i for i in range(start + 2, len(lines)) if not lines[i].startswith("- ")), len(lines))
    meanings: dict[str, str] = {}
    for item in lines[start + 2 : end]:
        names, _, meaning = item.removeprefix("- ").partition(": ")
        meanings |= {name: meaning for name in names.split(", ")}
    return "\n".join([*lines[:start], *lines[end:]]).strip().splitlines(), meanings


def _described(found: Any) -> list[str]:
    """A docstring as Markdown: paragraphs, and a list for each section."""
    lines: list[str] = []
    section = False
    entry: list[str] = []
    for line in [*(inspect.getdoc(found) or "").splitlines(), ""]:
        if line.strip() in SECTIONS:
            section = True
            lines += [f"**{line.strip()[:-1]}**", ""]
        elif section and line.startswith("    ") and not line.startswith("     "):
            if entry:
                lines.append("- " + " ".join(entry))
            entry = [line.strip()]
        elif section and line.strip() and line.startswith("     "):
            entry.append(line.strip())
        else:
            if entry:
                lines.append("- " + " ".join(entry))
            entry, section = [], False
            lines.append(line)
    return "\n".join(lines).strip().splitlines()


def _flowed(text: str) -> str:
    return inspect.cleandoc(text)


def _errors(module: ModuleType) -> Iterator[str]:
    yield "Every error has `http_status`, `code` (its name in snake case) and `retryable`."
    yield from ("", "| error | is a | HTTP | again? | when |", "|---|---|--:|---|---|")
    for name, found in vars(module).items():
        if inspect.isclass(found) and issubclass(found, errors.PalestraError):
            base = found.__mro__[1].__name__
            first = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
            again = "yes" if found.retryable else "no"
            yield f"| `{name}` | `{base}` | {found.http_status} | {again} | {first} |"
