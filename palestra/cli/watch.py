"""`palestra watch`: the events of a job of the service, a line each, until the job is over."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_control, command
from palestra.terminal import one_line, say

if TYPE_CHECKING:
    from palestra.client.control import Job, JobEvent


def add(commands: Any) -> None:
    """Add the command `watch`, which takes the id of a job."""
    parser = command(
        commands, "watch", run, "show what a job does, until it is over", "  palestra watch job-1f3a5c7e9b2d4f60"
    )
    parser.add_argument("job", metavar="JOB", help="the job's id")
    add_control(parser)


def run(arguments: argparse.Namespace) -> int:
    """Follow the events of the job; return 0 where the job completed."""
    from palestra.client.control import ControlClient

    with ControlClient(arguments.control) as control:
        return show(control.job(arguments.job))


def show(job: Job) -> int:
    """Print a line for each event until the job is over; return 0 where the job completed, 130 after Ctrl-C."""
    try:
        for event in job.events():
            if line := describe(event):
                say(line)
    except KeyboardInterrupt:
        say(f"\nthe job continues; watch it again with: palestra watch {job.job_id}")
        return 130
    return 0 if job.view().state == "completed" else 1


def describe(event: JobEvent) -> str:
    """Return an event in words; an empty text for events that are not worth a line."""
    data = event.data
    if event.kind == "state":
        return one_line(f"{data['state']}: {data['reason']}")
    if event.kind == "step":
        parts = [f"step {int(data['step']):>4}"]
        if "train/reward_mean" in data:
            parts.append(f"reward {data['train/reward_mean']:6.2f}")
        if "validation/reward_mean" in data:
            parts.append(f"validation {data['validation/reward_mean']:5.2f}")
        if "time/step_seconds" in data:
            parts.append(f"{data['time/step_seconds']:6.1f} s")
        return "   ".join(parts)
    if event.kind == "serving":
        return f"serving {data['model']}"
    if event.kind == "served":
        return f"served {data['calls']} calls"
    if event.kind == "saved":
        return f"saved after step {data['step']}"
    return ""
