"""`palestra top`: runs in folders or at servers, or a service, as they go: curves, episodes, and slow calls."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import WATCHED, add_command, add_control, is_served

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SECONDS = 2.0


def add_top(commands: Any) -> None:
    """Add the command `top`, which takes runs, or shows a service's jobs."""
    parser = add_command(
        commands,
        "top",
        _run,
        "show runs or a service's jobs in the terminal while they go on: curves, episodes, slow calls",
        "  palestra top runs/addition\n"
        "  palestra top runs/*            # a line for each; the newest in full\n"
        "  palestra top runs/* --once     # what there is now, for scripts and for `watch`\n"
        "  palestra top http://server:7411   # a run at a server, with its key\n"
        "  palestra top                   # a service: its machines, your tenant's jobs and why each waits\n\n"
        "Ctrl-C ends it; the jobs go on",
    )
    parser.add_argument("sources", metavar="RUN", nargs="*", help=f"{WATCHED}; without any, a service")
    parser.add_argument("--seconds", metavar="SECONDS", type=float, default=SECONDS, help="pause between two looks")
    parser.add_argument("--once", action="store_true", help="print once, and end")
    add_control(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Draw the runs, or the service, until Ctrl-C."""
    from rich.live import Live

    from palestra.terminal import TerminalConsole

    console = TerminalConsole()
    with contextlib.ExitStack() as stack:
        look = _runs(arguments, console, stack) if arguments.sources else _service(arguments.control, console, stack)
        if arguments.once:
            console.print(look())
            return 0
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(look(), refresh=True)
                time.sleep(max(arguments.seconds, 0.2))


def _runs(arguments: argparse.Namespace, console: Console, stack: contextlib.ExitStack) -> Callable[[], RenderableType]:
    """Return a function that draws the runs."""
    from palestra_inspect.served_run import served_run
    from palestra_inspect.top_view import WatchedRun, view_of

    served = [run for run in arguments.sources if is_served(run)]
    watched = [WatchedRun(stack.enter_context(served_run(run, arguments.control))) for run in dict.fromkeys(served)]
    if folders := [Path(run) for run in arguments.sources if not is_served(run)]:
        from palestra.dashboard.runs import runs_of
        from palestra_inspect.folder_run import FolderRun  # reads run stores, which the client alone can't

        watched += [WatchedRun(FolderRun(run)) for run in runs_of(folders)]
    return lambda: view_of(watched, console.width, time.time())


def _service(url: str | None, console: Console, stack: contextlib.ExitStack) -> Callable[[], RenderableType]:
    """Return a function that draws a service."""
    from palestra_control.control import ControlClient
    from palestra_inspect.top_view import service_view

    control = stack.enter_context(ControlClient(url))
    return lambda: service_view(control, console.width, time.time())
