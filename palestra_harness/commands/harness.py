"""`palestra harness list`: the harnesses, the versions that were tried, and which are installed here."""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from palestra.cli.options import add_command
from palestra.terminal import say


def add_harness(commands: Any) -> None:
    """Add the command `harness list`."""
    parser = add_command(
        commands,
        "harness",
        _run,
        "list the harnesses: coding agents and other programs that can play episodes",
        "  palestra harness list",
    )
    parser.add_argument("what", choices=["list"], help="what to do")


def _run(arguments: argparse.Namespace) -> int:
    """Print each harness with where its program is, or how to install it."""
    from palestra_harness.harness import known_harnesses

    for name, harness in known_harnesses().items():
        place = shutil.which(harness.command[0]) or f"not installed: {harness.install}"
        say(f"{name:18} tried: {harness.tried:10} {place}")
    return 0
