"""Trackers that other libraries bring: TensorBoard, W&B, MLflow, trackio, OpenTelemetry; and `palestra track`.

The command hands the metrics of a run that is over, or of a running one so far, to a tracker.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import add_command, run_folder
from palestra.terminal import say


def add_track(commands: Any) -> None:
    """Add the command `track`, which takes the folder of a run and the name of a tracker."""
    parser = add_command(
        commands,
        "track",
        _run,
        "hand the metrics of a run to TensorBoard, W&B, MLflow or trackio",
        "  palestra track runs/addition tensorboard\n"
        "  palestra track runs/addition mlflow      # by MLFLOW_TRACKING_URI, else into the run's folder\n\n"
        "A job does it while it runs where its configuration says so: tracking = ['tensorboard'].",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("tracker", metavar="TRACKER", help="tensorboard, wandb, mlflow, trackio, or that of a plug-in")


def _run(arguments: argparse.Namespace) -> None:
    """Create the tracker's record of the run, and send all existing rows."""
    from palestra.tracking.process import alone, follow_run, tracked_run
    from palestra.tracking.registry import check_trackers, create_tracker

    folder, _ = run_folder(arguments.run_dir)
    check_trackers([arguments.tracker])
    with alone(folder, arguments.tracker):
        of = tracked_run(folder, arguments.tracker)
        rows = follow_run(folder, create_tracker(arguments.tracker, of), lambda: False)
    say(f"{rows} rows of {folder} for {arguments.tracker}; files are in {of.folder}")
