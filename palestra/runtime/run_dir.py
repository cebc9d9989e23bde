"""The folder of a run: its choice, its lock, and its removal if the start of the run fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from palestra.config import SAVED_CONFIG, JobConfig, load_config
from palestra.config.loading import read_toml
from palestra.disk import RUN_LOCK, is_locked, open_own, private_folder
from palestra.errors import ConfigError, NotFound, RunInUse, VersionQuarantined
from palestra.learner.reporting import CHECKPOINTS, checkpoints_of

ATTEMPTS = 100  # attempts to lock a folder, which failing starts of other processes may remove
MADE_BY_A_START = ("secret", "api_key", ".keys", "run.db", "run.db-wal", "run.db-shm", "loading_ms")


def resolve_run_dir(config: JobConfig, resume: bool, say: Callable[[str], None] = lambda text: None) -> JobConfig:
    """Return the configuration with the run's folder: the configured one, or a new `runs/<name>`, `runs/<name>-2`, …

    `resume` continues the run in the configured folder, or else the newest of the job's name. A job that only serves
    continues in the folder of an earlier one, under the same key, even without `resume`. `say`: called with a sentence
    if a folder other than `runs/<name>` is chosen.
    """
    serves = config.kind == "inference"  # an address and a key, with which clients go on after a restart
    if config.run_dir is None:
        number, folder, newest = 1, config.folder, None
        while (folder / "run.db").exists() and not (serves and _can_be_served_from(folder)):
            newest, number = folder, number + 1
            folder = config.folder.with_name(f"{config.name}-{number}")
        if newest is not None and not resume:
            say(
                f"{newest} has a run already; this is a new one, in {folder}; resume continues the newest, "
                f"{folder}, and the other one where run_dir is {str(newest)!r}"
            )
        config = config.model_copy(update={"run_dir": newest if resume and newest else folder})
    known = (config.folder / "run.db").exists()
    if known and not resume and not (serves and _has_served(config.folder)):
        raise ConfigError(
            f"{config.folder} has a run already; add --resume (in a script resume=True) to go on with it, or "
            "choose another run_dir (--set run_dir=…)"
        )
    if resume and not known:
        raise ConfigError(
            f"{config.folder} has no run to go on with; leave --resume out (in a script resume=True) to start one"
        )
    return config


def _has_served(folder: Path) -> bool:
    """Return whether the run in a folder only served a model."""
    return (folder / SAVED_CONFIG).is_file() and read_toml(folder / SAVED_CONFIG).get("kind") == "inference"


def _can_be_served_from(folder: Path) -> bool:
    return _has_served(folder) and not is_running(folder)


def weights_of_run(model: str) -> str:
    """Return a model's name or folder unchanged; for a run's folder, the checkpoint from `weights_of_policy`.

    `RUN/checkpoints/NAME` names one of several trained policies.

    Raises:
        NotFound: the run has no checkpoint.
        ConfigError: the run has trained a reward model, and its policy is as it was.
    """
    folder = Path(model)
    if (folder / "run.db").is_file():
        from palestra.trainer.checkpoint import FOLDER_OF_REWARDS

        weights, _ = weights_of_policy(folder, None)
        if (weights / FOLDER_OF_REWARDS).is_dir():
            raise ConfigError(
                f"the run in {folder} has trained a reward model, which says nothing itself: `palestra export` "
                "copies it for [judge], and the policy is still the model that the run began with"
            )
        return str(weights)
    run = folder.parent.parent
    if folder.parent.name == CHECKPOINTS and (run / "run.db").is_file():
        from palestra.trainer.checkpoint import found

        if found(folder):
            return str(weights_of_policy(run, folder.name)[0])
    return model


def weights_of_policy(
    run_dir: Path, policy: str | None, option: str | None = None, step: int | None = None, force: bool = False
) -> tuple[Path, int]:
    """Return the folder of a policy's trained weights, and their step: the best validated, or else the newest
    undamaged.

    Args:
        policy: None: the only trained policy.
        option: of the command, which names a policy, for the error message, if any.
        force: whether to take weights that an audit holds back.

    Raises:
        VersionQuarantined: an audit holds back what was asked for, or all that there is.
        NotFound: there are no such weights.
    """
    from palestra.trainer.checkpoint import best_weights, found, good, newest_good_before, step_of
    from palestra.trainer.quarantine import read_quarantine

    folder = checkpoints_of_run(run_dir, policy, option)
    held = None if force else read_quarantine(folder)
    if held is not None and step is not None and held.holds(step):
        raise VersionQuarantined(
            f"the weights of step {step} in {run_dir} are {held}; `palestra export --force` takes them"
        )
    best = best_weights(folder)
    if best is not None and step in (None, best[1]) and not (held and held.holds(best[1])):
        return best
    chosen = good(folder, step) if held is None or step is not None else newest_good_before(folder, held.since)
    if chosen is not None:
        return chosen[0], step_of(chosen[0])
    if held is not None and step is None:
        raise VersionQuarantined(f"all weights that {run_dir} has are {held}; `palestra export --force` takes them")
    steps = sorted({*map(step_of, found(folder)), *([] if best is None else [best[1]])})
    if not steps:
        raise NotFound(f"{run_dir} has no checkpoint yet; the first is written after checkpoint.every_steps steps")
    raise NotFound(f"{run_dir} has no weights of step {step}; it has those of {', '.join(map(str, steps))}")


def checkpoints_of_run(run_dir: Path, policy: str | None, option: str | None = None) -> Path:
    """Return the folder of a trained policy's checkpoints. `policy` = None: the only trained policy. `option`: the
    command's option that names a policy, for the error message, if it has one.
    """
    from palestra.trainer.checkpoint import found

    if policy is None and (found(run_dir / CHECKPOINTS) or not (run_dir / SAVED_CONFIG).exists()):
        return run_dir / CHECKPOINTS  # of several policies each would have a folder in it
    config = load_config(run_dir / SAVED_CONFIG)
    trained = config.trained_policies
    names = " and ".join(map(repr, trained))
    if policy is None and len(trained) > 1:
        raise ConfigError(
            f"the run in {run_dir} has trained {names}, and a checkpoint is that of one: its folder is "
            f"{run_dir / CHECKPOINTS / trained[0]}" + (f", or name it with {option} {trained[0]}" if option else "")
        )
    if policy is not None and policy not in trained:
        raise ConfigError(f"the run in {run_dir} has trained no policy {policy!r}; it has trained {names}")
    return checkpoints_of(run_dir, policy or trained[0], config)


class RunStart:
    """The start of a run in a folder, which can be undone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        missing = (parent for parent in (folder, *folder.parents) if not parent.exists())
        self._new_folders = list(missing)  # deepest first
        self._made: tuple[str, ...] = () if (folder / RUN_LOCK).exists() else (RUN_LOCK,)
        self._is_new = False
        self.succeeded = False

    def locked(self) -> None:
        """Record the files again, now that the folder is locked against other processes."""
        self._is_new = not (self._folder / "run.db").exists()
        # The lock is removed last: with a new lock, another process would start with the remains of this run.
        self._made = (*(name for name in MADE_BY_A_START if not (self._folder / name).exists()), *self._made)

    def undo(self) -> None:
        """Remove the created files and folders, if the start failed and there was no run before."""
        if self.succeeded or not self._is_new:
            return
        for name in self._made:
            (self._folder / name).unlink(missing_ok=True)
        for folder in self._new_folders:
            try:
                folder.rmdir()
            except OSError:  # another file is in it
                return


@contextlib.contextmanager
def starting_in(folder: Path) -> Iterator[RunStart]:
    """Lock the folder for this process while the block is open; undo the start unless `succeeded` is set. Raises
    RunInUse if another process runs the job in this folder.
    """
    start = RunStart(folder)
    lock, itself = _locked(folder)
    try:
        start.locked()
        yield start
    finally:
        start.undo()
        os.close(itself)
        lock.close()


def is_running(folder: Path) -> bool:
    """Return whether a process of this machine runs the job in this folder; False on systems other than Linux."""
    return is_locked(folder / RUN_LOCK)


def _folder_locked(folder: Path) -> int:
    """Return a descriptor of the folder, locked: who deletes the lock's file does not open the folder to others."""
    itself = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(itself, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(itself)
        raise
    except OSError:  # NFS has no locks of folders; the file is locked there
        pass
    return itself


def _locked(folder: Path) -> tuple[IO[bytes], int]:
    """Return the lock file of a run, and a descriptor of its folder, both locked by this process."""
    for _ in range(ATTEMPTS):
        try:
            private_folder(folder)  # a run contains prompts
            lock = os.fdopen(open_own(folder / RUN_LOCK, os.O_RDWR | os.O_CREAT), "rb")
        except FileNotFoundError:  # a failing start has just removed the folder, or the working directory is gone
            continue
        except OSError as error:
            raise ConfigError(f"{folder} can't be used as a run's folder: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            itself = _folder_locked(folder)
        except BlockingIOError as error:
            lock.close()
            raise RunInUse(f"another process is running the job in {folder}") from error
        except OSError as error:
            lock.close()
            raise ConfigError(f"{folder} can't be used as a run's folder: {error.strerror}") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), (folder / RUN_LOCK).stat()):
                return lock, itself
        os.close(itself)
        lock.close()  # a failing start has removed this file, and there may be a new one
    raise ConfigError(
        f"{folder} can't be used as a run's folder: it, or the folder that it is in, is deleted each time"
    )
