"""`palestra run`: one job on this machine, served until its steps are done."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command, add_set, overrides
from palestra.cli.own_process import end_soon
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.config import JobConfig
    from palestra.runtime.console import Console
    from palestra.types.progress import JobProgress


def add_run(commands: Any) -> None:
    """Add the command `run`, which takes a job's configuration."""
    parser = add_command(
        commands,
        "run",
        _run,
        "run one job on this machine, with its data plane open, until its steps are done; or serve its model",
        "  palestra run job.toml\n  palestra run job.toml --resume\n"
        "  palestra run job.toml --set kind=inference   # until Ctrl-C\n\n"
        "then, in another terminal, any script with palestra.Client; the key is in RUN/api_key",
    )
    parser.set_defaults(trains=True)
    parser.add_argument("config", metavar="JOB.TOML", type=Path, help="the job (docs/reference/configuration.md)")
    parser.add_argument("--resume", action="store_true", help="continue the run in the job's folder")
    add_set(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Serve the job, and train, until its steps are done or Ctrl-C; return 130 after a signal."""
    from palestra.config import load_config
    from palestra.models.device import tune_malloc
    from palestra.runtime.console import console_of
    from palestra.runtime.event_loop import run_on_uvloop
    from palestra.runtime.run_dir import resolve_run_dir
    from palestra.runtime.starting_points import newest_checkpoints, with_checkpoints

    config = with_checkpoints(load_config(arguments.config, overrides(arguments.set)))
    config = resolve_run_dir(config, arguments.resume, lambda text: say(f"palestra: {text}", file=sys.stderr))
    if config.engine.has_model:
        tune_malloc()  # before the console starts the first thread
    # The console is shown from here on, because loading the model takes seconds in which nothing else is written.
    console = console_of(config)
    with console:
        progress = run_on_uvloop(_served(config, console))
        console.finished(progress.state.value, newest_checkpoints(config))
    return 0 if progress.over else 130


async def _served(config: JobConfig, console: Console) -> JobProgress:
    """Serve the job; work that its environment leaves behind does not delay the end of the process."""
    from palestra.runtime.local import serve

    try:
        return await serve(config, console.report, console.ready)
    finally:
        end_soon()
