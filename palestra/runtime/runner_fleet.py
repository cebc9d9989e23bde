"""A job's runners, which play its environment or harness in their own processes: how they are kept alive, and their
program.

`python -m palestra.runtime.runner_fleet SOCKET` is a runner; PALESTRA_RUNNER has what `play_episodes` takes, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from palestra.agents import named_agents
from palestra.client import AsyncClient, Worker
from palestra.client.fleet import Crashes
from palestra.client.harness import harness_rollout
from palestra.config import HarnessConfig
from palestra.envs.catalog import catalog_maker
from palestra.errors import ConfigError, PalestraError, ServerFailed
from palestra.process.child import ProcessStarter, start_process, with_owner
from palestra.rollout import EnvironmentPlayer, RolloutSpec
from palestra.rollout.result import Lost
from palestra.waiting import LoggedOnce, cancelled

if TYPE_CHECKING:  # runners import this module, and have no server
    from palestra.server import DataPlane


SWEEP_SECONDS = 0.5
_NAME = re.compile(r"runner-\d+-[0-9a-f]{6}")
log = logging.getLogger("palestra.runtime")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOrder:
    """What a runner needs to know about its job.

    Attributes:
        url: of the job's data plane.
        key: returns the job's present key.
        concurrency: concurrent episodes of one runner.
        harness: what it plays; None: the environment that the job names.
    """

    url: str
    key: Callable[[], str]
    concurrency: int
    harness: HarnessConfig | None = None


class RunnerDied(Exception):
    """A runner ended before the job was over; the message says how."""


RunnerStarter = Callable[[RunnerOrder, str], Awaitable[None]]
"""(order, worker id) -> runs a runner that claims under this name, and returns when the job is over. Raises RunnerDied.
If it is cancelled, nothing of the runner is left."""


class RunnerFleet:
    """Replaces dead runners, with a growing delay, and retries their episodes immediately.

    Each process claims under its own name, so that a claim processed after its runner's death is not mistaken for one
    of its successor. As a context manager it runs the runners, and ends remaining ones at the end of the block.
    """

    def __init__(self, count: int, order: RunnerOrder, start: RunnerStarter, plane: DataPlane) -> None:
        self._count, self._order, self._start = count, order, start
        self._plane = plane
        self._living: set[str] = set()  # names of the processes that run now
        self._keeping: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[PalestraError] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        # An earlier process of this job, and its runners with it, may have been killed.
        await self._give_back_orphans("cancelled: the job was started again")
        self._keeping = [asyncio.create_task(self._keep(number)) for number in range(self._count)]
        self._keeping.append(asyncio.create_task(self._sweep()))
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await cancelled(*self._keeping)
        finally:
            await self._give_back_orphans("cancelled: the job was stopped")

    async def run(self) -> None:
        """Play, until a runner cannot be kept alive."""
        raise await asyncio.shield(self._failure)

    async def _keep(self, number: int) -> None:
        """Run a runner and its replacements until the job is over."""
        crashes = Crashes()
        while (died := await self._run(number)) is not None:
            try:
                pause = crashes.pause_after(f"runner {number}", died)
            except PalestraError as error:
                if not self._failure.done():
                    self._failure.set_result(error)
                return
            log.warning("runner %d %s; started again", number, died)
            await asyncio.sleep(pause)

    async def _run(self, number: int) -> str | None:
        """Run one process until it ends. Return how it died, or None if the job is over."""
        name = f"runner-{number}-{secrets.token_hex(3)}"
        self._living.add(name)
        self._plane.progress.runners += 1
        try:
            await self._start(self._order, name)
        except RunnerDied as error:
            try:
                await self._give_back({name}, f"its runner {error}", counts=True)
                await self._plane.store.log.add_event("runner_died", {"runner": number, "reason": str(error)})
            except PalestraError as unwritten:  # a full disk, perhaps: `_sweep` gives them back later
                log.error("that runner %d %s can't be recorded now: %s", number, error, unwritten)
            return str(error)
        finally:
            self._living.remove(name)
            self._plane.progress.runners -= 1
        return None

    async def _sweep(self) -> None:
        """Release episodes that a claim gives to a process after its death."""
        trouble = LoggedOnce(log, "episodes of runners that died can't be given back now")
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with trouble.attempt():
                await self._give_back_orphans("cancelled: its runner had died before it got the episode")

    async def _give_back_orphans(self, reason: str) -> None:
        """Release the episodes of dead runners; see `_give_back`. Attempts are not counted."""
        runners = {name for name in self._plane.store.leases.workers if _NAME.fullmatch(name)}
        await self._give_back(runners - self._living, reason, counts=False)

    async def _give_back(self, names: Collection[str], reason: str, counts: bool) -> None:
        """Give back the episodes that runners held when they ended, before their leases run out."""
        episodes = self._plane.store.episodes
        for name in names:
            for episode in await episodes.claimed_by(name):
                with contextlib.suppress(*Lost):  # its lease ran out at this moment
                    await episodes.abort(episode.episode_id, episode.fence, reason, discard=False, counts=counts)
            self._plane.workers.forget(name)


# A runner


async def play_episodes(
    url: str, key: str, worker_id: str, concurrency: int, harness: HarnessConfig | None = None
) -> None:
    """Play episodes until the job is over; arguments as in `RunnerOrder`. Raises ConfigError: nothing can be played."""
    async with AsyncClient(url, key, worker_id=worker_id) as client:
        if harness is not None:
            await Worker(client, harness_rollout(harness), concurrency).run()
            return
        facts = await client.facts()
        if facts.environment is None:
            raise ConfigError("the job names no environment (environment.name)")
        spec = RolloutSpec(
            environment=catalog_maker(facts.environment, facts.settings, facts.system),
            agents=named_agents(facts.agent, facts.agent_settings),
        )
        await Worker(client, EnvironmentPlayer(client, spec, facts), concurrency).run()


ORDER = "PALESTRA_RUNNER"  # the variable with a runner's order
PROGRAM = "palestra.runtime.runner_fleet"
start_here: ProcessStarter = partial(start_process, prints=True, computes=False)


async def run_runner(start: ProcessStarter, order: RunnerOrder, worker_id: str) -> None:
    """Run a runner as a process, until the job is over. See `RunnerStarter`."""
    harness = None if order.harness is None else order.harness.model_dump(mode="json")
    given = {"url": order.url, "key": order.key(), "worker_id": worker_id, "concurrency": order.concurrency}
    try:
        process = await start(PROGRAM, {ORDER: json.dumps(given | {"harness": harness})})
    except ServerFailed as error:
        raise RunnerDied(f"did not start: {error}") from error
    try:
        code = await process.code()
    finally:
        process.kill()
        process.connection.close()
        how = await process.how_ended()
    if code != 0:
        raise RunnerDied(how)


def _main() -> int:
    """Play until the job is over; return the exit code."""
    from palestra.terminal import say

    # Ctrl-C reaches all processes of a terminal; the job decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with_owner(lambda: os._exit(1))
    order = json.loads(os.environ.pop(ORDER))
    harness = order.pop("harness")
    try:
        asyncio.run(play_episodes(**order, harness=harness and HarnessConfig.model_validate(harness)))
    except PalestraError as error:
        say(f"{order['worker_id']}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
