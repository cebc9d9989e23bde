"""Checkpoints: a folder that is whole or not there, with a hash of every file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from palestra.errors import CheckpointError
from palestra.faults import fault_point

log = logging.getLogger("palestra.checkpoint")
INDEX = "checkpoint.json"
NOT_THE_MODEL = ("optimizer-*.safetensors", INDEX)  # files that only a trainer reads
_BLOCK = 1 << 22


def write(folder: Path, step: int, fill: Callable[[Path], object], state: Mapping[str, Any], keep: int) -> Path:
    """Write `folder/step-NNNNNN`: fill a temporary folder, hash and fsync its files, rename it, drop the oldest.

    Raises:
        CheckpointError: the disk is full, or can't be written to; what was there before is untouched.
    """
    final = folder / f"step-{step:06d}"
    temporary = folder / f".writing-{step:06d}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _filled(temporary, fill)
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        index = {
            "step": step,
            "state": dict(state),
            "files": {str(p.relative_to(temporary)): _digest(p) for p in files},
        }
        (temporary / INDEX).write_text(json.dumps(index | {"digest": _fingerprint(index)}, indent=1))
        _sync(temporary / INDEX)
        _sync(temporary)
        if final.exists():  # a damaged one of the same step, or one of a lineage that did not survive
            shutil.rmtree(final)
        fault_point("before_checkpoint_rename")
        temporary.rename(final)
        _sync(folder)
        fault_point("after_checkpoint_rename")
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {step} could not be written to {folder}: {error}") from error
    for old in found(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _filled(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a folder; an error of the disk is an OSError also where safetensors, which is no Python, met it."""
    try:
        fill(folder)
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


def newest_good(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint whose files all have their hashes, and its state; None where there is none at all.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    there = found(folder)
    for path in reversed(there):
        problem = _problem(path)
        if problem is None:
            state: dict[str, Any] = json.loads((path / INDEX).read_text())["state"]
            return path, state
        log.warning("%s is damaged (%s); trying the one before", path, problem)
    if there:
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged; move the folder away to train again from the recorded episodes"
        )
    return None


def newest_path(folder: Path) -> Path | None:
    """Return the newest checkpoint whose files all have their hashes; None: there is none, or all are damaged."""
    try:
        newest = newest_good(folder)
    except CheckpointError as error:
        log.error("%s", error)
        return None
    return None if newest is None else newest[0]


def newest_name(names: Iterable[str]) -> str | None:
    """Return the name of the newest checkpoint among the names of a folder's entries; None: there is none."""
    return max((name for name in names if name[:5] == "step-" and name[5:].isdecimal()), key=_number, default=None)


def found(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted((p for p in folder.glob("step-*") if p.name[5:].isdecimal()), key=step_of)


def step_of(path: Path) -> int:
    """The step of a finished checkpoint."""
    return _number(path.name)


def _number(name: str) -> int:
    return int(name[5:])


def link_model(folder: Path, step: int, target: Path) -> None:
    """Make the folder `target` of the model in a checkpoint, whole or not at all.

    Its files are hard links where that is possible, else copies; they stay when the checkpoint is dropped.

    Raises:
        CheckpointError: the checkpoint is not there any more, or damaged, or can't be copied.
    """
    temporary = target.with_name(f".{target.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(folder / f"step-{step:06d}", temporary, copy_function=_link)
        if (problem := _problem(temporary)) is not None:
            raise CheckpointError(f"the checkpoint of step {step} is damaged, or gone ({problem}); start from another")
        for pattern in NOT_THE_MODEL:
            for path in temporary.glob(pattern):
                path.unlink()
        temporary.rename(target)
    except FileNotFoundError as error:
        raise CheckpointError(f"the checkpoint of step {step} is gone; start from a newer one") from error
    except OSError as error:
        raise CheckpointError(f"the checkpoint of step {step} can't be copied to {target.parent}: {error}") from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)


def _problem(path: Path) -> str | None:
    try:
        index = json.loads((path / INDEX).read_text())
        if index.pop("digest") != _fingerprint(index):
            return f"{INDEX} has another hash"
        for name, digest in index["files"].items():
            if _digest(path / name, sync=False) != digest:
                return f"{name} has another hash"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _fingerprint(index: Mapping[str, Any]) -> str:
    """SHA-256 of the index, without this."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _digest(path: Path, sync: bool = True) -> str:
    """SHA-256 of a file, which is on disk afterwards."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
