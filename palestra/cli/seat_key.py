"""`palestra seat-key`: a key that lets a person claim only one external player's slot of a job's episodes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import add_command, run_folder
from palestra.errors import ConfigError
from palestra.terminal import say


def add_seat_key(commands: Any) -> None:
    """Add the command `seat-key`, which takes a run and a role."""
    parser = add_command(
        commands,
        "seat-key",
        _run,
        "print the key that claims one seat of a job's episodes; `rotate-key` makes it void",
        "  palestra seat-key runs/duel white",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("role", metavar="ROLE", help="the seat; one of the job's seats.roles")


def _run(arguments: argparse.Namespace) -> None:
    """Print the key of an external player's role, derived from the run's secret."""
    from palestra.store.key_files import read_secret, seat_key

    folder, config = run_folder(arguments.folder)
    if arguments.role not in config.seats.roles:
        known = ", ".join(map(repr, config.seats.roles)) or "none"
        raise ConfigError(f"{folder} has no seat {arguments.role!r}; its seats are: {known}")
    try:
        secret = read_secret(folder)
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no keys yet; it gets them when it starts") from None
    say(seat_key(secret, config.name, arguments.role))
