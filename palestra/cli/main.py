"""`palestra COMMAND …`: one module a command; an error is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from palestra import __version__
from palestra.cli import (
    demo,
    environments,
    episodes,
    eval,
    export,
    jobs,
    rotate_key,
    run,
    serve,
    submit,
    tenants,
    train,
    users,
    watch,
    worker,
)
from palestra.errors import PalestraError
from palestra.extras import missing_extra
from palestra.terminal import LogFormatter, printable, say, show_error

COMMANDS = (
    demo,
    run,
    train,
    eval,
    worker,
    environments,
    episodes,
    export,
    rotate_key,
    serve,
    submit,
    jobs,
    watch,
    users,
    tenants,
)


class CommandParser(argparse.ArgumentParser):
    """Shows what is wrong with arguments, and does not obey what stands in them."""

    def error(self, message: str) -> NoReturn:
        """See `ArgumentParser`."""
        super().error(printable(message))


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = CommandParser(
        prog="palestra",
        description="Reinforcement learning for LLM agents: bring an agent, get a better model.",
        epilog="start here: palestra demo",
    )
    top.add_argument("--verbose", action="store_true", help="show warnings of the server and the workers")
    top.add_argument("--version", action="version", version=f"palestra {__version__}")
    commands = top.add_subparsers(metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    top = parser()
    if (unknown := _unknown(top, given)) is not None:
        say(f"palestra: {unknown}", file=sys.stderr)
        return 2
    parsed = top.parse_args(given)
    if not hasattr(parsed, "run"):
        top.print_help()
        return 0
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if parsed.verbose else logging.ERROR, handlers=[handler])
    sys.excepthook = show_error
    logging.getLogger("palestra.client").setLevel(logging.WARNING)  # what a command waits for
    try:
        code: int = parsed.run(parsed) or 0
    except PalestraError as error:
        say(f"palestra: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (said := missing_extra(error)) is None:
            raise
        say(f"palestra: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read it has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at exit
        return 1
    return code


def _unknown(top: argparse.ArgumentParser, given: Sequence[str]) -> str | None:
    """What is wrong with the name of the command; None: nothing."""
    name = next((word for word in given if not word.startswith("-")), None)
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    if name is None or name in commands.choices:
        return None
    near = difflib.get_close_matches(name, commands.choices, n=1)
    hint = f"did you mean `palestra {near[0]}`?" if near else f"there are {', '.join(commands.choices)}"
    return f"there is no command {name!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
