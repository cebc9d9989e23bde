"""The environments that ship with Palestra, by name, so that a job needs no code of its own to use one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from palestra.envs.arithmetic import Arithmetic, arithmetic_tasks
from palestra.envs.browser.chromium import chromium_path
from palestra.envs.browser.miniwob import MiniWoB, miniwob_tasks, pages_folder
from palestra.envs.calculator import CalculatorEnvironment, calculator_tasks
from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.desktop.display import check_installed as check_desktop
from palestra.envs.desktop.environment import DesktopEnvironment
from palestra.envs.desktop.tasks import desktop_tasks
from palestra.envs.environment import Environment
from palestra.envs.gomoku import Gomoku, gomoku_tasks
from palestra.envs.gomoku_duel import GomokuDuel
from palestra.envs.gymnasium import FrozenLake, frozen_lake_tasks
from palestra.envs.kuhn_poker import KuhnPoker
from palestra.envs.leduc_poker import LeducPoker
from palestra.envs.negotiation import Negotiation
from palestra.envs.open_spiel import OpenSpielEnvironment
from palestra.envs.pettingzoo import PettingZooEnvironment
from palestra.envs.prisoners_dilemma import PrisonersDilemma
from palestra.envs.reasoning_gym import ReasoningEnvironment, reasoning_tasks
from palestra.envs.retrieval.embedder import model_folder as embedding_model
from palestra.envs.retrieval.environment import RetrievalEnvironment, retrieval_tasks
from palestra.envs.split_sum import SplitSum, split_sum_tasks
from palestra.envs.task_splits import Split, seed_tasks
from palestra.envs.terminal.environment import TerminalEnvironment
from palestra.envs.terminal.sandbox import check_installed as check_sandbox
from palestra.envs.terminal.tasks import terminal_tasks
from palestra.envs.textarena import TextArenaEnvironment
from palestra.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """An environment of the catalogue: how to make one, and how to generate its tasks."""

    summary: str  # one line for people
    make: Callable[..., Environment | ConcurrentEnvironment]
    """Returns a new environment, given its settings by keyword. Raises ConfigError for a wrong or unknown setting."""
    generate: Callable[[Split, int, int], list[dict[str, Any]]]
    """(split, count, seed) -> `count` distinct tasks, JSON objects with an `id`. Equal arguments give equal tasks, and
    no seed gives a task of the other split. Raises ConfigError if the split has fewer than `count` tasks."""
    check_installed: Callable[[], object] = lambda: None
    """Raises ConfigError if something that the environment needs is not installed; the message says how to get it."""

    @property
    def missing(self) -> str | None:
        """Return what is not installed, and how to get it, in one line; None: nothing is missing."""
        try:
            self.check_installed()
        except ConfigError as error:
            return str(error)
        return None


def catalog_entry(name: str) -> CatalogEntry:
    """Return the catalogue's environment of this name; `miniwob/click-button` is `miniwob` with tasks of one page.

    Raises:
        ConfigError: the catalogue has no environment `name`; the message suggests a similar one.
    """
    whole, _, part = name.partition("/")
    if part and whole == "miniwob":
        return replace(CATALOG[whole], summary=f"the page {part} of MiniWoB++", generate=partial(miniwob_tasks, part))
    if name not in CATALOG:
        near = difflib.get_close_matches(name.lower(), CATALOG, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no environment {name!r}{meant} (known are {', '.join(CATALOG)})")
    return CATALOG[name]


def catalog_maker(
    name: str, settings: Mapping[str, Any], system: str | None = None
) -> Callable[[], Environment | ConcurrentEnvironment]:
    """Return what makes an environment of the catalogue.

    Args:
        name: of the environment.
        settings: of the environment, by name.
        system: system message; given to an environment whose agents have messages of their own as its setting `system`.
            None: the environment's own.

    Raises:
        ConfigError: there is no such environment, or a setting is wrong.
        ModuleNotFoundError: the environment needs a package that is not installed.
    """
    make = catalog_entry(name).make
    given = dict(settings)
    if system is not None and isinstance(make(**given), ConcurrentEnvironment):
        given["system"] = system
    make(**given)  # a wrong setting is refused now
    return partial(make, **given)


def _maker(
    name: str, make: Callable[..., Environment | ConcurrentEnvironment], *hidden: str
) -> Callable[..., Environment | ConcurrentEnvironment]:
    """Wrap `make` so that its settings are validated against the types of its signature.

    Settings named in `hidden` can't be set by a job, and are not listed.
    """
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    fields: dict[str, Any] = {
        key: (hints[key], parameter.default)
        for key, parameter in inspect.signature(make).parameters.items()
        if key not in hidden
    }
    settings_model = create_model(
        name, __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False), **fields
    )

    def made(**settings: Any) -> Environment | ConcurrentEnvironment:
        try:
            checked = settings_model.model_validate(settings)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            known = ", ".join(fields) or "none"
            raise ConfigError(f"environment {name!r}: setting {place!r}: {first['msg']} (known are {known})") from None
        try:
            return make(**{key: getattr(checked, key) for key in fields})
        except ValueError as error:
            raise ConfigError(f"environment {name!r}: {error}") from error

    shown = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value) for key, (_, value) in fields.items()
    ]
    made.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # the CLI lists settings from it
    return made


def _countdown(*, system: str = "Reply with the expression only.") -> Environment:
    return ReasoningEnvironment("countdown", system=system)


def _gsm_symbolic(*, system: str = "End with the number alone on the last line.") -> Environment:
    return ReasoningEnvironment("gsm_symbolic", system=system)


def _needs(module: str, install: str) -> Callable[[], None]:
    """Return a check that a module is installed, without importing it."""

    def check() -> None:
        if find_spec(module) is None:
            raise ConfigError(f"this environment needs {module}; run: pip install {install}")

    return check


def _check_miniwob() -> None:
    chromium_path()
    pages_folder()


STARTS_PROGRAMS = frozenset({"miniwob", "terminal", "desktop"})
"""Environments in which a model acts by programs of the machine: a browser, a sandbox, a screen. A service plays them
only where its operator allows it."""

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType(
    {
        "arithmetic": CatalogEntry(
            summary="sums and products in the head; one answer",
            make=_maker("arithmetic", Arithmetic),
            generate=arithmetic_tasks,
        ),
        "calculator": CatalogEntry(
            summary="large products with a calculator; a call, then the answer",
            make=_maker("calculator", CalculatorEnvironment, "clock"),
            generate=calculator_tasks,
        ),
        "subagents": CatalogEntry(
            summary="the sum of two products, each given to a subagent; both work at the same time",
            make=_maker("subagents", SplitSum, "clock"),
            generate=split_sum_tasks,
        ),
        "gomoku": CatalogEntry(
            summary="stones in a row, against an opponent that is part of the world",
            make=_maker("gomoku", Gomoku),
            generate=gomoku_tasks,
        ),
        "gomoku-duel": CatalogEntry(
            summary="stones in a row, of two agents; `roles.opponent` says which policy plays the second",
            make=_maker("gomoku-duel", GomokuDuel, "clock"),
            generate=gomoku_tasks,
        ),
        "kuhn-poker": CatalogEntry(
            summary="the smallest poker, of two agents `first` and `second`; moves are held to p and b",
            make=_maker("kuhn-poker", KuhnPoker, "clock"),
            generate=partial(seed_tasks, "kuhn"),
        ),
        "leduc-poker": CatalogEntry(
            summary="poker of six cards and two rounds, of two agents; moves are held to the legal ones of f, c and r",
            make=_maker("leduc-poker", LeducPoker, "clock"),
            generate=partial(seed_tasks, "leduc"),
        ),
        "prisoners-dilemma": CatalogEntry(
            summary="two agents cooperate or defect at the same time, several rounds",
            make=_maker("prisoners-dilemma", PrisonersDilemma, "clock"),
            generate=partial(seed_tasks, "dilemma"),
        ),
        "negotiation": CatalogEntry(
            summary="two agents divide things whose worth to the other they do not know; offers in turns",
            make=_maker("negotiation", Negotiation, "clock"),
            generate=partial(seed_tasks, "negotiation"),
        ),
        "open-spiel": CatalogEntry(
            summary="any game of OpenSpiel, each player an agent; settings.game names it",
            make=_maker("open-spiel", OpenSpielEnvironment, "clock", "files"),
            generate=partial(seed_tasks, "spiel"),
            check_installed=_needs("pyspiel", "'palestra[games]'"),
        ),
        "pettingzoo": CatalogEntry(
            summary="worlds of PettingZoo with discrete actions; settings.name, as classic/tictactoe_v3",
            make=_maker("pettingzoo", PettingZooEnvironment, "clock"),
            generate=partial(seed_tasks, "zoo"),
            check_installed=_needs("pettingzoo", "'palestra[games]'"),
        ),
        "textarena": CatalogEntry(
            summary="games of TextArena, in free text; settings.id names it",
            make=_maker("textarena", TextArenaEnvironment, "clock"),
            generate=partial(seed_tasks, "arena"),
            check_installed=_needs("textarena", "'palestra[games]'"),
        ),
        "frozen-lake": CatalogEntry(
            summary="a walk over ice with holes, on random maps (Gymnasium)",
            make=_maker("frozen-lake", FrozenLake, "size"),
            generate=frozen_lake_tasks,
            check_installed=_needs("gymnasium", "gymnasium"),
        ),
        "countdown": CatalogEntry(
            summary="an expression of given numbers that makes a given number (reasoning-gym)",
            make=_maker("countdown", _countdown),
            generate=partial(reasoning_tasks, "countdown"),
            check_installed=_needs("reasoning_gym", "reasoning-gym"),
        ),
        "gsm-symbolic": CatalogEntry(
            summary="word problems of school mathematics (reasoning-gym)",
            make=_maker("gsm-symbolic", _gsm_symbolic),
            generate=partial(reasoning_tasks, "gsm_symbolic"),
            check_installed=_needs("reasoning_gym", "reasoning-gym"),
        ),
        "miniwob": CatalogEntry(
            summary="small tasks on web pages, in a browser (MiniWoB++); miniwob/PAGE has the tasks of one page",
            make=_maker("miniwob", MiniWoB),
            generate=partial(miniwob_tasks, None),
            check_installed=_check_miniwob,
        ),
        "terminal": CatalogEntry(
            summary="small tasks in a shell: find, count, edit, git, mend a function; in a sandbox",
            make=_maker("terminal", TerminalEnvironment),
            generate=terminal_tasks,
            check_installed=check_sandbox,
        ),
        "desktop": CatalogEntry(
            summary="a window with fields, boxes and buttons, acted on by mouse and keyboard",
            make=_maker("desktop", DesktopEnvironment),
            generate=desktop_tasks,
            check_installed=check_desktop,
        ),
        "retrieval": CatalogEntry(
            summary="questions answered by searching passages, with an embedding model as the tool",
            make=_maker("retrieval", RetrievalEnvironment, "clock"),
            generate=retrieval_tasks,
            check_installed=embedding_model,
        ),
    }
)
