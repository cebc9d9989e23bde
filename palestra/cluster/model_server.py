"""One job in a process that somebody else starts and watches. It knows nothing of who that is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import traceback
from pathlib import Path
from typing import IO, Any

from palestra.cluster.job_thread import JobThread
from palestra.cluster.serving_console import console_of
from palestra.config import parse_config
from palestra.errors import PalestraError, ServerFailed
from palestra.models.catalog import exact_model
from palestra.scheduler.launcher import ENDED_FILE, LOG_FILE, Ended, Ending, ending_of, write_ended
from palestra.threads import in_thread


class ModelServer:
    """Runs a job in `folder`: its run in `folder/run`, what it says in `folder/log.txt`."""

    def __init__(self) -> None:
        self._thread: JobThread | None = None
        self._trains = True
        self._url: str | None = None
        self._folder = Path()
        self._log: IO[str] | None = None

    async def start(self, config: dict[str, Any], folder: str, host: str, weights: str | None = None) -> str:
        """Start the job, or go on with the run that is there; returns its URL when it listens.

        Args:
            config: a JobConfig.
            folder: of the job.
            host: what its data plane listens on.
            weights: an absolute folder, or a name of the hub; None: what the configuration's model names.

        Raises:
            PalestraError: it can't be started.
        """
        os.environ.pop("PALESTRA_API_KEY", None)  # the operator's, if there is one; every job has a key of its own
        try:
            return await self._start(config, Path(folder), host, weights)
        except Exception as error:
            known = isinstance(error, PalestraError)
            said = str(error) if known else f"{type(error).__name__}: {error}"
            self._say(f"failed: {said}\n" if known else traceback.format_exc())
            if ending_of(error) is Ending.LOST:
                raise ServerFailed(said) from error
            if known:
                raise
            raise PalestraError(said) from error

    async def _start(self, config: dict[str, Any], where: Path, host: str, weights: str | None) -> str:
        self._folder, self._log = where, _opened(where)
        (where / ENDED_FILE).unlink(missing_ok=True)
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=self._log, force=True)
        job_config = parse_config(config, {"run_dir": str(where / "run"), "server.host": host, "server.port": 0})
        self._trains = job_config.kind == "training"
        with console_of(job_config, self._log) as console:
            if job_config.engine.kind != "fake":
                weights = str(await in_thread(lambda: exact_model(weights or job_config.policy.model)))
            self._thread = JobThread(job_config, console, weights=weights)
            job = await self._thread.start()
        self._url = job.url
        return self._url

    async def address(self) -> str | None:
        """Where it listens; None: it does not yet."""
        return self._url

    async def ended(self) -> Ended:
        """Wait until the job has ended, and say how."""
        assert self._thread is not None, "start it first"
        await self._thread.ended.wait()
        try:
            result = await asyncio.to_thread(self._thread.result)
        except PalestraError as error:
            return self._ended(ending_of(error), str(error))
        except Exception as error:  # noqa: BLE001 - told to whoever submitted the job, with the log
            self._say(traceback.format_exc())
            return self._ended(ending_of(error), f"{type(error).__name__}: {error}")
        done = self._trains and result.state == "completed"  # what is served goes on until it is stopped
        return self._ended(Ending.COMPLETED if done else Ending.STOPPED, "")

    async def stop(self) -> None:
        """Ask the job to save and end; returns when its event loop has heard it."""
        if self._thread is not None:
            self._thread.stop()
            await self._thread.answer()

    async def answer(self) -> None:
        """Return when the job's event loop does something, which one that is blocked does not."""
        if self._thread is not None:
            await self._thread.answer()

    async def ping(self) -> float | None:
        """Return the job's own estimate of the seconds that it has left; None: there is none."""
        return None if self._thread is None else self._thread.seconds_left

    def _ended(self, ending: Ending, reason: str) -> Ended:
        ended = Ended(ending=ending, reason=reason)
        with contextlib.suppress(OSError):  # a full disk, perhaps; a scheduler that listens is told all the same
            write_ended(self._folder, ended)
            self._say(f"{ending.value}{': ' if reason else ''}{reason}\n")
        return ended

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text)


def _opened(folder: Path) -> IO[str]:
    """The job's log, a line at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / LOG_FILE).open("a", buffering=1, encoding="utf-8")
