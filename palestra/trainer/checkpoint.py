"""Checkpoints: folders `step-NNNNNN` that are whole or absent, with a SHA-256 of every file."""

from __future__ import annotations

import contextlib
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

from palestra.disk import make_folders, put_back, rename_whole, sync, sync_tree, write_whole
from palestra.errors import CheckpointError, VersionQuarantined
from palestra.faults import fault_point
from palestra.trainer.quarantine import read_quarantine

log = logging.getLogger("palestra.checkpoint")
INDEX = "checkpoint.json"
BEST = "best"  # folder of the weights that validated best, beside the checkpoints
FOLDER_OF_REWARDS = "reward_model"  # of a checkpoint: the reward model, as transformers loads it
NOT_THE_MODEL = (
    "optimizer-*.safetensors",
    "optimizer-shards",
    "critic-*.safetensors",
    FOLDER_OF_REWARDS,
    INDEX,
)  # files and folders of a checkpoint that only a trainer reads
OF_OPTIMIZER = re.compile(r"(critic-)?optimizer-")  # beginning of the names of files, relative to the checkpoint
_BLOCK = 1 << 22


def write(folder: Path, step: int, fill: Callable[[Path], object], state: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint `folder/step-NNNNNN`, and delete the oldest ones.

    Files are written to a temporary folder, hashed and synced; then the folder is renamed. A crash leaves a whole
    checkpoint or no checkpoint.
    """
    final = folder / f"step-{step:06d}"
    _write_whole(final, folder / f".writing-{step:06d}", step, fill, state, "checkpoint_rename")
    keep_newest(folder, keep)
    return final


def keep_newest(folder: Path, keep: int) -> None:
    """Remove all finished checkpoints in a folder but the newest, and the newest that no audit holds back."""
    kept = {*found(folder)[-keep:], *not_held(folder)[-1:]}
    for path in found(folder):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def write_weights_folder(folder: Path, step: int, fill: Callable[[Path], object], state: Mapping[str, Any]) -> None:
    """Write one folder of weights atomically, replacing a folder of this name."""
    _write_whole(folder, folder.with_name(f".writing-{folder.name}"), step, fill, state, "pool_rename")


def read_weights(folder: Path) -> dict[str, Any] | None:
    """Return the state stored by `write_weights_folder`; None: the folder is missing or damaged."""
    put_back(folder)
    if (problem := _problem(folder)) is not None:
        if folder.exists():
            log.warning("%s is damaged (%s)", folder, problem)
        return None
    state: dict[str, Any] = json.loads((folder / INDEX).read_bytes())["state"]
    return state


def best_weights(folder: Path) -> tuple[Path, int] | None:
    """Return the folder of the weights that validated best, and their step; None: no such weights."""
    path = folder / BEST
    if read_weights(path) is None:
        return None
    return path, int(json.loads((path / INDEX).read_bytes())["step"])


def without_optimizer(path: Path) -> None:
    """Remove the optimizer's state from a checkpoint atomically."""
    index = json.loads((path / INDEX).read_bytes())
    del index["digest"]
    index["files"] = {name: digest for name, digest in index["files"].items() if not OF_OPTIMIZER.match(name)}
    write_whole(path / INDEX, json.dumps(index | {"digest": _fingerprint(index)}, indent=1).encode())
    for entry in [entry for entry in path.iterdir() if OF_OPTIMIZER.match(entry.name)]:
        with contextlib.suppress(OSError):  # the index does not name it any more
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _write_whole(
    final: Path, temporary: Path, step: int, fill: Callable[[Path], object], state: Mapping[str, Any], point: str
) -> None:
    """Fill the folder `temporary`, hash and sync its files, and rename it to `final`."""
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        make_folders(final.parent)
        temporary.mkdir()
        _filled(temporary, fill)
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        index = {
            "step": step,
            "state": dict(state),
            "files": {str(p.relative_to(temporary)): _digest(p) for p in files},
        }
        (temporary / INDEX).write_text(json.dumps(index | {"digest": _fingerprint(index)}, indent=1), encoding="utf-8")
        sync_tree(temporary)
        fault_point(f"before_{point}")
        # The rename makes the checkpoint exist. There may be one of the same step: damaged, of a run that was resumed
        # from an earlier step, or the only good one.
        rename_whole(temporary, final)
        fault_point(f"after_{point}")
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {step} could not be written to {final.parent}: {error}") from error


def _filled(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a folder; turn disk errors that safetensors (written in Rust) reports into OSError."""
    try:
        fill(folder)
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


def newest_good(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and state of the newest undamaged checkpoint; None: no checkpoint.

    Every file must have the recorded hash. Damaged checkpoints are skipped with a warning in the log.
    """
    there = found(folder)
    for path in reversed(there):
        problem = _problem(path)
        if problem is None:
            state: dict[str, Any] = json.loads((path / INDEX).read_bytes())["state"]
            return path, state
        log.warning("%s is damaged (%s); trying the one before", path, problem)
    if there:
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged; move the folder away to train again from the recorded episodes"
        )
    return None


def newest_good_before(folder: Path, step: int) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and state of the newest undamaged checkpoint of an earlier step; None: no checkpoint."""
    for path in reversed(found(folder)):
        if step_of(path) < step and _problem(path) is None:
            state: dict[str, Any] = json.loads((path / INDEX).read_bytes())["state"]
            return path, state
    return None


def good(folder: Path, step: int | None) -> tuple[Path, dict[str, Any]] | None:
    """Return folder and state of an undamaged checkpoint, without a step the newest one; None: no checkpoint."""
    for replaced in folder.glob(".replaced-step-*"):
        put_back(folder / replaced.name.removeprefix(".replaced-"))
    if step is None:
        return newest_good(folder)
    path = folder / f"step-{step:06d}"
    if not path.is_dir():
        return None
    if (problem := _problem(path)) is not None:
        raise CheckpointError(f"{path} is damaged ({problem})")
    state: dict[str, Any] = json.loads((path / INDEX).read_bytes())["state"]
    return path, state


def common_steps(folders: Iterable[Path]) -> list[int]:
    """Return the steps that have a finished checkpoint in every folder, newest first.

    Files are not checked. A job writes the checkpoints of its policies one after another, so folders may differ.
    """
    by_folder = {folder: {step_of(path) for path in found(folder)} for folder in folders}
    common = set.intersection(*by_folder.values())
    # A process that dies while the first checkpoints are written leaves one in some folders, and none in others.
    several = [str(folder) for folder, steps in by_folder.items() if len(steps) > 1]
    if several and not common:
        known = "; ".join(
            f"{folder}: {', '.join(map(str, sorted(steps))) or 'none'}" for folder, steps in by_folder.items()
        )
        raise CheckpointError(f"there is no step of which all policies have a checkpoint ({known})")
    return sorted(common, reverse=True)


def remove_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps. Step 0 removes all."""
    for path in found(folder):
        if step_of(path) > step:
            shutil.rmtree(path, ignore_errors=True)


def newest_path(folder: Path) -> Path | None:
    """Return the folder of the newest undamaged checkpoint; None: there is none, or all are damaged."""
    try:
        newest = newest_good(folder)
    except CheckpointError as error:
        log.error("%s", error)
        return None
    return None if newest is None else newest[0]


def newest_name(names: Iterable[str]) -> str | None:
    """Return the name of the newest checkpoint among the names of a folder's entries, or None."""
    return max((name for name in names if name[:5] == "step-" and name[5:].isdecimal()), key=_number, default=None)


def found(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a folder, oldest first. Their files are not checked."""
    return sorted((p for p in folder.glob("step-*") if p.name[5:].isdecimal()), key=step_of)


def not_held(folder: Path) -> list[Path]:
    """Return the finished checkpoints that no audit holds back, oldest first."""
    held = read_quarantine(folder)
    return [path for path in found(folder) if held is None or not held.holds(step_of(path))]


def step_of(path: Path) -> int:
    """Return the step of a finished checkpoint, read from the name of its folder."""
    return _number(path.name)


def _number(name: str) -> int:
    """Return the number in a name such as `step-000120`."""
    return int(name[5:])


def link_model(folder: Path, step: int, target: Path) -> None:
    """Copy the model of a checkpoint to the folder `target`, atomically.

    Files are hard links where the file system allows it: they take no space and survive the deletion of the checkpoint.

    Raises:
        CheckpointError: it is damaged, or gone, or can't be copied.
        VersionQuarantined: an audit holds it back.
    """
    if (held := read_quarantine(folder)) is not None and held.holds(step):
        raise VersionQuarantined(f"the checkpoint of step {step} is {held}; start from an earlier one")
    temporary = target.with_name(f".{target.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(folder / f"step-{step:06d}", temporary, copy_function=_link)
        if (problem := _problem(temporary)) is not None:
            raise CheckpointError(f"the checkpoint of step {step} is damaged, or gone ({problem}); start from another")
        for pattern in NOT_THE_MODEL:
            for path in temporary.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        sync_tree(temporary)
        temporary.rename(target)
        sync(target.parent)
    except FileNotFoundError as error:
        raise CheckpointError(f"the checkpoint of step {step} is gone; start from a newer one") from error
    except OSError as error:
        raise CheckpointError(f"the checkpoint of step {step} can't be copied to {target.parent}: {error}") from error


def _link(source: str, target: str) -> None:
    """Make a hard link to a file, or a copy if the target is on another disk or its file system has no links."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)


def _problem(path: Path) -> str | None:
    """Return why a checkpoint is damaged: an unreadable index, or a file with another hash. None: it is whole."""
    try:
        index = json.loads((path / INDEX).read_bytes())
        if index.pop("digest") != _fingerprint(index):
            return f"{INDEX} has another hash"
        for name, digest in index["files"].items():
            if _digest(path / name) != digest:
                return f"{name} has another hash"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _fingerprint(index: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the index, computed before the digest itself is added to it."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
