"""The grid of a comparison in a service: every run is a job, which is followed to its end and downloaded."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError, InvalidRequest, NotFound, TooManyRequests
from palestra.trainer.checkpoint import newest_name
from palestra_control.control import ControlClient
from palestra_control.job import OVER, Job
from palestra_control.wire import ResourcesBody
from palestra_lab.comparison.execution import GridStopped, StopSignals
from palestra_lab.comparison.one_run import FAILED, FINISHED, STARTED, read_record, write_record
from palestra_lab.comparison.plan import PlannedRun
from palestra_lab.comparison.progress import reached

POLL_SECONDS = 2.0


class SubmittedGrid:
    """Submits the unfinished runs of a plan to a control plane, and follows their jobs."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        control: ControlClient,
        resources: ResourcesBody,
        checkpoints: str,
        say: Callable[[str], None],
        finished: Callable[[], None],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Prepare the grid; `run` executes it. `checkpoints` of a finished run to download: `newest` or `none`."""
        self._runs, self._control, self._resources, self._checkpoints = runs, control, resources, checkpoints
        self._say, self._finished, self._poll_seconds = say, finished, poll_seconds
        self._seen: dict[Path, str] = {}  # what was said last of a run, by its record

    def run(self) -> int:
        """Execute all unfinished runs, including failed ones, and return how many failed. Raises GridStopped after a
        signal; the jobs continue, and a later call follows them.
        """
        failed, following = 0, [run for run in self._runs if _state(run) != FINISHED]
        for run in following:
            if _state(run) == FAILED:
                run.record.unlink()
        with StopSignals() as signals:
            while following:
                for run in tuple(following):
                    if signals.received:
                        raise GridStopped
                    if (state := self._look(run)) is not None:
                        failed += state == FAILED
                        following.remove(run)
                        self._finished()
                if following:
                    signals.wait(self._poll_seconds)
        return failed

    def _look(self, run: PlannedRun) -> str | None:
        """Submit a run, or check its job; return its final state, or None."""
        record = read_record(run.record)
        if record is None:
            # The record is written before the job exists, with the request's own name: sent again after a kill, the
            # same request returns the same job.
            origin = {"control": self._control.url, "request": uuid.uuid4().hex, "job_id": None}
            record = run.settings | {"checkpoints": self._checkpoints, "state": STARTED} | origin
            run.record.parent.mkdir(parents=True, exist_ok=True)
            write_record(run.record, record)
        if record["job_id"] is None:
            try:
                job = self._submit(run, record["request"])
            except TooManyRequests as error:  # such as more open jobs than the user may have: later
                self._show(run, f"waits to be submitted: {error}")
                return None
            except (InvalidRequest, ConfigError) as error:
                return self._end(run, record, str(error))
            record["job_id"] = job.job_id
            write_record(run.record, record)
        job = self._control.job(record["job_id"])
        try:
            view = job.view()
        except NotFound as error:
            return self._end(run, record, str(error))
        self._show(run, f"{job.job_id} is {view.state}")
        if view.state not in OVER:
            return None
        if view.state != "completed":
            return self._end(run, record, f"job {job.job_id} is {view.state}: {view.reason}")
        self._fetch(run, job)
        return self._end(run, record, None)

    def _submit(self, run: PlannedRun, request: str) -> Job:
        given = run.config.model_dump(mode="json", exclude_none=True, exclude_unset=True, exclude={"tasks", "run_dir"})
        held = self._resources
        return self._control.submit(
            given,
            name=run.config.name,
            request_id=request,
            cpus=held.cpus,
            gpus=held.gpus,
            memory_gib=held.memory_gib,
        )

    def _fetch(self, run: PlannedRun, job: Job) -> None:
        """Download the files of a run into its folder, all of them or none."""
        artifacts = job.artifacts()
        kept = newest_below([artifact.path for artifact in artifacts]) if self._checkpoints == "newest" else ()
        part = run.folder.with_name(f".{run.folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for artifact in artifacts:
            if not artifact.path.startswith("checkpoints/") or artifact.path.startswith(kept):
                job.download(artifact.path, artifact.place_in(part))
        shutil.rmtree(run.folder, ignore_errors=True)
        part.rename(run.folder)

    def _end(self, run: PlannedRun, record: dict[str, Any], reason: str | None) -> str:
        """Mark a run as finished, or as failed for a reason, and return the state."""
        state = FINISHED if reason is None else FAILED
        write_record(run.record, record | {"state": state} | ({} if reason is None else {"reason": reason}))
        self._show(run, reached(run.folder) if reason is None else f"failed: {reason}")
        return state

    def _show(self, run: PlannedRun, text: str) -> None:
        if self._seen.get(run.record) != text:
            self._seen[run.record] = text
            self._say(f"{run.label}: {text}")


def newest_below(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of a job's newest checkpoints, with a trailing slash: one, or one for each policy."""
    steps: dict[str, set[str]] = {}
    for path in paths:
        found = re.match(r"(checkpoints/(?:[^/]+/)?)(step-\d+)/", path)
        if found is not None:
            steps.setdefault(found[1], set()).add(found[2])
    return tuple(f"{folder}{newest_name(names)}/" for folder, names in steps.items())


def check_submittable(runs: Sequence[PlannedRun], url: str) -> None:
    """Raise ConfigError for runs that a service cannot run, or that were begun elsewhere."""
    for run in runs:
        if (why := _not_for_a_service(run)) is not None:
            raise ConfigError(f"scenario {run.scenario} can't run in a service: {why}; leave it out with --only")
        record = read_record(run.record)
        if record is None or record["state"] == FINISHED:
            continue
        if "request" not in record and (run.folder.exists() or record["state"] == STARTED):
            raise ConfigError(
                f"{run.label} was begun on this machine: finish it without --control, or remove {run.folder} and "
                f"{run.record.name}"
            )
        if record["state"] == STARTED and record["control"] != url:
            raise ConfigError(f"{run.label} was submitted to {record['control']}: follow it with --control of that URL")


def check_not_submitted(runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError for a run that a service is running already, according to its record."""
    for run in runs:
        record = read_record(run.record) or {}
        if record.get("state") == STARTED and "request" in record:
            job = record["job_id"] or "a job"
            raise ConfigError(
                f"{run.label} is {job} of {record['control']}: follow it with --control of that URL, or cancel it and "
                f"remove {run.record}"
            )


def _not_for_a_service(run: PlannedRun) -> str | None:
    """Return why a run cannot be a job of a service; None: it can."""
    if run.play is not None:
        return f"{run.play} is a function of this machine, and a service runs no code of its users"
    if run.config.environment.name is None:
        return "its job names no environment that the service could play"
    if run.config.tasks.train is not None or run.config.tasks.validation is not None:
        return "its tasks are files of this machine, and those of a comparison are the environment's"
    return None


def _state(run: PlannedRun) -> str | None:
    return (read_record(run.record) or {}).get("state")
