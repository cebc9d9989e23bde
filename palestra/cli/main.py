"""`palestra COMMAND …`: one module per command; an error is one line on stderr and exit code 2.

A command's dependencies are imported when it runs, so that `palestra --help` and shell completion stay fast.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from palestra import __version__
from palestra.cli.eval import add_eval
from palestra.cli.options import CommandParser, HelpFormatter, add_command, commands_of
from palestra.cli.own_process import own_process
from palestra.cli.run import add_demo, add_run, add_train
from palestra.cli.worker import add_worker
from palestra.errors import ConfigError, PalestraError, place_of
from palestra.extensions import extensions, load_extension, nearest
from palestra.extras import missing_extra
from palestra.terminal import LogFormatter, problem, say, show_error

COMMANDS = (add_demo, add_run, add_train, add_eval, add_worker)
GROUP = "palestra.commands"

# Names that other tools give to what a command here does.
_SAME = {"status": "; did you mean `palestra top`?"}


def parser() -> CommandParser:
    """Return the parser of all commands and their options."""
    top = CommandParser(
        prog="palestra",
        description="Reinforcement learning for LLM agents: bring an agent, get a better model.",
        epilog="start here: palestra demo\na command's own options and examples: palestra COMMAND --help",
        formatter_class=HelpFormatter,
    )
    top.add_argument("--verbose", action="store_true", help="show warnings of the server and the workers")
    top.add_argument("--version", action="version", version=f"palestra {__version__}", help="show the version")
    top.set_defaults(parser=top)  # `completion` describes all of it
    commands = top.add_subparsers(metavar="COMMAND")
    for add in (*COMMANDS, *_of_packages(), add_completion):
        add(commands)
    return top


def _of_packages() -> Iterator[Callable[[Any], None]]:
    """Yield the commands of other packages; one that cannot be loaded is named, and the others work."""
    for point in extensions(GROUP).values():
        try:
            add = load_extension(point)
            if not callable(add):
                raise ConfigError(f"{point.value} is no function; an entry point of {GROUP} leads to `module:add_NAME`")
            yield add
        except (ConfigError, ModuleNotFoundError) as error:
            say(f"palestra: there is no command {point.name!r}: {error}", file=sys.stderr)


def command() -> int:
    """Run the command of this process; see `main`."""

    def begin(trains: bool) -> None:
        if trains:
            from palestra.cli.own_process import start_without_caches

            start_without_caches()
        if any(name.lower().endswith("_proxy") for name in os.environ):
            from palestra.proxies import spare_own_addresses  # urllib loads slowly

            spare_own_addresses()

    own_process()
    return main(None, begin)


def main(arguments: Sequence[str] | None = None, begin: Callable[[bool], None] = lambda trains: None) -> int:
    """Run one command and return its exit code: 2 for a usage error, 130 after Ctrl-C.

    Args:
        arguments: the words after `palestra`; None: those of this process.
        begin: called before the command, with whether it trains in this process.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for what an agent prints where the terminal is not UTF-8
    given = list(sys.argv[1:] if arguments is None else arguments)
    top = parser()
    name = next((word for word in given if not word.startswith("-")), None)
    known = commands_of(top)
    if name is not None and name not in known:
        hint = _SAME.get(name) or nearest(name, known, "`palestra {}`") or f"; there are {', '.join(known)}"
        say(f"palestra: there is no command {name!r}{hint}", file=sys.stderr)
        return 2
    parsed, left = top.parse_known_args(given)
    if left:
        chosen = top if name is None else known[name]
        chosen.error(chosen.unknown_arguments(left))
    if not hasattr(parsed, "run"):
        top.print_help()
        return 0
    begin(getattr(parsed, "trains", False))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if parsed.verbose else logging.ERROR, handlers=[handler])
    sys.excepthook = show_error
    logging.getLogger("palestra.client").setLevel(logging.WARNING)  # says what a command waits for
    return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    """Run the chosen command; print errors that a user can fix in one line."""
    try:
        return int(parsed.run(parsed) or 0)
    except PalestraError as error:
        say(f"palestra: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (said := missing_extra(error)) is None:
            raise
        say(f"palestra: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has enough
        # Python writes what is buffered at exit; without another target that would fail with a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        say(f"palestra: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        return 2
    except Exception as error:
        if parsed.verbose or not (place := place_of(error)):
            raise
        say(f"palestra: {problem(error)}{place}; `palestra --verbose …` shows the traceback", file=sys.stderr)
        return 2


SHELLS = ("bash", "zsh", "fish")


def add_completion(commands: Any) -> None:
    """Add the command `completion`, which takes the name of a shell."""
    parser = add_command(
        commands,
        "completion",
        _print_completion,
        "print the script that completes commands and options in a shell",
        "  palestra completion bash\n\n"
        "to have it in every shell:\n"
        "  echo 'eval \"$(palestra completion bash)\"' >> ~/.bashrc\n"
        "  palestra completion zsh > ~/.zfunc/_palestra   # a folder of $fpath\n"
        "  palestra completion fish > ~/.config/fish/completions/palestra.fish",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read the script")


def _print_completion(arguments: argparse.Namespace) -> None:
    """Print the script, which contains every command of this version and starts no process."""
    import shtab

    # shtab is asked for files here and not where options are declared, so that no other command has to load it.
    top = arguments.parser
    for found in commands_of(top).values():
        for action in found._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads this attribute
    say(shtab.complete(top, shell=arguments.shell))


if __name__ == "__main__":
    sys.exit(command())
