"""`palestra COMMAND …`: one module a command; an error is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from palestra.cli import (
    demo,
    environments,
    episodes,
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
from palestra.terminal import LogFormatter, printable, say, show_error

COMMANDS = (
    demo,
    run,
    train,
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
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parsed = parser().parse_args(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if parsed.verbose else logging.ERROR, handlers=[handler])
    sys.excepthook = show_error
    logging.getLogger("palestra.control").setLevel(logging.WARNING)  # what a command waits for
    try:
        code: int = parsed.run(parsed) or 0
    except PalestraError as error:
        say(f"palestra: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read it has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at exit
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
