"""`palestra jobs`, `logs` and `cancel`: a user's queries about submitted jobs."""

from __future__ import annotations

import argparse
import time
from itertools import islice
from typing import Any

from palestra.cli.options import add_command, add_control
from palestra.terminal import TerminalConsole, say


def add_jobs(commands: Any) -> None:
    """Add the commands `jobs`, `logs` and `cancel`."""
    parser = add_command(
        commands, "jobs", _run, "list the jobs of your tenant, the newest first", "  palestra jobs --state running"
    )
    parser.add_argument(
        "--state", action="append", help="list only those in this state; may be given several times; without it, all"
    )
    parser.add_argument("--user", help="list only those of this user; without it, of all users")
    parser.add_argument("--limit", metavar="JOBS", type=int, default=30, help="list at most so many")
    add_control(parser)
    parser = add_command(commands, "logs", logs, "print a job's log", "  palestra logs -f job-1f3a5c7e9b2d4f60")
    parser.add_argument("job", metavar="JOB", help="the job's id")
    parser.add_argument("-f", "--follow", action="store_true", help="print what comes, until the job is over")
    add_control(parser)
    parser = add_command(
        commands,
        "cancel",
        cancel,
        "end jobs, after each has saved what it trained",
        "  palestra cancel job-1f3a5c7e9b2d4f60",
    )
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="the ids of the jobs")
    add_control(parser)


def _run(arguments: argparse.Namespace) -> None:
    """Print a table of jobs, newest first."""
    from palestra_control.control import ControlClient
    from palestra_inspect.top_view import fitted_table

    filters = {name: value for name in ("state", "user") if (value := getattr(arguments, name))}
    with ControlClient(arguments.control) as control:
        found = list(islice(control.jobs(**filters), arguments.limit))
    if not found:
        say("no jobs")
        return
    names, rows = ("job", "name", "kind", "user", "state", "since", "why"), []
    for job in found:
        since = time.strftime("%d %b %H:%M", time.localtime(job.changed_at))
        rows.append((job.job_id, job.name, job.kind, job.user, job.state, since, job.reason))
    console = TerminalConsole()
    console.print(fitted_table(names, rows, console.width, (), ("name", "user", "why"), ("kind", "since", "user")))


def logs(arguments: argparse.Namespace) -> None:
    """Print the log of a job, continuously with `--follow`."""
    from palestra_control.control import ControlClient

    with ControlClient(arguments.control) as control:
        for piece in control.job(arguments.job).logs(follow=arguments.follow):
            say(piece, end="")


def cancel(arguments: argparse.Namespace) -> None:
    """Ask the service to cancel each job, and print the result."""
    from palestra_control.control import ControlClient

    with ControlClient(arguments.control) as control:
        for job_id in arguments.jobs:
            view = control.job(job_id).cancel()
            say(f"{job_id}: {'is being cancelled' if view.state in ('starting', 'running') else view.state}")
