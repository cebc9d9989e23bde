"""Rounds: servers that take the same weights at the same time receive them by one broadcast, whole."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from palestra.errors import EngineFailure, EngineServerError, PalestraError
from palestra.models.weights import WeightSource
from palestra.terminal import one_line_of
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion
from palestra_engines.external.served_policy import ExternalPolicy, NewWeights
from palestra_engines.vllm.api import VllmApi
from palestra_engines.vllm.rendezvous import Rendezvous
from palestra_engines.vllm.worker.palestra_weight_group import BUCKET_BYTES, WeightGroup, WeightLayout

log = logging.getLogger("palestra.engine")
MOST_TRIES = 2  # with one server alone, which answers
Problems = dict["Receiver", PalestraError]


@dataclass(frozen=True, eq=False, slots=True)
class Receiver:
    """A server that receives weights.

    Attributes:
        moved: called with the bytes of each bucket sent to the server.
    """

    api: VllmApi
    moved: Callable[[int], None]


@dataclass(eq=False, slots=True)
class _Round:
    """Servers that wait for the same weights.

    Attributes:
        source: kept, so that no other source gets its id.
        news: set when a server has joined, or is no longer expected.
        over: set when every server has an outcome, or the round was cancelled.
        outcomes: by server: None, or why it did not get the weights.
    """

    source: WeightSource
    joined: list[Receiver] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    outcomes: dict[Receiver, PalestraError | None] = field(default_factory=dict)


class WeightRounds:
    """Sends weights to the servers of one engine, or of all workers of a pool.

    A round has the servers that take weights from the same source at the same time: all of a pool, or one that arrives
    later. The call of the first server leads it. The servers of a round and this process are a group, which is reused
    for the next round of the same servers. If a server is lost in the middle, the others get all weights again, over a
    group without it; if all report a failure, each gets them over its own group.

    Attributes:
        rendezvous: where the servers meet this process; its timeout applies to every wait here.
    """

    def __init__(self, rendezvous: Rendezvous, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.rendezvous, self._bucket_bytes = rendezvous, bucket_bytes
        self._expected: dict[int, set[Receiver]] = {}  # by the id of the source
        self._open: dict[int, _Round] = {}  # rounds that have not begun, by the id of the source
        self._groups: dict[frozenset[Receiver], WeightGroup] = {}

    @contextlib.contextmanager
    def expecting(self, receiver: Receiver, source: WeightSource) -> Iterator[None]:
        """Let the round of a source wait for a server, while the block is open and the server lacks the weights."""
        key = id(source)
        expected = self._expected.setdefault(key, set())
        expected.add(receiver)
        try:
            yield
        finally:
            expected.discard(receiver)
            if not expected and self._expected.get(key) is expected:
                del self._expected[key]
            if (waits := self._open.get(key)) is not None:
                waits.news.set()

    async def receive(
        self, receiver: Receiver, source: WeightSource, named: Sequence[tuple[str, Tensor]], dtype: torch.dtype
    ) -> None:
        """Wait until a paused server has received all weights. `named` are all of them, [n, d] or [d]."""
        while True:
            joined = self._open.get(id(source))
            if joined is None:
                joined = self._open[id(source)] = _Round(source)
                joined.joined.append(receiver)
                try:
                    await self._lead(joined, named, dtype)
                finally:
                    joined.over.set()
            else:
                joined.joined.append(receiver)
                joined.news.set()
                await joined.over.wait()
            if receiver in joined.outcomes:  # otherwise the call that led was cancelled
                if (problem := joined.outcomes[receiver]) is not None:
                    raise problem
                return

    def forget(self, receiver: Receiver) -> None:
        """Leave the groups of a server."""
        self._leave([receiver])

    async def _lead(self, led: _Round, named: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Wait for the servers that are expected, and send the weights until each has got them or is given up."""
        key, limit = id(led.source), self.rendezvous.seconds
        try:
            with contextlib.suppress(TimeoutError):  # those that are late get a round of their own
                async with asyncio.timeout(limit):
                    while self._expected.get(key, set()).difference(led.joined):
                        led.news.clear()
                        await led.news.wait()
        finally:
            del self._open[key]
        self._expected.get(key, set()).difference_update(led.joined)
        layout = WeightLayout(
            names=[name for name, _ in named],
            shapes=[list(weight.shape) for _, weight in named],
            dtype=str(dtype).removeprefix("torch."),
            bucket_bytes=self._bucket_bytes,
        )
        batches, alone = [list(led.joined)], Counter[Receiver]()
        while batches:
            batch = batches.pop()
            alone.update(batch if len(batch) == 1 else ())
            problems = await self._send(batch, named, layout)
            led.outcomes |= {one: problems.get(one) for one in batch}
            for problem in problems.values():
                log.warning("a server did not get new weights: %s", problem)
            answer = {one for one, problem in problems.items() if isinstance(problem, EngineServerError)}
            again = [one for one in batch if one in answer and alone[one] < MOST_TRIES]
            # A server that is lost was the reason for the others' errors; otherwise it shows which one is at fault.
            batches += [again] if again and len(answer) < len(problems) else [[one] for one in again]

    async def _send(
        self, receivers: Sequence[Receiver], named: Sequence[tuple[str, Tensor]], layout: WeightLayout
    ) -> Problems:
        """Send the weights once; return why servers did not get them. After an EngineServerError a retry may do."""
        is_whole = False
        try:
            group = self._groups.get(frozenset(receivers))
            if group is None:
                group, problems = await self._meet(receivers)
                if group is None:
                    return problems
            is_whole, problems = await self._broadcast(group, receivers, named, layout)
            return problems
        finally:
            if not is_whole:
                self._leave(receivers)

    async def _meet(self, receivers: Sequence[Receiver]) -> tuple[WeightGroup | None, Problems]:
        """Return a group of this process and all servers' workers; None: a server did not join, and why."""
        self._leave(receivers)
        name, sizes = self.rendezvous.new_name(), [one.api.ranks for one in receivers]
        *firsts, size = itertools.accumulate(sizes, initial=1)
        meeting = asyncio.ensure_future(in_thread(lambda: self.rendezvous.meet(name, size), "palestra-weights"))
        joins = [asyncio.ensure_future(one.api.join(name, at, size)) for one, at in zip(receivers, firsts, strict=True)]
        try:
            await asyncio.wait(joins)
            problems = _problems(receivers, joins)
            if not problems:
                self._groups[frozenset(receivers)] = found = await meeting
                return found, problems
            why = "another server did not come"
        except RuntimeError as error:
            problems, why = {}, one_line_of(error)
        finally:
            await _end(meeting, *joins)  # the thread of a meeting that fails ends at its time limit
        left = f"was not sent weights, because the servers have not met: {why}"
        return None, {one: EngineServerError(f"{one.api.address} {left}") for one in receivers} | problems

    async def _broadcast(
        self,
        group: WeightGroup,
        receivers: Sequence[Receiver],
        named: Sequence[tuple[str, Tensor]],
        layout: WeightLayout,
    ) -> tuple[bool, Problems]:
        """Send the weights over a group; return whether it can be reused, and which servers did not get all."""
        loop, limit, moved = asyncio.get_running_loop(), 2 * self.rendezvous.seconds, [0]

        def sent(size: int) -> None:
            moved[0] += size
            for one in receivers:
                loop.call_soon_threadsafe(one.moved, size)

        sending = asyncio.ensure_future(in_thread(lambda: group.send(named, layout, sent), "palestra-weights"))
        answers = [asyncio.ensure_future(one.api.receive(layout)) for one in receivers]
        try:
            before = -1
            while not sending.done() and before != moved[0]:
                before = moved[0]
                await asyncio.wait([sending], timeout=limit)
            error = sending.exception() if sending.done() else TimeoutError("it stands still, and is left behind")
            if not isinstance(error, RuntimeError | TimeoutError | None):
                raise error
            if error is not None:
                log.warning("a broadcast of weights has failed: %s", one_line_of(error))
                self._leave(receivers)  # so that no server waits for the rest of it
            await asyncio.wait(answers, timeout=limit)
            problems = _problems(receivers, answers)
            return error is None and not problems, problems
        finally:
            await _end(sending, *answers)

    def _leave(self, receivers: Sequence[Receiver]) -> None:
        for members in [one for one in self._groups if one.intersection(receivers)]:
            group = self._groups.pop(members)
            # It waits for a broadcast that runs, which may take until its time limit.
            threading.Thread(target=partial(group.close), name="palestra-weights", daemon=True).start()


def _problems(receivers: Sequence[Receiver], answers: Sequence[asyncio.Future[None]]) -> Problems:
    """Return why the calls of servers have failed, by server; one that has not ended has not been answered."""
    found: Problems = {}
    for one, answer in zip(receivers, answers, strict=True):
        if not answer.done():
            found[one] = EngineFailure(f"{one.api.address} did not answer while it was sent weights")
        elif (error := answer.exception()) is not None:
            if not isinstance(error, PalestraError):
                raise error
            found[one] = error
    return found


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks whose errors are known, and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, eq=False)
class WeightsToSend:
    """New weights in the trainer's memory, to be broadcast.

    Attributes:
        named: all of them, [n, d] or [d], with their names.
    """

    source: WeightSource
    named: Sequence[tuple[str, Tensor]]

    def discard(self) -> None:
        """No effect: the update has created no file."""


@dataclass(kw_only=True, eq=False)
class ServedBroadcast(ExternalPolicy):
    """A policy whose server receives weights together with other servers; see `WeightRounds`."""

    api: VllmApi
    rounds: WeightRounds

    def __post_init__(self) -> None:
        super().__post_init__()
        self._receiver = Receiver(self.api, self._moved)

    def expecting(self, source: WeightSource) -> contextlib.AbstractContextManager[None]:
        """Let the round of these weights wait for this server; see `ExternalPolicy`."""
        return self.rounds.expecting(self._receiver, source)

    def prepare(self, name: str, source: WeightSource, version: PolicyVersion) -> NewWeights:
        """Validate the weights against the server's model, without copying them; see `ExternalPolicy`."""
        return WeightsToSend(source, self.fitting(source))

    async def _load(self, new: NewWeights, version: PolicyVersion) -> None:
        assert isinstance(new, WeightsToSend)
        await self.rounds.receive(self._receiver, new.source, new.named, self.dtype)
        await self.api.finish_update(version)

    def _moved(self, size: int) -> None:
        self.moved_bytes += size

    async def close(self) -> None:
        """Leave this server's groups, and end it; see `ExternalPolicy`."""
        self.rounds.forget(self._receiver)
        await super().close()
