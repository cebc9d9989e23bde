"""`palestra export`: the trained model as a folder of its own, which transformers loads."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from palestra.cli.options import add_control, command, run_folder
from palestra.errors import Conflict, NotFound
from palestra.terminal import say

JOB_ID = re.compile(r"job-[0-9a-f]{16}")


def add(commands: Any) -> None:
    """Add the command `export`, which takes a run or a job, and a folder to write."""
    parser = command(
        commands,
        "export",
        run,
        "copy a run's newest good checkpoint to a folder that transformers loads",
        "  palestra export runs/addition my-model\n  palestra export job-1f3a5c7e9b2d4f60 my-model",
    )
    parser.add_argument("source", metavar="RUN", help="the run's folder, or a job of a control plane by its id")
    parser.add_argument("target", metavar="DIR", type=Path, help="a folder that does not exist yet")
    add_control(parser)


def run(arguments: argparse.Namespace) -> None:
    """Copy the newest checkpoint whose files have their hashes; that of a job is fetched from the service first."""
    if JOB_ID.fullmatch(arguments.source) is None:
        _copy(Path(arguments.source), arguments.target)
        return
    from palestra.client.control import ControlClient
    from palestra.trainer.checkpoint import newest_name

    arguments.target.parent.mkdir(parents=True, exist_ok=True)
    with ControlClient(arguments.control) as control, TemporaryDirectory(dir=arguments.target.parent) as folder:
        job = control.job(arguments.source)
        places = {artifact.path: artifact.place_in(Path(folder)) for artifact in job.artifacts()}
        newest = newest_name(path.split("/")[1] for path in places if path.startswith("checkpoints/"))
        for path, place in places.items():
            if path == "config.toml" or path.startswith(f"checkpoints/{newest}/"):
                job.download(path, place)
        (Path(folder) / "run.db").touch()  # `run_folder` knows the folder of a run by this file
        _copy(Path(folder), arguments.target)


def _copy(run_dir: Path, target: Path) -> None:
    """Copy the newest good checkpoint without the files that only a trainer reads.

    Raises:
        NotFound: the run has no checkpoint yet.
        Conflict: the target exists.
    """
    from palestra.trainer.checkpoint import NOT_THE_MODEL, newest_good

    folder, _ = run_folder(run_dir)
    newest = newest_good(folder / "checkpoints")
    if newest is None:
        raise NotFound(f"{folder} has no checkpoint yet; the first is written after checkpoint.every_steps steps")
    if target.exists():
        raise Conflict(f"{target} exists already; choose another folder")
    path, state = newest
    shutil.copytree(path, target, ignore=shutil.ignore_patterns(*NOT_THE_MODEL))
    say(f"{target}: the model after step {state['step']}")
