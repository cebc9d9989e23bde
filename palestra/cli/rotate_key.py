"""`palestra rotate-key`: another key for a job, also while the job runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import JOB_ID, RUN, add_command, add_control, run_folder
from palestra.terminal import say


def add_rotate_key(commands: Any) -> None:
    """Add the command `rotate-key`, which takes a run or a job."""
    parser = add_command(
        commands,
        "rotate-key",
        _run,
        "give a job another key; its former key, and the keys of its episodes, open nothing any more",
        "  palestra rotate-key runs/addition\n  palestra rotate-key job-1f3a5c7e9b2d4f60",
    )
    parser.add_argument("source", metavar="RUN", help=RUN)
    add_control(parser)


def _run(arguments: argparse.Namespace) -> None:
    """Replace the secret from which the job's keys are derived; a running job continues under the new keys."""
    if JOB_ID.fullmatch(arguments.source) is None:
        from palestra.store.key_files import rotate_keys

        folder, config = run_folder(Path(arguments.source))
        rotate_keys(folder, config.name)
        say(f"{folder / 'api_key'} holds the new key; start workers again with it")
        return
    from palestra.client.control import ControlClient

    with ControlClient(arguments.control) as control:
        key = control.job(arguments.source).rotate_key()
    say(f"the key of {arguments.source}, with which workers have to be started again (--job finds it):  {key}")
