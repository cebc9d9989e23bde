"""Servers in processes that another component starts and watches, such as Ray actors; `ModelServer` runs a job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from palestra.config import JobConfig, parse_config
from palestra.errors import PalestraError, ServerFailed
from palestra.models.catalog import exact_model
from palestra.runtime.console import console_of
from palestra.runtime.job_thread import JobThread
from palestra.runtime.local_job import LocalJob
from palestra.runtime.terms import HERE, JobPlaces, JobTerms
from palestra.threads import in_thread
from palestra_service.jobs.budgets import ALLOWANCE_FILE, AllowanceFile
from palestra_service.jobs.launcher import ENDED_FILE, LOG_FILE, Ended, Ending, ending_of, write_ended
from palestra_service.step_estimates import say_estimate


class ServedProcess:
    """A server in `folder`: its log is in `folder/log.txt`, and how it ended in `folder/ended.json`."""

    def __init__(self) -> None:
        self._folder = Path()
        self._log: IO[str] | None = None
        self._url: str | None = None

    @contextlib.contextmanager
    def _starting(self, folder: Path) -> Iterator[IO[str]]:
        """Start in a folder inside the block; log why that fails. Raises ServerFailed if a retry may help."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder, self._log = folder, (folder / LOG_FILE).open("a", buffering=1, encoding="utf-8")
            (folder / ENDED_FILE).unlink(missing_ok=True)
            logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=self._log, force=True)
            yield self._log
        except Exception as error:
            known = isinstance(error, PalestraError)
            said = str(error) if known else f"{type(error).__name__}: {error}"
            self._say(f"failed: {said}\n" if known else traceback.format_exc())
            if ending_of(error) is Ending.LOST:
                raise ServerFailed(said) from error
            if known:
                raise
            raise PalestraError(said) from error

    async def address(self) -> str | None:
        """Return the URL of the data plane, or the address for jobs; None: the server does not listen yet."""
        return self._url

    async def answer(self) -> None:
        """Return when the event loop responds."""

    def _ended(self, ending: Ending, reason: str = "") -> Ended:
        ended = Ended(ending=ending, reason=reason)
        with contextlib.suppress(OSError):  # a full disk, perhaps; the scheduler gets the return value
            write_ended(self._folder, ended)
            self._say(f"{ending.value}{': ' if reason else ''}{reason}\n")
        return ended

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text)


class ModelServer(ServedProcess):
    """Runs a job, whose run is in `folder/run`."""

    def __init__(self, places: JobPlaces = HERE) -> None:
        super().__init__()
        self._places = places
        self._thread: JobThread | None = None
        self._job: LocalJob | None = None
        self._trains = True

    async def start(
        self, config: dict[str, Any], folder: str, host: str, weights: Mapping[str, str] | None = None
    ) -> str:
        """Start the job, or resume the run in its folder; return the URL when the data plane listens. `weights`: by
        policy an absolute folder, or a name of the hub, instead of its `model`; None: none.
        """
        os.environ.pop("PALESTRA_API_KEY", None)  # that would be the operator's; every job has a key of its own
        where = Path(folder)
        with self._starting(where) as log:
            given = {"run_dir": str(where / "run"), "server.host": host, "server.port": 0}
            return await self._start(parse_config(config, given), where, log, weights or {})

    async def _start(self, job_config: JobConfig, where: Path, log: IO[str], weights: Mapping[str, str]) -> str:
        self._trains = job_config.kind == "training"
        with console_of(job_config, log) as console:
            if job_config.engine.has_model:
                # Those of references too: a name of the operator's list is a folder only in `weights`.
                named = {**job_config.named_models, **weights}
                if not self._trains:
                    named = {name: named[name] for name in job_config.policies}
                weights = await in_thread(lambda: {name: str(exact_model(model)) for name, model in named.items()})
            # The service has looked at the configuration; a tenant's key must not lift what it has allowed.
            most = job_config.engine.worker_count
            shared = where / ALLOWANCE_FILE  # of its tenant's budget, if that has one
            allowed = AllowanceFile(shared) if shared.exists() else None
            terms = JobTerms(weights=weights, places=self._places, most_replicas=most, allowed=allowed)
            self._thread = JobThread(job_config, console, terms=terms)
            self._job = job = await self._thread.start()
        if self._trains:
            self._estimating = asyncio.create_task(say_estimate(job))  # kept, so that it is not collected
        self._url = job.url
        return self._url

    async def ended(self) -> Ended:
        """Wait until the job has ended, and return how."""
        assert self._thread is not None, "start it first"
        await self._thread.ended.wait()
        try:
            result = await asyncio.to_thread(self._thread.result)
        except PalestraError as error:
            return self._ended(ending_of(error), str(error))
        except Exception as error:  # noqa: BLE001 - becomes the job's reason, and is logged
            self._say(traceback.format_exc())
            return self._ended(ending_of(error), f"{type(error).__name__}: {error}")
        spent = self._why_spent()
        # A served model only ends when it is stopped, or its budget is spent.
        done = result.state == "completed" and (self._trains or spent)
        return self._ended(Ending.COMPLETED if done else Ending.STOPPED, spent)

    def _why_spent(self) -> str:
        """Return that the job has ended by a budget; empty: it has not."""
        job = self._job
        if job is None or job.opened.metering is None or not job.opened.metering.ledger.over:
            return ""
        ledger = job.opened.metering.ledger
        whose = f"the budget of {ledger.allowance.of}" if ledger.shared_over else "its budget"
        if not self._trains:
            return f"{whose} is spent; with a larger one, submit it again"
        return f"{whose} is spent, after step {job.progress.step}; with a larger one, submit it again with --from-job"

    async def stop(self) -> None:
        """Ask the job to save and end; return when its event loop has received that."""
        if self._thread is not None:
            self._thread.stop()
            await self._thread.answer()

    async def answer(self) -> None:
        """Return when the job's event loop responds, unless it is blocked."""
        if self._thread is not None:
            await self._thread.answer()

    async def ping(self) -> float | None:
        """Return the job's estimate of its remaining seconds, or None."""
        return None if self._thread is None else self._thread.seconds_left
