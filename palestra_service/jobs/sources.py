"""Data that a job takes from another job of its tenant, checkpoints and episodes; it gets its own copy."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa

from palestra.config import SAVED_CONFIG, dump_config, load_config, not_frozen
from palestra.disk import sync, sync_tree, write_whole, writing
from palestra.errors import NotFound, VersionQuarantined
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.store.browsing import browse
from palestra.store.run_store import store_error
from palestra.store.tables import episodes
from palestra.trainer import checkpoint
from palestra.trainer.quarantine import read_quarantine
from palestra.types.states import EpisodeState
from palestra_control.jobs import JobRecord

STORE = "run.db"  # in the folder of a run


def completed_until(run_dir: Path, moment: float) -> int:
    """Return the number of training episodes completed until a moment; 0 without a run. `moment`: Unix seconds."""
    if not (run_dir / STORE).is_file():
        return 0
    ended = sa.select(sa.func.count()).where(
        episodes.c.kind == "train", episodes.c.state == EpisodeState.COMPLETED, episodes.c.ended_at <= moment
    )
    with browse(run_dir / STORE) as connection:
        return int(connection.execute(ended).scalar_one())


def copy_completed(run_dir: Path, folder: Path, moment: float) -> None:
    """Write the training episodes completed until a moment (Unix seconds) in place of `folder`, atomically."""
    temporary = folder.with_name(f".{folder.name}")
    with writing(folder):
        for left in (temporary, folder):  # of a copy that was broken off
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        source = sqlite3.connect((run_dir / STORE).absolute().as_uri() + "?mode=ro", uri=True, timeout=10)
        copy = sqlite3.connect(temporary / STORE)
        try:
            source.backup(copy)  # one state of the store, although its job may write meanwhile
            copy.execute("PRAGMA journal_mode=DELETE")  # so that the copy is one file
            copy.execute(
                "DELETE FROM episodes WHERE NOT (kind = 'train' AND state = ? AND ended_at <= ?)",
                (EpisodeState.COMPLETED.value, moment),
            )
            copy.execute("DELETE FROM chats WHERE episode_id NOT IN (SELECT episode_id FROM episodes)")
            copy.commit()
            copy.execute("VACUUM")
            _copy_pictures(copy, Blobs(run_dir / FOLDER), Blobs(temporary / FOLDER))
        finally:
            source.close()
            copy.close()
    except sqlite3.Error as error:
        raise store_error(run_dir / STORE, error) from error
    with writing(folder):
        sync_tree(temporary)
        temporary.rename(folder)
        sync(folder.parent)


def _copy_pictures(copy: sqlite3.Connection, source: Blobs, target: Blobs) -> None:
    for (media,) in copy.execute("SELECT DISTINCT media FROM chats WHERE media IS NOT NULL"):
        for *_, digest in orjson.loads(media):
            if digest not in target:
                target.put(source.get(digest))


CHECKPOINTS = "checkpoints"  # in a job's run
JOB_ID = re.compile(r"job-[0-9a-f]{16}")


def checkpoint_folders(run: Path, policies: Collection[str]) -> dict[str, Path]:
    """Return the checkpoint folder in a run of each policy that starts from it; several policies have separate ones."""
    together = run / CHECKPOINTS
    apart = any((together / name).is_dir() for name in policies)
    return {name: together / name if apart else together for name in policies}


def step_meant(run: Path, job_id: str, wanted: int | None, policies: Collection[str]) -> int:
    """Return the step of another job's checkpoint that no audit holds back.

    Args:
        wanted: None: the newest that all of the policies have.
    """
    folders = set(checkpoint_folders(run, policies).values())
    steps = sorted(set.intersection(*({checkpoint.step_of(path) for path in checkpoint.not_held(f)} for f in folders)))
    for held in filter(None, map(read_quarantine, folders)):
        if not steps or (wanted is not None and held.holds(wanted)):
            raise VersionQuarantined(f"the weights of job {job_id} are {held}; start from an earlier step")
    if not steps:
        raise NotFound(f"job {job_id} has no checkpoint to start from; it writes one every checkpoint.every_steps")
    if wanted is None:
        return steps[-1]
    if wanted not in steps:
        there = ", ".join(map(str, steps))
        raise NotFound(f"job {job_id} has no checkpoint of step {wanted}; it has those of {there}")
    return wanted


def with_own_weights(job: JobRecord, folder: Path, source_run: Path) -> dict[str, Any]:
    """Return the configuration of a job with `from_job`, whose models are folders of the job's own.

    The first start fills them with hard links to the checkpoint, so that the job is independent of the other job.
    """
    assert job.from_step is not None
    policies = dict(job.config["policies"])
    names = not_frozen(policies)
    for name, checkpoints in checkpoint_folders(source_run, names).items():
        own = folder / "-".join((f"{job.from_job}-step-{job.from_step}", *([name] if len(names) > 1 else [])))
        if not own.exists():
            checkpoint.link_model(checkpoints, job.from_step, own)
        policies[name] = {**policies[name], "model": str(own)}
    return {**job.config, "policies": policies}


def recorded_job(config: Mapping[str, Any]) -> str | None:
    """Return the job whose episodes are learned from (`algorithm.from_run`), or None."""
    found = (config.get("algorithm") or {}).get("from_run")
    return None if found is None else str(found)


def check_recorded(run: Path, job_id: str, moment: float) -> None:
    """Raise NotFound for a run without a training episode completed until a moment, in Unix seconds."""
    if not completed_until(run, moment):
        raise NotFound(f"job {job_id} has no completed training episode to learn from yet")


def with_own_episodes(
    job: JobRecord, config: dict[str, Any], folder: Path, source_run: Path, models: Mapping[str, str]
) -> dict[str, Any]:
    """Return the configuration of a job with `algorithm.from_run`, which names a folder of the job's own.

    The first start copies the episodes that were completed when the job was submitted.
    """
    own = folder / f"{recorded_job(config)}-episodes"
    if not (own / SAVED_CONFIG).exists():
        saved = load_config(source_run / SAVED_CONFIG)
        # A name of the operator's list means nothing to the job's own process, which compares tokenizers.
        policies = {
            name: policy.model_copy(update={"model": models.get(policy.model, policy.model)})
            for name, policy in saved.policies.items()
        }
        copy_completed(source_run, own, job.created_at)
        write_whole(own / SAVED_CONFIG, dump_config(saved.model_copy(update={"policies": policies})).encode())
    return {**config, "algorithm": config["algorithm"] | {"from_run": str(own)}}
