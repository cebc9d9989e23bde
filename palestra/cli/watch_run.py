"""The events of a run on this machine, read from its store while another process, or none, runs the job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.cli.event_lines import describe, trained_of_several
from palestra.cli.options import run_folder
from palestra.runtime.run_dir import is_running
from palestra.store.browsing import browse
from palestra.store.run_log import read_events
from palestra.terminal import one_line, say
from palestra.types.records import Event

LOOK_SECONDS = 0.5
MOST_EVENTS = 500  # of one look
OVER = ("completed", "failed", "served")


def show_run(path: Path) -> int:
    """Print a line for each event of a run, from its first on, until the job is over or no process runs it any more.

    Returns:
        The exit code: 0 the job completed, 1 it failed or was stopped, 130 after Ctrl-C.
    """
    folder, config = run_folder(path)
    policy = trained_of_several(config.model_dump(include={"policies"}))
    if config.kind == "training":
        say(f"{config.name}: {config.steps} steps, {folder}")
    state, last = "starting", 0
    try:
        while True:
            running = is_running(folder)  # before the events are read, so that those of its end are not missed
            events = _events_after(folder, last)
            for event in events:
                last = event.event_id
                state = event.kind if event.kind in ("running", "serving", *OVER) else state
                if line := _line(event.kind, event.data, policy):
                    say(line)
            if events:
                continue
            if not running:
                break
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        say(f"\nthe job continues; watch it again with: palestra watch {path}")
        return 130
    if state not in OVER:
        say(f"no process runs this job now; go on with it by --resume, or resume=True with run_dir = {str(folder)!r}")
    return 0 if state in ("completed", "served") else 1


def _line(kind: str, data: Mapping[str, Any], policy: str) -> str:
    """Return an event in words; the state of a job that no service runs is an event, too."""
    if kind == "running":
        return f"running, after step {data['step']}" if data["step"] else "running"
    if kind == "completed":
        return f"completed after step {data['step']}"
    if kind == "failed":
        return one_line(f"failed: {data['reason']}")
    return describe(kind, data, policy)


def _events_after(folder: Path, last: int) -> list[Event]:
    """Return the events of the run with a larger id than `last`."""
    with browse(folder / "run.db") as connection:
        return read_events(connection, last, MOST_EVENTS)
