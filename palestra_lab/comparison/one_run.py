"""One run of a comparison, in a process of its own: started, continued after a kill, and marked when it is finished."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from palestra.config import JobConfig
from palestra.disk import GO_ON, write_whole
from palestra.errors import ConfigError, PalestraError, RunInUse, StoreError
from palestra.learner.reporting import CHECKPOINTS
from palestra.runtime.arguments import Play
from palestra.runtime.training import train_until_stopped
from palestra.trainer.checkpoint import BEST, found
from palestra_lab.comparison.plan import Load, given_by

STARTED, FINISHED, FAILED = "started", "finished", "failed"  # states of a record
AGAIN = "mend that and give the same command again; finished runs stay"
# Keys of every record, and what their values are.
_RECORD = {"config": dict, "play": str | None, "arguments": dict, "state": str}
IN_USE_SECONDS = 180.0  # limit for the end of an earlier process of the run, which saves when its parent has died


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the record of a run atomically."""
    try:
        write_whole(path, (json.dumps(record, indent=1) + "\n").encode())
    except StoreError as error:
        raise ConfigError(f"{path} could not be written: {cause_of(error)}; {AGAIN}") from error


def cause_of(error: Exception) -> str:
    """Describe why a file could not be written."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return str(getattr(cause, "strerror", None) or cause or error).lower()


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record of a run; None: it was never started, or is finished with its folder removed."""
    folder = path.with_suffix("")
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {cause_of(error)}") from error
    except ValueError:  # of the JSON, or of its UTF-8
        found = None
    if not isinstance(found, dict) or not all(
        key in found and isinstance(found[key], kind) for key, kind in _RECORD.items()
    ):
        raise ConfigError(f"{path} is not the record of a run any more; remove it and {folder} to run it again")
    return None if found["state"] == FINISHED and not folder.is_dir() else found


def run_recorded(path: Path, load: Load) -> int:
    """Train the run of a record until its budget is used, update the record, and return the exit code.

    0: finished; 130: stopped and saved; 2: an error, which is in the record.
    """
    threading.Thread(target=_stop_with_parent, name="palestra-parent", daemon=True).start()
    record = read_record(path)
    assert record is not None, path
    try:
        state = _train(record, path.with_suffix(""), load)
    except PalestraError as error:
        reason = str(error).replace(GO_ON, "give the same command again")
        write_record(path, record | {"state": FAILED, "reason": reason})
        print(f"palestra: {error}", file=sys.stderr)  # noqa: T201 - the log of the run
        return 2
    if state != "completed":
        return 130
    write_record(path, record | {"state": FINISHED})  # before checkpoints go: an unfinished run resumes from them
    for folder in folders_with_checkpoints(path.with_suffix("") / CHECKPOINTS):
        _remove_checkpoints(folder, keep_newest=record["checkpoints"] == "newest")
    return 0


def _train(record: dict[str, Any], folder: Path, load: Load) -> str:
    """Start or continue the training of a run in its folder; return the state of the job."""
    config = JobConfig.model_validate(record["config"] | {"name": folder.parent.name, "run_dir": folder})
    given = {} if record["play"] is None else given_by(record["play"], record["arguments"], load)
    given.pop("config", None)
    play = Play(**{name: given.pop(name, None) for name in ("rollout", "environment", "reward")})
    tasks = given.pop("tasks", ())
    until = time.monotonic() + IN_USE_SECONDS
    while True:
        known = (folder / "run.db").exists()
        try:
            result, _ = train_until_stopped(play, tasks, config, resume=known, **given)
            return result.state
        except RunInUse:
            if time.monotonic() > until:
                raise
            time.sleep(1.0)


def folders_with_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of a run with checkpoints: its own, or one for each of several policies."""
    below = [path for path in folder.iterdir() if path.is_dir() and found(path)] if folder.is_dir() else []
    return [folder, *sorted(below)]


def _remove_checkpoints(folder: Path, keep_newest: bool) -> None:
    """Remove the checkpoints of a finished run, all of them or all but the newest."""
    for path in (folder / BEST, *found(folder)[: -1 if keep_newest else None]):
        shutil.rmtree(path, ignore_errors=True)


def _stop_with_parent() -> None:
    """Ask this process to save and end when the one that started it has closed the pipe, or is dead."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
