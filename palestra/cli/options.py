"""Options and arguments that several commands have."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.config import UNSET, JobConfig, load_config
from palestra.errors import ConfigError, NotFound

TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}  # in seconds


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], summary: str, example: str
) -> argparse.ArgumentParser:
    """Add a command; its help ends with an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_set(parser: argparse.ArgumentParser) -> None:
    """`--set key=value`."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one key of the configuration, e.g. --set steps=10 --set server.port=0; KEY=none: its default",
    )


def add_control(parser: argparse.ArgumentParser) -> None:
    """`--control URL`."""
    parser.add_argument(
        "--control", metavar="URL", help="of the control plane; without it, PALESTRA_URL. The key is in PALESTRA_KEY"
    )


def time_span(text: str) -> float:
    """Return the seconds of a time span such as `45s`, `90m`, `1.5h` or, in seconds, `300`.

    Raises:
        ArgumentTypeError: the text is no time span, or one that is not above 0.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in TIME_UNITS else (text, "s")
    try:
        seconds = float(number) * TIME_UNITS[unit]
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 45s, 90m, 1.5h, or a number of seconds")
    return seconds


def overrides(settings: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs; values are JSON where they can be, else text; `none` takes a key out.

    Raises:
        ConfigError: no `=` in it.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting}: expected KEY=VALUE")
        if value == "none":
            found[key] = UNSET
            continue
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def run_folder(path: Path) -> tuple[Path, JobConfig]:
    """A run's folder and its configuration.

    Raises:
        NotFound: it is not the folder of a run.
    """
    if not (path / "run.db").is_file():
        raise NotFound(f"{path} is not the folder of a run (it has no run.db)")
    return path, load_config(path / "config.toml")


def load_tasks(
    source: str, validation: Path | None = None
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """(training, validation) tasks, of JSONL files or of `module:function`.

    Raises:
        ConfigError: no such file or function, or a line that is no JSON object.
    """
    if ":" in source and not Path(source).is_file():
        train, held_out = load_function(source)()
        return train, held_out
    from palestra.cluster.tasks import read_tasks

    paths = [Path(source), *([] if validation is None else [validation])]
    train, *others = [[{"id": task.task_id, **task.data} for task in read_tasks(path)] for path in paths]
    return train, [task for held_out in others for task in held_out]


def load_function(reference: str) -> Any:
    """`module:function` or `path/to/file.py:function`.

    Raises:
        ConfigError: it can't be imported, or is not there.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{reference!r}: expected module:function, or path/to/file.py:function")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None or not Path(place).is_file():
                raise ConfigError(f"{place}: no such file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"{reference}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{place} has no {name!r}")
    return getattr(module, name)
