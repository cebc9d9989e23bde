"""The sharded trainer: a coordinator in the job's process, which computes nothing itself.

A rank gets consecutive rows, so that rows of a group, which share a prompt, mostly stay together: a prompt that two
ranks need is computed twice. All rows of an episode are on one rank, because some losses need whole episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import build_loss
from palestra.config import TrainerConfig
from palestra.engine.driver import EngineJob
from palestra.errors import ConfigError, WorkerCrashLoop
from palestra.faults import fault_point
from palestra.models.weights import FileWeights, WeightSource
from palestra.process.child import start_process
from palestra.runtime.terms import JobPlaces
from palestra.threads import in_thread
from palestra.tokens import TokenRun
from palestra.trainer import checkpoint
from palestra.trainer.base import Network, OptimParams, OptimReport, PolicySpec, StepReport
from palestra.trainer.metrics import MetricSums, SentSums
from palestra.trainer.packing import Tree
from palestra.trainer.serial import PolicyTrainer, Serial, VersionedPolicy
from palestra.types.records import TrainSample
from palestra_sharded.processes import RankPlaces, RankProcesses

_TRIES = 10  # of finding the smallest limit, by halves
T = TypeVar("T")
MOST_LOSSES = 5  # without a checkpoint between them: then the job itself must be the reason


def share_out(batch: Sequence[TrainSample], ranks: int) -> list[list[TrainSample]]:
    """Return the rows of each rank, in order; a rank has none if there are fewer episodes than ranks."""
    episodes, rows = _episodes(batch), [TokenRun.of(sample.ids, sample.media) for sample in batch]
    low, high = 0, sum(map(len, rows))
    best = _filled(rows, episodes, high)
    for _ in range(_TRIES if len(episodes) > 1 else 0):
        limit = (low + high) // 2
        found = _filled(rows, episodes, limit)
        if len(found) <= ranks:
            high, best = limit, found
        else:
            low = limit
    shares = [list(batch[first:last]) for first, last in best]
    return shares + [[] for _ in range(ranks - len(shares))]


def _episodes(batch: Sequence[TrainSample]) -> list[tuple[int, int]]:
    """Return the ranges of rows that have to stay together: from the first row of an episode to its last."""
    last = {sample.episode_id: number for number, sample in enumerate(batch)}
    found, first, until = list[tuple[int, int]](), 0, 0
    for number, sample in enumerate(batch):
        until = max(until, last[sample.episode_id])
        if number == until:
            found.append((first, number + 1))
            first = number + 1
    return found


def _filled(rows: Sequence[TokenRun], episodes: Sequence[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Return ranges of rows, each with as many whole episodes as fit into `limit` computed tokens, at least one."""
    found = list[tuple[int, int]]()
    tree, tokens = Tree(), 0
    for first, last in episodes:
        before = len(tree)
        _add(tree, rows[first:last])
        if found and len(tree) <= limit and tokens:
            found[-1] = (found[-1][0], last)
        else:
            if before:
                tree = Tree()
                _add(tree, rows[first:last])
            found.append((first, last))
        tokens = len(tree)
    return found


def _add(tree: Tree, rows: Sequence[TokenRun]) -> None:
    for row in rows:
        tree.add(row, tree.shared(row))


def sharded_trainer(job: EngineJob, places: JobPlaces) -> ShardedTrainer:
    """Return the trainer of a job over several devices, without policies."""
    config, folder = job.config, None if job.pictures is None else job.pictures.folder
    ranks = RankPlaces(start=places.trainer or start_process, folder=places.trainer and places.folder)
    keep, precision = config.checkpoint.keep, config.engine.precision
    return ShardedTrainer(config.trainer, keep, precision, config.deterministic, ranks, folder)


class ShardedTrainer(PolicyTrainer[VersionedPolicy]):
    """A `Trainer` over rank processes, which are started with the first policy.

    When a rank is lost, all are ended, and every call raises TrainerLost until `renew` starts new ranks without
    policies.
    """

    event_of_loss = "trainer_lost"

    def __init__(
        self,
        config: TrainerConfig,
        keep: int,
        weights_dtype: str,
        deterministic: bool = False,
        places: RankPlaces | None = None,
        pictures: Path | None = None,
    ) -> None:
        """Create a trainer without policies or ranks. Engines get matrices in `weights_dtype`."""
        super().__init__()
        self._places = places or RankPlaces()
        self._config, self._keep, self._weights_dtype = config, keep, weights_dtype
        self._deterministic, self._pictures = deterministic, pictures
        self._ranks: RankProcesses | None = None
        self._losses = 0  # since the newest checkpoint
        self._given_up = False

    @property
    def loss(self) -> str:
        """Describe what happened to the ranks."""
        return f"the trainer's processes were started again ({self._ranks.lost if self._ranks else 'not started'})"

    @property
    def pids(self) -> list[int]:
        """Return the ids of the ranks' processes, in order."""
        return [] if self._ranks is None else self._ranks.pids

    @property
    def is_lost(self) -> bool:
        """Return whether all calls fail until `renew`, which may be tried."""
        return self._ranks is not None and self._ranks.lost is not None and not self._given_up

    async def lost(self) -> None:
        """Wait until the ranks are lost."""
        if self._ranks is None:
            await asyncio.Event().wait()
        else:
            await self._ranks.gone()

    async def renew(self) -> None:
        """Start new ranks, without policies, in place of lost ones."""
        assert self._ranks is not None
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            self._given_up = True
            raise WorkerCrashLoop(
                f"the trainer was lost {self._losses} times without a checkpoint between them, the last time because "
                f"{self._ranks.lost}"
            )
        await self._ranks.close()
        self._policies, self._serial = {}, Serial()
        await self._start()

    async def _start(self) -> None:
        self._ranks = RankProcesses(self._config, self._deterministic, self._places, self._pictures)
        await self._ranks.start()

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """Load a policy on all ranks, and start them if necessary; see `Trainer.create`."""
        if spec.critic is not None:
            raise ConfigError("a policy with a critic is trained on one device; set trainer.devices = 1")

        async def work() -> None:
            self._check_new(policy)
            if self._ranks is None:
                await self._start()
            await self._all("create", policy, spec)
            self._policies[policy] = VersionedPolicy()

        await self._serial.run(work)

    async def remove(self, policy: str) -> None:
        """Forget a policy and its requests; see `Trainer.remove`."""
        self._policy(policy)

        async def work() -> None:
            del self._policies[policy]
            await self._all("remove", policy)
            self._serial.forget(policy)

        await self._serial.run(work)

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """Compute `outputs` of rows, each rank its share; see `Trainer.forward`."""
        self._policy(policy)
        if not outputs:
            return {}

        async def work() -> ForwardOutputs:
            shares = await self._shares(batch)
            parts = await self._each("forward", [(policy, share, frozenset(outputs)) for share in shares])
            return {name: [row for part in parts for row in part[name]] for name in outputs}

        return await self._serial.run(work)

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str, logprobs: bool = False
    ) -> StepReport:
        """Add the gradient of a batch, each rank its share; see `Trainer.forward_backward`."""
        mine = self._policy(policy)
        build_loss(loss)  # a loss that is not known is no request

        async def work() -> StepReport:
            shares = await self._shares(batch)
            calls = [(policy, mine.version, share, loss, logprobs) for share in shares]
            return _merged(await self._each("gradient", calls), logprobs)

        return await self._serial.run_idempotent(policy, request_id, work)

    async def optim_step(
        self, policy: str, params: OptimParams, request_id: str, network: Network = "policy"
    ) -> OptimReport:
        """Apply the gradient of `policy`, each rank to its part; see `Trainer.optim_step`.

        A policy here has no critic.
        """
        mine = self._policy(policy)
        if network == "critic":
            raise ConfigError("this policy has no critic")

        async def work() -> OptimReport:
            fault_point("before_step")
            report: OptimReport = (await self._all("step", policy, params))[0]
            if report.applied:
                mine.count_update()
            fault_point("after_step")
            return report

        return await self._serial.run_idempotent(policy, request_id, work)

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """Find episodes of `batch` that cannot be trained; see `Trainer.untrainable`."""
        self._policy(policy)

        (found,) = await self._serial.run_idempotent(
            policy, request_id, lambda: self._each("untrainable", [(policy, batch)])
        )
        return cast("dict[str, str]", found)

    async def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply that could be sampled under a grammar; see `Trainer.choices`."""
        self._policy(policy)

        (found,) = await self._serial.run(lambda: self._each("choices", [(policy, grammar, max_tokens, most)]))
        return cast("tuple[tuple[int, ...], ...]", found)

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Write a checkpoint into `folder` that any number of ranks, or one process, can load; see `Trainer.save`."""
        mine = self._policy(policy)

        async def work() -> Path:
            step, full = int(state["step"]), mine.stored(state)
            found = await self._written(
                policy, True, lambda fill: checkpoint.write(folder, step, fill, full, self._keep)
            )
            self._losses = 0
            return found

        return await self._serial.run_idempotent(policy, request_id, work)

    async def save_weights(self, policy: str, folder: Path, step: int, request_id: str) -> None:
        """Write the weights of `policy` after `step` to `folder`; see `Trainer.save_weights`."""
        mine = self._policy(policy)

        async def work() -> None:
            state = mine.stored({})
            await self._written(policy, False, lambda fill: checkpoint.write_weights_folder(folder, step, fill, state))

        await self._serial.run_idempotent(policy, request_id, work)

    async def _written(self, policy: str, moments: bool, write: Callable[[Callable[[Path], None]], T]) -> T:
        """Write a folder that the ranks fill."""
        loop = asyncio.get_running_loop()

        def fill(path: Path) -> None:
            asyncio.run_coroutine_threadsafe(self._all("fill", policy, path, moments), loop).result()

        return await in_thread(lambda: write(fill))

    async def load(self, policy: str, folder: Path, step: int | None = None) -> dict[str, Any] | None:
        """Restore a policy's newest undamaged checkpoint in `folder`, or that of `step`; see `Trainer.load`."""
        mine = self._policy(policy)

        async def work() -> dict[str, Any] | None:
            found = await in_thread(lambda: checkpoint.good(folder, step))
            if found is None:
                return None
            path, state = found
            await self._all("read", policy, path)
            mine.restore_version(state)
            return state

        return await self._serial.run(work)

    async def weights(self, policy: str) -> WeightSource:
        """Return the weights in a file of shared memory, in the precision of engines; see `Trainer.weights`."""
        mine = self._policy(policy)

        async def work() -> WeightSource:
            assert self._ranks is not None
            path = self._ranks.folder / f"{policy}.safetensors"
            await self._all("publish", policy, path, self._weights_dtype)
            mine.changed = False
            return FileWeights(path)

        return await self._serial.run(work)

    async def peak_bytes(self) -> list[int]:
        """Return the peak memory of each rank's process, in order."""
        found: list[int] = await self._serial.run(lambda: self._all("peak_bytes"))
        return found

    async def close(self) -> None:
        """Finish earlier requests, and end the ranks; see `Trainer.close`."""

        async def work() -> None:
            if self._ranks is not None:
                await self._ranks.close()

        await self._serial.run(work)

    async def _shares(self, batch: Sequence[TrainSample]) -> list[list[TrainSample]]:
        return await in_thread(lambda: share_out(batch, self._config.devices))

    async def _all(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks with the same arguments."""
        return await self._each(name, [arguments] * self._config.devices)

    async def _each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the first ranks, each with its own arguments; see `RankProcesses.call`."""
        assert self._ranks is not None
        return await self._ranks.call(name, arguments)


def _merged(parts: Sequence[tuple[StepReport, SentSums]], logprobs: bool) -> StepReport:
    reports = [report for report, _ in parts]
    sums = MetricSums(())
    for _, other in parts:
        sums.merge(other)
    trained = sum(report.trained_tokens for report in reports)
    return replace(
        reports[0],
        rows=sum(report.rows for report in reports),
        trained_tokens=trained,
        forward_tokens=sum(report.forward_tokens for report in reports),
        flat_tokens=sum(report.flat_tokens for report in reports),
        metrics=sums.result(trained),
        logprobs=tuple(row for report in reports for row in report.logprobs or ()) if logprobs else None,
    )
