"""`palestra top`: runs of this machine, or the jobs of a service, as they go: curves, episodes, and slow calls."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command, add_control

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SECONDS = 2.0


def add_top(commands: Any) -> None:
    """Add the command `top`, which takes folders of runs, or shows a service's jobs."""
    parser = add_command(
        commands,
        "top",
        _run,
        "show runs or a service's jobs in the terminal while they go on: curves, episodes, slow calls",
        "  palestra top runs/addition\n"
        "  palestra top runs/*            # a line for each; the newest in full\n"
        "  palestra top runs/* --once     # what there is now, for scripts and for `watch`\n"
        "  palestra top                   # a service: its machines, your tenant's jobs and why each waits\n\n"
        "Ctrl-C ends it; the jobs go on",
    )
    parser.add_argument("run_dirs", metavar="RUN", type=Path, nargs="*", help="a run's folder; without any, a service")
    parser.add_argument("--seconds", metavar="SECONDS", type=float, default=SECONDS, help="pause between two looks")
    parser.add_argument("--once", action="store_true", help="print once, and end")
    add_control(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Draw the runs, or the service, until Ctrl-C."""
    from rich.live import Live

    from palestra.terminal import TerminalConsole

    console = TerminalConsole()
    with contextlib.ExitStack() as stack:
        look = _runs(arguments.run_dirs, console) if arguments.run_dirs else _service(arguments.control, console, stack)
        if arguments.once:
            console.print(look())
            return 0
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(look(), refresh=True)
                time.sleep(max(arguments.seconds, 0.2))


def _runs(folders: Sequence[Path], console: Console) -> Callable[[], RenderableType]:
    """Return a function that reads runs of this machine."""
    from palestra.cli.top_view import view_of
    from palestra.dashboard.runs import runs_of

    runs = runs_of(folders)
    return lambda: view_of(runs, console.width, time.time())


def _service(url: str | None, console: Console, stack: contextlib.ExitStack) -> Callable[[], RenderableType]:
    """Return a function that reads a service."""
    from palestra.cli.top_view import service_view
    from palestra.client.control import ControlClient

    control = stack.enter_context(ControlClient(url))
    return lambda: service_view(control, console.width, time.time())
