"""`palestra watch`."""

from __future__ import annotations

import argparse
from typing import Any

from palestra.cli.options import add_control, command
from palestra.client.control import ControlClient, Job, JobEvent
from palestra.terminal import one_line, say


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands, "watch", run, "show what a job does, until it is over", "  palestra watch job-1f3a5c7e9b2d4f60"
    )
    parser.add_argument("job", help="its id")
    add_control(parser)


def run(arguments: argparse.Namespace) -> int:
    """Follow its events."""
    with ControlClient(arguments.control) as control:
        return show(control.job(arguments.job))


def show(job: Job) -> int:
    """A line for each event; 0 when the job completed."""
    try:
        for event in job.events():
            if line := told(event):
                say(line)
    except KeyboardInterrupt:
        say(f"\nit goes on; watch it again with: palestra watch {job.job_id}")
        return 130
    return 0 if job.view().state == "completed" else 1


def told(event: JobEvent) -> str:
    """An event in words; empty: not worth a line."""
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
