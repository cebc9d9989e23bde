"""`palestra top`: runs of this machine as they go: curves, the episodes that ended last, and the slowest calls."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from palestra.cli.options import command

SECONDS = 2.0


def add(commands: Any) -> None:
    """Add the command `top`, which takes folders of runs."""
    parser = command(
        commands,
        "top",
        run,
        "show runs in the terminal while they go on: curves, episodes, slow calls",
        "  palestra top runs/addition\n"
        "  palestra top runs/*            # a line for each; the newest in full\n"
        "  palestra top runs/* --once     # what there is now, for scripts and for `watch`\n\n"
        "Ctrl-C ends it; the jobs go on",
    )
    parser.add_argument("run_dirs", metavar="RUN", type=Path, nargs="+", help="a run's folder; the run may be running")
    parser.add_argument("--seconds", metavar="SECONDS", type=float, default=SECONDS, help="pause between two looks")
    parser.add_argument("--once", action="store_true", help="print once, and end")


def run(arguments: argparse.Namespace) -> int:
    """Draw the runs until Ctrl-C."""
    from rich.live import Live

    from palestra.cli.top_view import view_of
    from palestra.dashboard.runs import runs_of
    from palestra.terminal import TerminalConsole

    runs, console = runs_of(arguments.run_dirs), TerminalConsole(highlight=False)
    if arguments.once:
        console.print(view_of(runs, console.width, time.time()))
        return 0
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(view_of(runs, console.width, time.time()), refresh=True)
            time.sleep(max(arguments.seconds, 0.2))
