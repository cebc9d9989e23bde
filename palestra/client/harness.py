"""Harnesses by name: agents that are programs. Packages bring them by entry points of `palestra.harnesses`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palestra.client.worker import Rollout
from palestra.config import HarnessConfig
from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension, load_function, nearest

GROUP = "palestra.harnesses"
_NO_SCORE = "nothing says how a workspace is scored: name a file with a function `score(task, result)` in harness.score"


class HarnessProgram(ABC):
    """Base of what an entry point of `palestra.harnesses` leads to, such as a `palestra_harness.Harness`.

    Attributes:
        name: what users write.
    """

    name: str

    @abstractmethod
    def rollout(self, score: Callable[..., Any], settings: HarnessConfig) -> Rollout:
        """Return a rollout function that plays each task with the program.

        Args:
            score: `(task, result) -> reward`.
            settings: of the job; `score` of them is not used.

        Raises:
            ConfigError: the program is not installed, or `settings.folder` does not exist.
        """


def installed_harness(name: str) -> HarnessProgram:
    """Return an installed harness.

    Raises:
        ConfigError: there is none of this name, or the entry point leads to something else.
    """
    known = extensions(GROUP)
    if name not in known:
        raise ConfigError(f"there is no harness {name!r}{nearest(name, known)}; installed: {', '.join(known)}")
    found = load_extension(known[name])
    if not isinstance(found, HarnessProgram):
        raise ConfigError(f"{name!r} of {GROUP} is a {type(found).__name__}, and has to be a palestra_harness.Harness")
    return found


def harness_rollout(
    settings: HarnessConfig, score: Callable[..., Any] | None = None, program: HarnessProgram | None = None
) -> Rollout:
    """Return the rollout function of a harness.

    Args:
        score: `(task, result) -> reward`; None: the function that `settings` names.
        program: None: the installed one that `settings` names.

    Raises:
        ConfigError: there is no such harness, its program is not installed, or there is no score function, or two.
    """
    if score is not None and settings.score is not None:
        raise ConfigError(f"`reward` scores the workspace, and harness.score is {str(settings.score)!r}; leave one out")
    found: Any = score
    if settings.score is not None:
        found = load_function(_reference(settings.score))
    if found is None:
        raise ConfigError(_NO_SCORE)
    if not callable(found):
        raise ConfigError(f"the score is a {type(found).__name__}, and has to be a function (task, result) -> reward")
    return (program or installed_harness(settings.name)).rollout(found, settings)


def check_harness_config(settings: HarnessConfig) -> None:
    """Raise ConfigError for a job whose harness could not play; its score function is not imported."""
    if settings.score is None:
        raise ConfigError(_NO_SCORE)
    if not Path(place := _reference(settings.score).rpartition(":")[0]).is_file():
        raise ConfigError(f"harness.score: there is no file {place}")
    installed_harness(settings.name).rollout(lambda task, result: None, settings)


def _reference(score: Path) -> str:
    """Return the function of a file as `load_function` takes it: `score` unless the path ends with another name."""
    text = str(score)
    return f"{text}:score" if text.endswith(".py") else text
