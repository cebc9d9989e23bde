"""`palestra export`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from palestra.cli.options import command, run_folder
from palestra.errors import Conflict, NotFound

LEFT_OUT = ("optimizer-*.safetensors", "checkpoint.json")


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "export",
        run,
        "copy a run's newest good checkpoint to a folder that transformers loads",
        "  palestra export runs/addition my-model",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("target", metavar="DIR", type=Path, help="a folder that does not exist yet")


def run(arguments: argparse.Namespace) -> None:
    """Check the hashes, then copy."""
    from palestra.trainer.checkpoint import newest_good

    folder, _ = run_folder(arguments.run_dir)
    newest = newest_good(folder / "checkpoints")
    if newest is None:
        raise NotFound(f"{folder} has no checkpoint yet; the first is written after checkpoint.every_steps steps")
    if arguments.target.exists():
        raise Conflict(f"{arguments.target} exists already; choose another folder")
    path, state = newest
    shutil.copytree(path, arguments.target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    print(f"{arguments.target}: the model after step {state['step']}")
