"""`palestra harness`: lists the harnesses, and checks how one speaks to a server of this installation."""

from __future__ import annotations

import argparse
from typing import Any

from palestra.cli.options import add_command
from palestra.errors import ConfigError
from palestra.terminal import say


def add_harness(commands: Any) -> None:
    """Add the command `harness`, with `list` and `check NAME`."""
    parser = add_command(
        commands,
        "harness",
        _run,
        "list the harnesses, which are programs that can play episodes, or check one",
        "  palestra harness list\n"
        "  palestra harness check pi   # a scripted task of two turns, without a model\n\n"
        "exit code of check: 0 it plays, 1 it does not, 2 it is not installed",
    )
    parser.add_argument("what", choices=["list", "check"], help="what to do")
    parser.add_argument("name", nargs="?", help="the harness to check; `list` is without one")


def _run(arguments: argparse.Namespace) -> int:
    """Do what is asked for, and return the exit code documented in the help."""
    if arguments.what == "check":
        if arguments.name is None:
            raise ConfigError("name the harness to check; `palestra harness list` has all")
        return _check(arguments.name)
    if arguments.name is not None:
        raise ConfigError(f"`list` shows all; to check one: palestra harness check {arguments.name}")
    from palestra_harness.harness import known_harnesses

    for name, harness in known_harnesses().items():
        try:
            place = harness.find_program()
        except ConfigError:
            place = f"not installed: {harness.install}"
        say(f"{name:18} tried: {harness.tried:10} {place}")
    return 0


def _check(name: str) -> int:
    """Check a harness, print what was found, and return 0 if it plays."""
    import asyncio

    from palestra_harness.checking import check_harness, lines_of
    from palestra_harness.harness import find_harness

    harness = find_harness(name)
    harness.find_program()  # before torch is loaded
    found = asyncio.run(check_harness(harness))
    for line in lines_of(found):
        say(line)
    return 0 if found.speaks else 1
