"""`palestra rotate-key`: another key for a job, also while it runs; `palestra seat-key`: the key of one seat."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import JOB_ID, RUN, add_command, add_control, run_folder
from palestra.errors import ConfigError
from palestra.terminal import say


def add_rotate_key(commands: Any) -> None:
    """Add the command `rotate-key`, which takes a run or a job."""
    parser = add_command(
        commands,
        "rotate-key",
        _rotate,
        "give a job another key; its former key, and the keys of its episodes, open nothing any more",
        "  palestra rotate-key runs/addition\n  palestra rotate-key job-1f3a5c7e9b2d4f60",
    )
    parser.add_argument("source", metavar="RUN", help=RUN)
    add_control(parser)


def _rotate(arguments: argparse.Namespace) -> None:
    """Replace the secret from which the job's keys are derived; a running job continues under the new keys."""
    if JOB_ID.fullmatch(arguments.source) is None:
        from palestra.store.key_files import rotate_keys

        folder, config = run_folder(Path(arguments.source))
        rotate_keys(folder, config.name)
        say(f"{folder / 'api_key'} holds the new key; start workers again with it")
        return
    from palestra_control.control import ControlClient

    with ControlClient(arguments.control) as control:
        key = control.job(arguments.source).rotate_key()
    say(f"the key of {arguments.source}, with which workers have to be started again (--job finds it):  {key}")


def add_seat_key(commands: Any) -> None:
    """Add the command `seat-key`, which takes a run and a role."""
    parser = add_command(
        commands,
        "seat-key",
        _show,
        "print the key that claims one seat of a job's episodes; `rotate-key` makes it void",
        "  palestra seat-key runs/duel white",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("role", metavar="ROLE", help="the seat; one of the job's seats.roles")


def _show(arguments: argparse.Namespace) -> None:
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
