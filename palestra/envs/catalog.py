"""Installed environments by name, so that a job can use them without code of its own.

Other packages add theirs by entry points of the group `palestra.environments`, each naming a `CatalogEntry`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from palestra.envs.arithmetic import Arithmetic, CalculatorEnvironment, arithmetic_tasks, calculator_tasks
from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.environment import Environment
from palestra.envs.tasks import Split
from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension, nearest

GROUP = "palestra.environments"


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """An environment of the catalogue: how to create it, and how to generate its tasks."""

    summary: str  # one line for people
    make: Callable[..., Environment | ConcurrentEnvironment]
    """Returns a new environment, given its settings by keyword. Raises ConfigError for a wrong or unknown setting."""
    generate: Callable[[Split, int, int], list[dict[str, Any]]]
    """(split, count, seed) -> `count` distinct tasks, JSON objects with an `id`. Equal arguments give equal tasks, and
    no seed gives a task of the other split. Raises ConfigError if the split has fewer than `count` tasks; those of a
    folder are fewer without an error."""
    check_installed: Callable[[], object] = lambda: None
    """Raises ConfigError if something that the environment needs is not installed; the message says how to get it."""
    reads_folder: bool = False
    """Whether it reads a folder of this machine, which a job of a service may not name."""
    starts_programs: bool = False
    """Whether a model acts by programs of the machine: a browser, a sandbox, a screen. A service plays such an
    environment only where its operator allows it."""
    check: Callable[[Callable[[], Any], Sequence[Mapping[str, Any]]], None] | None = None
    """(factory, tasks) -> nothing: replaces `check_environment` where tasks say themselves what is right and wrong.
    Raises InvalidEnvironment for the first mistake. None: `check_environment`."""
    part: Callable[[str], CatalogEntry] | None = None
    """Returns the environment `NAME/PART`, with tasks of this part alone. None: it has no parts."""

    @property
    def missing(self) -> str | None:
        """Return what is not installed, and how to get it, in one line; None: everything is installed."""
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
    if part and whole in CATALOG and (of_part := CATALOG[whole].part) is not None:
        return of_part(part)
    if name not in CATALOG:
        meant = nearest(name.lower(), CATALOG, "{!r}", 0.5)
        raise ConfigError(f"there is no environment {name!r}{meant} (known are {', '.join(CATALOG)})")
    return CATALOG[name]


def catalog_maker(
    name: str, settings: Mapping[str, Any], system: str | None = None
) -> Callable[[], Environment | ConcurrentEnvironment]:
    """Return a factory of a catalogue environment. `system`: system message; passed as the setting `system` to an
    environment whose agents have their own messages. None: the environment's own.
    """
    make = catalog_entry(name).make
    given = dict(settings)
    if system is not None and isinstance(make(**given), ConcurrentEnvironment):
        given["system"] = system
    make(**given)  # a wrong setting is refused now
    return partial(make, **given)


def settings_checked(
    name: str, make: Callable[..., Environment | ConcurrentEnvironment], *hidden: str
) -> Callable[..., Environment | ConcurrentEnvironment]:
    """Wrap `make` so that its settings are validated against the types of its signature.

    Settings in `hidden` cannot be set by a job, and are not listed.
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


def needs(module: str, install: str) -> Callable[[], None]:
    """Return a check that a module is installed, without importing it."""

    def check() -> None:
        if find_spec(module) is None:
            raise ConfigError(f"this environment needs {module}; run: pip install {install}")

    return check


def imported(module: str, install: str) -> Any:
    """Import and return a module of a library. Raises ConfigError: it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"this environment needs {module}; run: pip install {install}") from None


_SHIPPED = {
    "arithmetic": CatalogEntry(
        summary="sums and products in the head; one answer",
        make=settings_checked("arithmetic", Arithmetic),
        generate=arithmetic_tasks,
    ),
    "calculator": CatalogEntry(
        summary="large products with a calculator; a call, then the answer",
        make=settings_checked("calculator", CalculatorEnvironment, "clock"),
        generate=calculator_tasks,
    ),
}


class _Catalog(Mapping[str, CatalogEntry]):
    """All environments by name; those of other packages are loaded on first use."""

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
        return extensions(GROUP)

    def __getitem__(self, name: str) -> CatalogEntry:
        if name in _SHIPPED:
            return _SHIPPED[name]
        entry: CatalogEntry = load_extension(self._others[name])
        return entry

    def __iter__(self) -> Iterator[str]:
        yield from _SHIPPED
        yield from (name for name in self._others if name not in _SHIPPED)

    def __len__(self) -> int:
        return len({*_SHIPPED, *self._others})


CATALOG: Mapping[str, CatalogEntry] = _Catalog()


ADAPTERS = "palestra.adapters"


def adapted(environment: Any) -> Any:
    """Return a factory of environments for another library's class, instance or name.

    An object that no adapter knows, and a name of Palestra's own, is returned unchanged.
    """
    if environment is None or (isinstance(environment, str) and environment.partition("/")[0] in CATALOG):
        return environment
    for point in extensions(ADAPTERS).values():
        if (found := load_extension(point)(environment)) is not None:
            return found
    return environment
