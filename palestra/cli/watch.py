"""`palestra watch`: the events of a job of the service, or of a run on this machine, a line each, until it is over."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.event_lines import describe, trained_of_several
from palestra.cli.options import add_control, command
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.client.job import Job


def add(commands: Any) -> None:
    """Add the command `watch`, which takes the id of a job or the folder of a run."""
    parser = command(
        commands,
        "watch",
        run,
        "show what a job does, until it is over",
        "  palestra watch job-1f3a5c7e9b2d4f60   # a job of the service\n"
        "  palestra watch runs/addition          # a run of this machine, also one of palestra.train\n\n"
        "exit code: 0 it completed, 1 it did not, 2 an error, 130 stopped by Ctrl-C, which leaves the job running",
    )
    parser.add_argument("job", metavar="JOB", help="the job's id; or the folder of a run on this machine")
    add_control(parser)


def run(arguments: argparse.Namespace) -> int:
    """Follow the events of the job; return 0 where the job completed."""
    folder = Path(arguments.job)
    if (folder / "run.db").is_file():
        from palestra.cli.watch_run import show_run

        return show_run(folder)
    from palestra.client.control import ControlClient

    with ControlClient(arguments.control) as control:
        return show(control.job(arguments.job))


def show(job: Job) -> int:
    """Print a line for each event until the job is over; return 0 where the job completed, 130 after Ctrl-C."""
    try:
        policy = trained_of_several(job.view().config)
        for event in job.events():
            if line := describe(event.kind, event.data, policy):
                say(line)
    except KeyboardInterrupt:
        say(f"\nthe job continues; watch it again with: palestra watch {job.job_id}")
        return 130
    return 0 if job.view().state == "completed" else 1
