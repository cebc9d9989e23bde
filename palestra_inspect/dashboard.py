"""`palestra dashboard`: a page in the browser for runs, finished or not."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.dashboard.access import OneTimeLink


def add_dashboard(commands: Any) -> None:
    """Add the command `dashboard`, which takes folders of runs."""
    parser = add_command(
        commands,
        "dashboard",
        _run,
        "show runs in the browser: curves, steps, groups, episodes, tokens",
        "  palestra dashboard runs/addition\n"
        "  palestra dashboard runs/*                      # several, side by side\n"
        "  palestra dashboard runs/addition --no-browser  # on a machine that is reached by ssh -L 7413:localhost:7413",
    )
    parser.add_argument("run_dirs", metavar="RUN", type=Path, nargs="+", help="a run's folder; the run may be running")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; TLS needs a proxy")
    parser.add_argument(
        "--port", type=int, help="port to listen on, 0 for any free one; without it 7413, or any if that is in use"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the link, and open no browser")


def _run(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; print its link, and open it in the browser."""
    import asyncio

    from palestra.dashboard.runs import runs_of

    runs = runs_of(arguments.run_dirs)
    asyncio.run(_serve(runs, arguments))
    return 0


async def _serve(runs: Any, arguments: argparse.Namespace) -> None:
    import asyncio

    from palestra_inspect.folder_page import serve_folders

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def ready(url: str, access: OneTimeLink) -> None:
        link = f"{url}#{access.code}"
        say(f"{link}\nthe link opens the page once; Enter prints another one, Ctrl-C ends")
        if not arguments.no_browser:
            threading.Thread(target=_open, args=(link, Path(folder)), daemon=True).start()
        if sys.stdin is not None and sys.stdin.isatty():
            threading.Thread(target=_renew, args=(url, access), daemon=True).start()

    with tempfile.TemporaryDirectory(prefix="palestra-link-") as folder:
        await serve_folders(runs, arguments.host, arguments.port, ready, stop)


def _open(link: str, folder: Path) -> None:
    """Open a redirect file, not the URL: all local users see command-line arguments, and it has a one-time code."""
    file = folder / "open.html"
    file.write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={link}"><title>Palestra</title>', encoding="utf-8"
    )
    try:
        opened = webbrowser.open(file.as_uri())
    except webbrowser.Error:
        opened = False
    if not opened:
        say("no browser could be started here; open the link in one that reaches this machine (`ssh -L`)")


def _renew(url: str, access: OneTimeLink) -> None:
    """Print a new link for each line of standard input."""
    with contextlib.suppress(OSError, ValueError):  # the input was closed
        for _ in sys.stdin:
            access.renew()
            say(f"{url}#{access.code}")
