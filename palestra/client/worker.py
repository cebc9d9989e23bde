"""Workers: one plays many episodes side by side, and a fleet keeps several worker processes of a machine running."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from palestra.client.arguments import checked_count
from palestra.client.async_client import AsyncClient
from palestra.client.episode import Episode, ModelEndpoint, RolloutResult, renewed
from palestra.client.protocol import is_scored
from palestra.errors import Conflict, InvalidRequest, WorkerCrashLoop, place_of
from palestra.threads import is_async

log = logging.getLogger("palestra.worker")
Outcome = float | Mapping[str, float] | RolloutResult | None
Rollout = Callable[[dict[str, Any], ModelEndpoint], Outcome | Awaitable[Outcome]]
FAILURES_IN_A_ROW = 20


CRASHES, CRASHES_SECONDS = 5, 60.0  # a process that crashes so often in so many seconds is given up
POLL_SECONDS = 0.05
REFUSED = 2  # exit code of a child that has said why it can't work; starting it again would not help


class Worker:
    """Claims up to `concurrency` episodes at a time and plays each with `rollout(task, policy)`.

    `rollout` is a function (run in threads) or a coroutine function; it returns a reward, rewards by agent, or a
    `RolloutResult`. An exception, or a value that is not a reward, gives the episode back and is never a reward. After
    FAILURES_IN_A_ROW failures without a success between them, the last error is raised. None in place of a reward
    leaves the episode out of training, and it is not played again.
    """

    def __init__(self, client: AsyncClient, rollout: Rollout, concurrency: int) -> None:
        """Make a worker; `run` starts it.

        Args:
            client: of the job.
            rollout: see above.
            concurrency: episodes that are played at the same time, at least 1.

        Raises:
            ConfigError: `concurrency` is no whole number, or below 1.
        """
        self._client, self._rollout = client, rollout
        self._concurrency = concurrency = checked_count("concurrency", concurrency)
        self._is_async = is_async(rollout)
        self._threads = None if self._is_async else ThreadPoolExecutor(concurrency, "palestra-rollout")
        self._in_a_row = 0
        self._draining = False
        self._claiming: set[asyncio.Future[Episode | None]] = set()
        self.counts: Counter[str] = Counter()

    def drain(self) -> None:
        """Claim no further episodes; `run` returns when the open ones have ended."""
        self._draining = True
        for claiming in self._claiming:
            claiming.cancel()

    async def run(self) -> None:
        """Play episodes until the job is over, or `drain` is called.

        Raises:
            PalestraError: the server refuses the worker, or can't be reached for long.
            Exception: the last error of the rollout function, after FAILURES_IN_A_ROW failures in a row.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._loop())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)

    async def _loop(self) -> None:
        while not self._draining and (episode := await self._claim()) is not None:
            await self._play(episode)

    async def _claim(self) -> Episode | None:
        """Return the next episode, or None when the job is over or the worker drains."""
        claiming = asyncio.ensure_future(self._client.begin_episode())
        self._claiming.add(claiming)
        try:
            await asyncio.wait((claiming,))
            return None if claiming.cancelled() else claiming.result()
        finally:
            self._claiming.discard(claiming)
            claiming.cancel()

    async def _play(self, episode: Episode) -> None:
        try:
            async with renewed(self._client.heartbeat, episode):
                result = await self._call(episode)
                result = result if isinstance(result, RolloutResult) else RolloutResult(reward=result)
                named = result.named_rewards
                if not (is_scored(result.reward) if named is None else set(named.values()) - {None}):
                    await self._client.abort_episode(episode, "not_scored: the rollout returned None", discard=True)
                    self.counts["not_scored"] += 1
                    return
                await self._client.end_episode(
                    episode,
                    result.reward,
                    step_rewards=result.step_rewards,
                    metadata=result.metadata,
                    named_rewards=named,
                )
        except Conflict as error:  # the lease was lost; another worker plays the episode now
            self.counts["lost"] += 1
            log.warning("%s", error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.counts["failed"] += 1
            self._in_a_row += 1
            where = f"episode {episode.episode_id} (task {episode.task_id})"
            log.warning("%s failed: %s: %s%s", where, type(error).__name__, error, place_of(error))
            await self._give_back(episode, error)
            if self._in_a_row >= FAILURES_IN_A_ROW:
                if isinstance(error, InvalidRequest):
                    raise InvalidRequest(f"{where}: {error}", error.field) from error
                raise
        else:
            self.counts["played"] += 1
            self._in_a_row = 0

    async def _call(self, episode: Episode) -> Any:
        if self._threads is None:
            return await self._rollout(episode.task, episode.policy)  # type: ignore[misc]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._rollout, episode.task, episode.policy)

    async def _give_back(self, episode: Episode, error: Exception) -> None:
        reason = "".join(traceback.format_exception_only(error)).strip() + place_of(error)
        try:
            await self._client.abort_episode(episode, reason)
        except Conflict:  # the lease was lost; the episode needs no giving back
            self.counts["lost"] += 1


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(slots=True)
class _Child:
    number: int
    process: subprocess.Popen[bytes]
    crashes: deque[float] = field(default_factory=deque)  # monotonic


class Fleet:
    """Keeps `processes` child processes running until each has ended well."""

    def __init__(self, command: Sequence[str], processes: int, drain_seconds: float) -> None:
        """Create a fleet; `run` starts the processes.

        Args:
            command: command line of a child, which exits with 0 when the job is over.
            processes: number of children.
            drain_seconds: how long children may take to finish after `drain`, before they are killed.
        """
        self._command, self._processes, self._drain_seconds = list(command), processes, drain_seconds
        self._kill_at: float | None = None  # monotonic; None: not draining

    def drain(self) -> None:
        """Let the children finish their episodes and claim no more. A second call kills them."""
        self._kill_at = time.monotonic() + (0.0 if self._kill_at is not None else self._drain_seconds)

    def run(self) -> int:
        """Start the children and wait until all have ended.

        Returns:
            The exit code: 0 when the job is over or the drain is done, 1 if children had to be killed, 2 if one
            refused.

        Raises:
            WorkerCrashLoop: a child crashed again and again.
        """
        children = [self._start(number) for number in range(self._processes)]
        terminated = False  # whether the children were asked to end
        try:
            while children:
                if self._kill_at is not None and not terminated:
                    terminated = True
                    for child in children:
                        child.process.send_signal(signal.SIGTERM)
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    return 1
                for child in [child for child in children if child.process.poll() is not None]:
                    code = child.process.returncode
                    if code in (0, REFUSED) or self._kill_at is not None:
                        children.remove(child)
                        if code == REFUSED:
                            return REFUSED
                    else:
                        self._again(child, code)
                time.sleep(POLL_SECONDS)
        finally:
            for child in children:
                child.process.kill()
                child.process.wait()
        return 0

    def _start(self, number: int) -> _Child:
        return _Child(number, subprocess.Popen(self._command))

    def _again(self, child: _Child, code: int) -> None:
        now = time.monotonic()
        child.crashes.append(now)
        while now - child.crashes[0] > CRASHES_SECONDS:
            child.crashes.popleft()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if len(child.crashes) >= CRASHES:
            raise WorkerCrashLoop(
                f"worker process {child.number} {how}, one of {CRASHES} crashes within {CRASHES_SECONDS:g} s; "
                "its output says why"
            )
        sys.stderr.write(f"worker process {child.number} {how}; started again\n")
        child.process = subprocess.Popen(self._command)
