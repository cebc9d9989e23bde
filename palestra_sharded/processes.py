"""The processes of a trainer's ranks: started together, watched, and ended together; and the program of one.

python -m palestra_sharded.processes SOCKET, the number of an open socket, is a rank. It imports torch only
after its first sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Raw

from palestra.config import TrainerConfig
from palestra.errors import InvalidRequest, ServerFailed, TrainerLost
from palestra.models.device import available_cores, tune_malloc
from palestra.models.numerics import numerics
from palestra.models.weights import weight_folder
from palestra.owned_folder import OwnedFolder
from palestra.process.channel import Beat, BlockingChannel, Call, CallBroken, Channel, Remote, TakenBack
from palestra.process.child import HOSTED, ChildProcess, ProcessStarter, die_with_parent, start_process
from palestra.process.codec import decode
from palestra.process.stub import answer_of, method_of
from palestra.threads import in_thread
from palestra.waiting import cancelled, together

log = logging.getLogger("palestra.trainer")
CHECK_SECONDS = 0.5  # between two looks at how long a rank has been silent
BLAME_SECONDS = 1.0  # for a rank that has died to be seen, when another has lost the connection to it
GRACE_SECONDS = 10.0  # for the answers of the other ranks, when one has failed


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlaces:
    """Where the ranks of a trainer run.

    Attributes:
        start: starts the process of a rank.
        folder: shared by the machines of all ranks; None: all ranks are on this machine.
    """

    start: ProcessStarter = start_process
    folder: Path | None = None


class RankProcesses:
    """The processes of one trainer's ranks, which live and end together.

    Attributes:
        folder: files shared by ranks and job, in shared memory if all are on this machine; removed with the ranks.
        lost: why the ranks were ended; None: they are alive.
    """

    def __init__(
        self, config: TrainerConfig, deterministic: bool, places: RankPlaces, pictures: Path | None = None
    ) -> None:
        """Create the object; `start` starts the processes."""
        self._config, self._deterministic, self._places, self._pictures = config, deterministic, places, pictures
        self._owned = OwnedFolder("palestra-ranks-", places.folder or weight_folder())
        self.folder = self._owned.path
        self.lost: str | None = None
        self._gone = asyncio.Event()
        self._ranks: list[_RankProcess] = []
        self._watch: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes, in the order of the ranks."""
        return [rank.process.pid for rank in self._ranks]

    async def start(self) -> None:
        """Start the processes, and wait until they have connected to each other."""
        from palestra_sharded.rank import RankOrder  # loads torch, as parts of a job that trains do

        count, over_nodes = self._config.devices, self._places.folder is not None
        variables = {FOLDER: str(self.folder)} | ({} if over_nodes else {"GLOO_SOCKET_IFNAME": "lo"})
        found: dict[int, _RankProcess] = {}

        async def begin(number: int) -> None:
            process = await self._places.start(PROGRAM, variables)
            try:
                found[number] = _RankProcess(process, Remote(await Channel.over(process.connection), self._cause))
            except BaseException:
                process.kill()
                raise

        try:
            await together(*(begin(number) for number in range(count)))
        except ServerFailed as error:
            self._lose(str(error))
            raise self._error() from error
        finally:  # `close` ends those that were started, also where another failed
            self._ranks = [found[number] for number in sorted(found)]
        self._watch = asyncio.create_task(self._keep_watch())
        threads = self._config.threads or (None if over_nodes else max(available_cores() // count, 1))
        kernels = self._config.dtype == "bfloat16" and self._config.device != "cuda"
        computes = await in_thread(lambda: numerics(kernels)) if self._deterministic else {}
        orders = [
            RankOrder(
                number=number,
                meeting=None if over_nodes else self.folder / "meeting",
                config=self._config,
                threads=threads,
                deterministic=self._deterministic,
                pictures=self._pictures,
                numerics=computes,
            )
            for number in range(count)
        ]
        await self.call("begin", [(order,) for order in orders])
        try:
            async with asyncio.timeout(self._config.stuck_seconds):
                at = None
                if over_nodes:
                    first = self._ranks[0].process.address
                    at = first, (await self.call("listen", [(first,)]))[0]
                await self.call("join", [(at,)] * count)
        except TimeoutError:
            limit = self._config.stuck_seconds
            self._lose(
                f"the {count} ranks have not found one another within {limit:g} s (trainer.stuck_seconds)"
                + (f"; they are on {', '.join(rank.process.address for rank in self._ranks)}" if over_nodes else "")
            )
            raise self._error() from None

    async def gone(self) -> str:
        """Wait until the ranks are ended because one was lost, and return the reason."""
        await self._gone.wait()
        assert self.lost is not None
        return self.lost

    async def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of `Rank` on the first ranks, and return the results in order."""
        if self.lost is not None:
            raise self._error()
        from palestra_sharded.rank import Rank

        method = method_of(Rank, name)
        tasks = [
            asyncio.ensure_future(rank.ask(name, method.ordered(*own)))
            for rank, own in zip(self._ranks, arguments, strict=False)
        ]
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            answers = await self._answers(tasks, gone)
        finally:
            await cancelled(gone, *tasks)
        return [decode(method.returns, answer) for answer in answers]

    async def _answers(self, tasks: Sequence[asyncio.Task[Raw | Exception]], gone: asyncio.Task[Any]) -> list[Raw]:
        waiting, limit = set(tasks), None
        while waiting and not gone.done():
            done, _ = await asyncio.wait({gone, *waiting}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._lose("some of its ranks have failed at a request, and others not")
            for task in waiting & done:
                answer = task.result()
                waiting.discard(task)
                if isinstance(answer, CallBroken):
                    await self._blame(tasks.index(task), answer)
                elif isinstance(answer, Exception):
                    limit = GRACE_SECONDS
        if self.lost is not None or waiting:
            raise self._error()
        answers = [task.result() for task in tasks]
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        for error in sorted(errors, key=lambda one: isinstance(one, TakenBack)):
            raise error  # of a rank that has failed itself
        return [answer for answer in answers if isinstance(answer, Raw)]

    async def _cause(self, problem: InvalidRequest | None) -> Exception:
        """Return the error of calls to a rank that has closed its end, when the watch has seen it."""
        if problem is not None:
            self._lose(f"a rank has sent what is no message: {problem}")
        await self._gone.wait()
        return self._error()

    async def _blame(self, number: int, broken: CallBroken) -> None:
        """End all ranks because one has failed; the reason is another one that has died, if there is one."""
        with contextlib.suppress(TimeoutError):  # a rank fails as soon as it has lost the connection to another
            async with asyncio.timeout(BLAME_SECONDS):
                await self._gone.wait()
        if self.lost is None and any(rank.remote.closed.done() for rank in self._ranks):
            with contextlib.suppress(TimeoutError):  # the watch asks how that one has ended, perhaps on another machine
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._gone.wait()
        if self.lost is None:
            log.error("rank %d of the trainer failed:\n%s", number, broken.trace)
            first = (str(broken.error).splitlines() or [""])[0]
            self._lose(f"rank {number} failed: {type(broken.error).__name__}: {first}")

    async def _keep_watch(self) -> None:
        """End all ranks when one has died, or has been silent for too long."""
        limit, before = self._config.stuck_seconds, time.monotonic()
        while self.lost is None:
            await asyncio.wait(
                [rank.remote.closed for rank in self._ranks], timeout=CHECK_SECONDS, return_when="FIRST_COMPLETED"
            )
            now = time.monotonic()
            for number, rank in enumerate(self._ranks):
                if now - before > limit / 2:  # this process was stopped, and has not read what was sent meanwhile
                    rank.remote.heard = now
                if rank.remote.closed.done():
                    self._lose(f"rank {number} {await rank.process.how_lost(GRACE_SECONDS)}")
                elif now - rank.remote.heard > limit:
                    silent = now - rank.remote.heard
                    self._lose(f"rank {number} has been silent for {silent:.0f} s (trainer.stuck_seconds)")
            before = now

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            self._gone.set()
            self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()  # also one that is stopped

    def _error(self) -> TrainerLost:
        return TrainerLost(f"the trainer has ended: {self.lost}")

    async def close(self) -> None:
        """End the ranks, and remove their folder."""
        if self._watch is not None:
            await cancelled(self._watch)
        self._kill()
        for rank in self._ranks:
            await rank.process.how_ended()
            await rank.remote.close()
        await in_thread(self._owned.remove)


@dataclass(frozen=True, slots=True)
class _RankProcess:
    """One process, and the calls of the job to it."""

    process: ChildProcess
    remote: Remote

    async def ask(self, name: str, arguments: tuple[Any, ...]) -> Raw | Exception:
        """Return the answer to a call, or its error."""
        try:
            return await self.remote.call(name, *arguments)
        except Exception as error:  # noqa: BLE001 - it counts together with the answers of the other ranks
            return error


# The program of a rank

BEAT_SECONDS = 1.0
PROGRAM = "palestra_sharded.processes"
FOLDER = "PALESTRA_RANK_FOLDER"  # of the trainer, in shared memory: removed by a rank whose job has died
_PROCESS = "process-"  # in the folder: begins the name of an empty file of each rank, which its process id ends


def _read(channel: BlockingChannel, calls: queue.SimpleQueue[Call], folder: Path) -> None:
    """Put calls into the queue; end the process when the job closes the connection."""
    for message in channel.messages():
        if isinstance(message, Call):
            calls.put(message)
    others = [] if HOSTED in os.environ else _ranks_here(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for process in others:  # one that is stopped does not see that the job is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(1)  # the other threads may be computing, or waiting for ranks that have ended


def _beat(channel: BlockingChannel) -> None:
    """Say that the process lives; not after it was stopped, or while the system swaps."""
    with contextlib.suppress(OSError):
        while True:
            channel.send(Beat())
            time.sleep(BEAT_SECONDS)


def _ranks_here(folder: Path) -> list[int]:
    """Return the pids of the trainer's other ranks, which write them into the folder; reused pids are left out."""
    found = []
    for file in folder.glob(f"{_PROCESS}*"):
        process = int(file.name.removeprefix(_PROCESS))
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if process != os.getpid() and PROGRAM.encode() in command:
                found.append(process)
    return found


def _main() -> None:
    """Answer calls until the job closes the connection."""
    if HOSTED in os.environ:  # else a rank outlives a job that was killed, to remove its folder
        die_with_parent()
    # Ctrl-C reaches all processes of a terminal, and SIGTERM those of a group; the job saves before it ends.
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    folder = Path(os.environ[FOLDER])
    with contextlib.suppress(FileNotFoundError):  # the job is gone already, which the socket says, too
        (folder / f"{_PROCESS}{os.getpid()}").touch()
    channel, calls = BlockingChannel(socket.socket(fileno=int(sys.argv[1]))), queue.SimpleQueue[Call]()
    threading.Thread(target=_beat, args=(channel,), name="palestra-rank-beat", daemon=True).start()
    threading.Thread(target=_read, args=(channel, calls, folder), name="palestra-rank-read", daemon=True).start()
    tune_malloc()
    from palestra_sharded.rank import Rank  # torch comes after the first sign of life

    rank = Rank()
    while True:
        channel.send(answer_of(rank, calls.get()))


if __name__ == "__main__":
    _main()
