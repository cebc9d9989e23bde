"""`palestra jobs`, `logs` and `cancel`."""

from __future__ import annotations

import argparse
import time
from itertools import islice
from typing import Any

from palestra.cli.options import add_control, command
from palestra.client.control import ControlClient
from palestra.terminal import one_line, say


def add(commands: Any) -> None:
    """Add the commands."""
    parser = command(commands, "jobs", run, "the jobs of your tenant", "  palestra jobs --state running")
    parser.add_argument("--state", action="append", help="only those in this state; may be given several times")
    parser.add_argument("--user", help="only those of this user")
    parser.add_argument("--limit", type=int, default=30, help="at most so many (default 30)")
    add_control(parser)
    parser = command(commands, "logs", logs, "a job's log", "  palestra logs -f job-1f3a5c7e9b2d4f60")
    parser.add_argument("job", help="its id")
    parser.add_argument("-f", "--follow", action="store_true", help="until it is over")
    add_control(parser)
    parser = command(commands, "cancel", cancel, "end jobs; they save first", "  palestra cancel job-1f3a5c7e9b2d4f60")
    parser.add_argument("jobs", nargs="+", help="their ids")
    add_control(parser)


def run(arguments: argparse.Namespace) -> None:
    """A table, newest first."""
    filters = {name: value for name in ("state", "user") if (value := getattr(arguments, name))}
    with ControlClient(arguments.control) as control:
        found = list(islice(control.jobs(**filters), arguments.limit))
    if not found:
        say("no jobs")
        return
    rows: list[tuple[str, ...]] = [("job", "name", "kind", "user", "state", "since", "why")]
    for job in found:
        since = time.strftime("%d %b %H:%M", time.localtime(job.changed_at))
        kind = f"{job.kind}, private" if job.private else job.kind
        texts = (job.job_id, job.name[:24], kind, job.user, job.state, since, job.reason[:60])
        rows.append(tuple(map(one_line, texts)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def logs(arguments: argparse.Namespace) -> None:
    """Print it as it comes."""
    with ControlClient(arguments.control) as control:
        for piece in control.job(arguments.job).logs(follow=arguments.follow):
            say(piece, end="")


def cancel(arguments: argparse.Namespace) -> None:
    """Ask for it."""
    with ControlClient(arguments.control) as control:
        for job_id in arguments.jobs:
            view = control.job(job_id).cancel()
            say(f"{job_id}: {'is being cancelled' if view.state in ('starting', 'running') else view.state}")
