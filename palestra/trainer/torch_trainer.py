"""The trainer that computes in this process: policies by name, and one thread at a time that works for any of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import build_loss
from palestra.config import TrainerConfig
from palestra.errors import ConfigError
from palestra.models.causal_lm import CausalLM
from palestra.models.device import device_of, precision_of
from palestra.models.loading import LoadedModels
from palestra.models.shared_cores import SharedCores
from palestra.models.weights import LocalWeights, WeightSource
from palestra.threads import in_thread
from palestra.trainer.base import Network, OptimParams, OptimReport, PolicySpec, StepReport
from palestra.trainer.serial import PolicyTrainer
from palestra.trainer.torch_policy import PolicyNetworks, TorchPolicy
from palestra.types.records import TrainSample

T = TypeVar("T")
_LONG_WORK_SECONDS = 0.3  # work of so long shows what other processes use meanwhile


@dataclass(frozen=True, slots=True)
class NetworkLoading:
    """Loads networks for one trainer.

    Attributes:
        dtype: precision of products, and of weights that never change.
    """

    models: LoadedModels
    dtype: torch.dtype
    device: torch.device

    def trained(self, spec: PolicySpec, seed: int) -> tuple[CausalLM, Any]:
        """Load a model in float32, all of whose weights or an adapter are trained, and its tokenizer."""
        if spec.adapter is None:
            model, tokenizer = self.models.own(spec.model, torch.float32, self.device, spec.vision)
            if model.vision is not None and model.vision.trained:
                model.vision.kept = None  # every update changes what its tower makes of a picture
            return model, tokenizer
        return self.models.adapted(spec.model, spec.adapter, seed, self.dtype, self.device)

    def frozen(self, spec: PolicySpec, policy: CausalLM, tokenizer: Any) -> dict[ForwardOutput, CausalLM]:
        """Load the frozen models in the precision of products, by the output that each computes."""
        found: dict[ForwardOutput, CausalLM] = {}
        if spec.reference is not None:
            found["reference_logprobs"] = self._frozen("reference", spec.reference, policy, tokenizer)
        if spec.teacher is not None:
            found["teacher_logprobs"] = self._frozen("teacher", spec.teacher, policy, tokenizer)
        return found

    def _frozen(self, what: str, name: str, policy: CausalLM, tokenizer: Any) -> CausalLM:
        model, own = self.models.frozen(name, self.dtype, self.device)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"the {what} {name!r} has another tokenizer than the policy, so its probabilities are of other "
                "texts; take a model of the same family"
            )
        if model.vocab_size != policy.vocab_size:
            raise ConfigError(
                f"the {what} {name!r} has {model.vocab_size} tokens, and the policy {policy.vocab_size}; take a "
                "model with as many"
            )
        return model


class TorchTrainer(PolicyTrainer[TorchPolicy]):
    """A `Trainer` that computes with torch in this process, on one device."""

    def __init__(
        self, config: TrainerConfig, keep: int, models: LoadedModels | None = None, deterministic: bool = False
    ) -> None:
        """Create a trainer without policies. `models` may be shared with an engine. `deterministic`: a policy's numbers
        are the same bit for bit whatever else is computed.
        """
        super().__init__()
        self._config, self._keep, self._models = config, keep, models or LoadedModels()
        self._deterministic = deterministic
        self._cores = SharedCores(config.threads, fixed=deterministic)

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """Load a policy's weights onto the configured device; see `Trainer.create`."""

        def work() -> None:
            self._check_new(policy)
            self._add(policy, self._loaded(spec))

        await self._serial.run(lambda: self._in_thread(work))

    def _loaded(self, spec: PolicySpec) -> TorchPolicy:
        """Return a new policy, with its networks on the device."""
        device = device_of(self._config.device, "trainer.device")
        loading = NetworkLoading(self._models, precision_of(self._config.dtype, device), device)
        model, tokenizer = loading.trained(spec, spec.seed)
        frozen = loading.frozen(spec, model, tokenizer)
        # Both of a critic of actions begin alike, and their adapter is drawn with another seed than the policy's.
        critic = loading.trained(spec, spec.seed + 1)[0] if spec.critic is not None else None
        target = loading.trained(spec, spec.seed + 1)[0] if spec.critic == "actions" else None
        if self._config.activation_checkpointing:
            for each in (model, critic):
                if each is not None:
                    each.recompute_blocks()
        networks = PolicyNetworks(
            model=model,
            tokenizer=tokenizer,
            frozen=frozen,
            critic=critic,
            critic_kind=spec.critic or "states",
            critic_target=target,
        )
        return TorchPolicy(networks, self._config)

    def _add(self, name: str, policy: TorchPolicy) -> None:
        """Begin to have a policy; runs in the trainer's thread."""
        self._policies[name] = policy

    async def remove(self, policy: str) -> None:
        """Forget a policy and its requests, after earlier requests have ended; see `Trainer.remove`."""
        self._policy(policy)

        async def work() -> None:
            is_whole = self._policy(policy).model.base is None
            self._drop(policy)
            self._serial.forget(policy)
            if is_whole:
                gc.collect()  # a model's hooks refer to it, and what `tune_gc` has set would keep its weights for long

        await self._serial.run(work)

    def _drop(self, name: str) -> None:
        self._policies.pop(name).close()

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """Compute `outputs` of rows under the present weights of `policy`, float32 [N] a row; see `Trainer.forward`."""
        self._policy(policy).check_outputs(outputs)
        if not outputs:
            return {}
        return await self._do(policy, lambda mine: mine.forward(batch, outputs))

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str, logprobs: bool = False
    ) -> StepReport:
        """Add the gradient of a batch to a policy; see `Trainer.forward_backward`."""
        build_loss(loss)  # a loss that is not known is no request
        return await self._do(policy, lambda mine: mine.forward_backward(batch, loss, logprobs), request_id)

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """Find episodes of `batch` that `policy` cannot be trained on; once for each `request_id`.

        See `Trainer.untrainable`.
        """
        return await self._do(policy, lambda mine: mine.untrainable(batch), request_id)

    async def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply that could be sampled under a grammar; see `Trainer.choices`."""
        return await self._do(policy, lambda mine: mine.choices(grammar, max_tokens, most))

    async def optim_step(
        self, policy: str, params: OptimParams, request_id: str, network: Network = "policy"
    ) -> OptimReport:
        """Apply the gradient of `policy` or of its critic; see `Trainer.optim_step`."""
        return await self._do(policy, lambda mine: mine.optim_step(params, network), request_id)

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Write a checkpoint of `policy` that transformers can load, once for each `request_id`; see `Trainer.save`."""
        return await self._do(policy, lambda mine: mine.save(folder, state, self._keep), request_id)

    async def save_weights(self, policy: str, folder: Path, step: int, request_id: str) -> None:
        """Write the weights of `policy` after `step` to `folder`, once for each `request_id`.

        See `Trainer.save_weights`.
        """
        await self._do(policy, lambda mine: mine.save_weights(folder, step), request_id)

    async def load(self, policy: str, folder: Path, step: int | None = None) -> dict[str, Any] | None:
        """Restore a policy's newest undamaged checkpoint in `folder`, or that of `step`; see `Trainer.load`."""
        return await self._do(policy, lambda mine: mine.load(folder, step))

    async def weights(self, policy: str) -> WeightSource:
        """Return the master weights themselves, without a copy; see `Trainer.weights`."""

        def work(mine: TorchPolicy) -> WeightSource:
            mine.changed = False
            return LocalWeights([(name, parameter.detach()) for name, parameter in mine.parameters])

        return await self._do(policy, work)

    async def close(self) -> None:
        """Finish earlier requests, and stop the processes that walk grammars; see `Trainer.close`."""

        async def work() -> None:
            for policy in self._policies.values():
                policy.close()

        await self._serial.run(work)

    def _at_hand(self, name: str) -> TorchPolicy:
        """Return a policy whose weights are in memory; runs in the trainer's thread."""
        return self._policy(name)

    async def _do(self, name: str, work: Callable[[TorchPolicy], T], request_id: str | None = None) -> T:
        """Do `work` on a policy in a thread, after earlier requests; once for each `request_id`, where there is one."""
        self._policy(name)  # one that is not there is no request

        async def request() -> T:
            return await self._in_thread(lambda: work(self._at_hand(name)))

        if request_id is None:
            return await self._serial.run(request)
        return await self._serial.run_idempotent(name, request_id, request)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a new thread, whose OpenMP threads end with it (see `palestra.threads`)."""

        def compute() -> T:
            self._cores.begin()
            try:
                return work()
            finally:
                self._cores.note(_LONG_WORK_SECONDS)

        job = asyncio.ensure_future(in_thread(compute, "palestra-trainer", daemon=False))
        try:
            return await asyncio.shield(job)
        finally:
            await asyncio.wait((job,))  # no other work may begin before it, even if the caller was cancelled
