"""docs/reference/python.md: the names of the Python API, which mkdocstrings describes in the site, and all errors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import palestra
import palestra_harness
import palestra_judges
import palestra_lab
import palestra_screens
import palestra_worlds
from palestra import errors
from palestra.client import exchange
from palestra.client.requests import EpisodeRequests
from palestra.client.seat import ClaimedSeat
from palestra.client.worker import Worker
from palestra_control import job

FURTHER: tuple[Any, ...] = (
    EpisodeRequests,
    ClaimedSeat,
    Worker,
    job.Job,
    job.JobEvent,
)  # what the exported names give back, or are made for
SANDBOXES = ("sandbox", "Sandbox", "Finished", "SandboxProvider")
BESIDE: tuple[ModuleType, ...] = (palestra_worlds, palestra_screens, palestra_harness, palestra_judges, palestra_lab)
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
    lines = [_INTRODUCTION, "", "## Exported by `palestra`", *_names(palestra)]
    for package in BESIDE:
        lines += ["", f"## Exported by `{package.__name__}`", "", inspect.cleandoc(package.__doc__ or "")]
        lines += _names(package)
    lines += ["", "## `palestra.sandbox`", *(f"\n::: palestra.sandbox.{name}" for name in SANDBOXES)]
    lines += ["", "## Beside them", *(f"\n::: {found.__module__}.{found.__name__}" for found in FURTHER)]
    lines += ["", "## How clients send", "", inspect.cleandoc(exchange.__doc__ or "")]
    lines += ["", "## Errors", "", *_errors(errors)]
    return "\n".join(lines) + "\n"


def _names(package: ModuleType) -> Iterator[str]:
    """Yield a table of what is exported, with its first sentence, and the places where mkdocstrings adds the rest."""
    yield from ("", "| name | what it is |", "|---|---|")
    for name in package.__all__:
        first, _, rest = " ".join(inspect.cleandoc(getattr(package, name).__doc__).split("\n\n")[0].split()).partition(
            ". "
        )
        yield f"| `{name}` | {first}{'.' if rest else ''} |"
    for name in package.__all__:
        yield f"\n::: {package.__name__}.{name}"


def _errors(module: ModuleType) -> Iterator[str]:
    yield "Every error has `http_status`, `code` (its name in snake case) and `retryable`."
    yield from ("", "| error | is a | HTTP | again? | when |", "|---|---|--:|---|---|")
    for name, found in vars(module).items():
        if inspect.isclass(found) and issubclass(found, errors.PalestraError):
            base = found.__mro__[1].__name__
            first = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
            again = "yes" if found.retryable else "no"
            yield f"| `{name}` | `{base}` | {found.http_status} | {again} | {first} |"
