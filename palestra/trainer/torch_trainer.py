"""The trainer of this process: policies by name, and one thread at a time that computes for any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import build_loss
from palestra.config import TrainerConfig
from palestra.errors import ConfigError, NotFound
from palestra.models.causal_lm import CausalLM, load_causal_lm, load_tokenizer, set_threads
from palestra.models.devices import device_of
from palestra.models.weights import LocalWeights, WeightSource
from palestra.schemas.records import PolicyVersion, TrainSample
from palestra.threads import in_thread
from palestra.trainer.base import OptimParams, OptimReport, PolicySpec, StepReport
from palestra.trainer.serial import Serial
from palestra.trainer.torch_policy import TorchPolicy

T = TypeVar("T")
LoadModel = Callable[[str, torch.device], tuple[CausalLM, Any]]


def load_model(model: str, device: torch.device) -> tuple[CausalLM, Any]:
    """Return the float32 weights and the tokenizer of a model.

    Args:
        model: a name as `PolicyConfig.model` has it, or a folder.
        device: where the weights are to be.
    """
    return load_causal_lm(model, torch.float32, device), load_tokenizer(model)


class TorchTrainer:
    """Implements `Trainer` on one device."""

    def __init__(self, config: TrainerConfig, keep: int, load: LoadModel = load_model) -> None:
        """Begin without a policy.

        Args:
            config: how gradients are computed, and where.
            keep: how many checkpoints of a policy are kept.
            load: what loads a model's weights and tokenizer.
        """
        self._config, self._keep, self._load_model = config, keep, load
        self._policies: dict[str, TorchPolicy] = {}
        self._serial = Serial()

    def version(self, policy: str) -> PolicyVersion:
        """See `Trainer`."""
        return self._policy(policy).version

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """See `Trainer`."""
        mine = self._policy(policy)
        mine.version = PolicyVersion(incarnation, mine.version.n)

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """See `Trainer`."""

        def load() -> TorchPolicy:
            device = device_of(self._config.device, "trainer.device")
            return TorchPolicy(*self._load_model(spec.model, device), self._config)

        async def work() -> None:
            if policy in self._policies:
                raise ConfigError(f"the trainer has a policy {policy!r} already")
            self._policies[policy] = await self._in_thread(load)

        await self._serial.run(work)

    async def remove(self, policy: str) -> None:
        """See `Trainer`."""
        self._policy(policy)

        async def work() -> None:
            self._policies.pop(policy).close()
            self._serial.forget(policy)

        await self._serial.run(work)

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """See `Trainer`."""
        mine = self._policy(policy)
        if unknown := set(outputs) - {"old_logprobs"}:
            raise ConfigError(f"this trainer can't compute {', '.join(sorted(unknown))}")
        if not outputs:
            return {}
        return {"old_logprobs": await self._serial.run(lambda: self._in_thread(lambda: mine.logprobs(batch)))}

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str
    ) -> StepReport:
        """See `Trainer`."""
        mine, function = self._policy(policy), build_loss(loss)
        return await self._once(policy, request_id, lambda: mine.forward_backward(batch, function))

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """See `Trainer`."""
        mine = self._policy(policy)
        return await self._once(policy, request_id, lambda: mine.untrainable(batch))

    async def optim_step(self, policy: str, params: OptimParams, request_id: str) -> OptimReport:
        """See `Trainer`."""
        mine = self._policy(policy)
        return await self._once(policy, request_id, lambda: mine.optim_step(params))

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """See `Trainer`. The checkpoint loads in transformers as it is."""
        mine = self._policy(policy)
        return await self._once(policy, request_id, lambda: mine.save(folder, state, self._keep))

    async def load(self, policy: str, folder: Path) -> dict[str, Any] | None:
        """See `Trainer`."""
        mine = self._policy(policy)
        return await self._serial.run(lambda: self._in_thread(lambda: mine.load(folder)))

    async def weights(self, policy: str) -> WeightSource:
        """See `Trainer`. They are the master weights themselves, not copied."""
        mine = self._policy(policy)

        async def work() -> WeightSource:
            mine.changed = False
            return LocalWeights([(name, parameter.detach()) for name, parameter in mine.parameters])

        return await self._serial.run(work)

    async def close(self) -> None:
        """See `Trainer`."""

        async def work() -> None:
            for policy in self._policies.values():
                policy.close()

        await self._serial.run(work)

    def _policy(self, policy: str) -> TorchPolicy:
        found = self._policies.get(policy)
        if found is None:
            raise NotFound(f"the trainer has no policy {policy!r}")
        return found

    async def _once(self, policy: str, request_id: str, work: Callable[[], T]) -> T:
        return await self._serial.run_idempotent(policy, request_id, lambda: self._in_thread(work))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread of its own, which ends with it, and with it what OpenMP keeps for a thread."""

        def compute() -> T:
            set_threads(self._config.threads)
            return work()

        job = asyncio.ensure_future(in_thread(compute, "palestra-trainer", daemon=False))
        try:
            return await asyncio.shield(job)
        finally:
            await asyncio.wait((job,))  # before anything else is begun, also where the waiting was cancelled
