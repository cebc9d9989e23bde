"""How commands are declared: the parser with its help and its errors, and options that several commands have."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from palestra.errors import ConfigError, NotFound
from palestra.extensions import load_function, nearest
from palestra.terminal import printable

if TYPE_CHECKING:
    from palestra.config import JobConfig

TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}  # in seconds
ENVIRONMENT = "one that ships (palestra environments), or your own: module:Class, or path/to/file.py:Class"
RUN = "the run's folder, or a job of a control plane by its id"
WATCHED = f"{RUN}, or the URL of a job's own server, whose key is in PALESTRA_API_KEY"
JOB_ID = re.compile(r"job-[0-9a-f]{16}")

REWARDS = "palestra.rewards"  # entry points
Tasks = Iterable[Mapping[str, Any]] | str | Path


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of examples, and ends each option's help with its default."""

    def __init__(self, prog: str) -> None:
        """Reserve width for long options."""
        super().__init__(prog, max_help_position=30)
        # argparse forgets the indent of the commands in a list, and would put the text of a long name below it.
        self._action_max_length = 16

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:  # examples
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        takes_value = action.nargs != 0
        if text and takes_value and action.default not in (None, "", [], argparse.SUPPRESS):
            return f"{text} (default: %(default)s)"
        return text


class CommandParser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, with the nearest existing name, and exits with 2."""

    def __init__(self, **options: Any) -> None:
        """Create a parser without abbreviations of options: a typo must not start a long job."""
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Write the line with control characters escaped."""
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, printable(f"{self.prog}: {message}{see} `{self.prog} --help`\n"))

    def unknown_arguments(self, arguments: Sequence[str]) -> str:
        """Describe arguments that this command does not have."""
        option = next((word.partition("=")[0] for word in arguments if word.startswith("-")), None)
        if option is None:
            return f"{arguments[0]!r} is one argument too many"
        known = list(self._option_string_actions)
        return f"there is no option {option}" + nearest(option, [k for k in known if k.startswith(option)] or known)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = nearest(str(value), known) or f"; there are {', '.join(known)}"
            raise argparse.ArgumentError(action, f"{value!r} can't be chosen{hint}")


def commands_of(top: argparse.ArgumentParser) -> dict[str, CommandParser]:
    """Return the parser of each command by name."""
    (found,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], summary: str, example: str
) -> argparse.ArgumentParser:
    """Add a command, whose help begins with a summary and ends with an example; return its parser.

    Args:
        run: called with the parsed arguments; returns the exit code, None for 0.
        summary: one sentence without a full stop, also for the list of commands.
        example: at least one command line, each indented by two spaces.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add `--set KEY=VALUE`, which `overrides` parses."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one key of the configuration, e.g. --set steps=10 --set server.port=0; KEY=none takes it out, so "
        "that its default holds; a name with a dot stands in quotes, e.g. --set 'policies.\"v1.5\".frozen=true'; may "
        "be given several times",
    )


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add `--control URL`, the address of the control plane; its key is never an argument."""
    parser.add_argument(
        "--control",
        metavar="URL",
        help="URL of the control plane; without it, the variable PALESTRA_URL. The key is in PALESTRA_KEY",
    )


def time_span(text: str) -> float:
    """Return the seconds of a duration such as `45s`, `90m`, `1.5h` or, in seconds, `300`."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in TIME_UNITS else (text, "s")
    try:
        seconds = float(number) * TIME_UNITS[unit]
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 45s, 90m, 1.5h, or a number of seconds")
    return seconds


def overrides(settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--set` by dotted key: JSON if the text is JSON, else text; `none` removes a key."""
    from palestra.config import UNSET

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


def is_served(source: str) -> bool:
    """Return whether a RUN is at a server, so that it is read over HTTP: a service's job, or the URL of a job."""
    return source.startswith(("http://", "https://")) or JOB_ID.fullmatch(source) is not None


def run_folder(path: Path) -> tuple[Path, JobConfig]:
    """Return a run's folder and its original configuration."""
    from palestra.config import load_saved_config

    if not (path / "run.db").is_file():
        raise NotFound(f"{path} is not the folder of a run (it has no run.db)")
    return path, load_saved_config(path)


def load_task_source(source: str, validation: Path | None = None) -> tuple[Tasks, Tasks]:
    """Return (training, validation) tasks, or the JSONL files that they are in. `source`: a file of training tasks, or
    `module:function`, which returns both.
    """
    if ":" in source and not Path(source).is_file():
        train, held_out = load_function(source)()
        return train, held_out
    return source, () if validation is None else validation


def environment_settings(text: str) -> dict[str, Any]:
    """Return an environment's settings by name, from JSON."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--settings {text}: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"""--settings {text}: settings are a JSON object, such as '{{"size": 5}}'""")
    return given


def load_environment(reference: str | None) -> Any:
    """Return a user's environment class or factory, or another library's by its name, such as `CartPole-v1`; names of
    shipped environments and None are returned unchanged.

    This process is the user's own. Jobs elsewhere may only use shipped environments.
    """
    from palestra.envs.catalog import adapted  # loads slowly

    if reference is None or ":" not in reference:
        return adapted(reference)
    made = load_function(reference)
    if not callable(made):
        raise ConfigError(f"{reference} is a {type(made).__name__}, and not the class of an environment")
    return made
