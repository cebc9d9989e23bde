"""The trainer that computes in this process: policies by name, and one thread at a time that works for any of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import build_loss
from palestra.config import TrainerConfig
from palestra.errors import ConfigError, NotFound
from palestra.faults import fault_point
from palestra.models.causal_lm import CausalLM
from palestra.models.device import device_of, precision_of
from palestra.models.loading import LoadedModels
from palestra.models.mixed_adapters import MixedModel
from palestra.models.shared_cores import SharedCores
from palestra.models.weights import LocalWeights, WeightSource
from palestra.threads import in_thread
from palestra.trainer.base import Network, OptimParams, OptimReport, PolicySpec, StepReport
from palestra.trainer.loading import NetworkLoading
from palestra.trainer.merged import UpdateRequest, add_gradients
from palestra.trainer.optimizer import step_together
from palestra.trainer.pieces import GradientPieces, Pieces
from palestra.trainer.serial import Serial
from palestra.trainer.slots import Slots
from palestra.trainer.torch_policy import MICRO_BATCH_TOKENS, TorchPolicy
from palestra.types.calls import PolicyVersion
from palestra.types.records import TrainSample

T = TypeVar("T")
_LONG_WORK_SECONDS = 0.3  # work of so long shows what other processes use meanwhile


class TorchTrainer:
    """A `Trainer` that computes with torch in this process, on one device."""

    def __init__(
        self, config: TrainerConfig, keep: int, models: LoadedModels | None = None, deterministic: bool = False
    ) -> None:
        """Create a trainer without policies.

        Args:
            models: may be shared with an engine; None: the trainer's own.
            deterministic: whether a policy's numbers must be the same bit for bit whatever else is computed.
        """
        self._config, self._keep, self._models = config, keep, models or LoadedModels()
        self._deterministic = deterministic
        self._cores = SharedCores(config.threads, fixed=deterministic)
        self._policies: dict[str, TorchPolicy] = {}
        self._serial = Serial()
        self._slots = Slots(config.adapter_slots)
        self._mixed: dict[CausalLM, MixedModel] = {}  # by base

    @property
    def micro_batch_tokens(self) -> int:
        """Return how many tokens one pass may compute."""
        device = device_of(self._config.device, "trainer.device")
        return self._config.micro_batch_tokens or MICRO_BATCH_TOKENS[device.type]

    @property
    def most_together(self) -> int | None:
        """Return how many policies can be computed in one pass; None: any number."""
        return self._slots.count

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's master weights; see `Trainer.version`."""
        return self._policy(policy).version

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """Set the incarnation of a policy's later versions; see `Trainer.begin_incarnation`."""
        mine = self._policy(policy)
        mine.version = PolicyVersion(incarnation, mine.version.n)

    async def create(self, policy: str, spec: PolicySpec) -> None:
        """Load a policy's weights onto the configured device; see `Trainer.create`."""

        def load() -> TorchPolicy:
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
            return TorchPolicy(model, tokenizer, self._config, frozen, critic, target)

        async def work() -> None:
            if policy in self._policies:
                raise ConfigError(f"the trainer has a policy {policy!r} already")
            made = await self._in_thread(load)
            self._policies[policy] = made
            try:
                await self._in_thread(lambda: self._slots.use({policy: made}))
            except BaseException:
                del self._policies[policy]
                raise

        await self._serial.run(work)

    async def remove(self, policy: str) -> None:
        """Forget a policy and its requests, after earlier requests have ended; see `Trainer.remove`."""
        self._policy(policy)

        async def work() -> None:
            removed = self._policies.pop(policy)
            removed.close()
            is_whole = removed.model.base is None
            del removed
            self._slots.forget(policy)
            bases = {other.model.base for other in self._policies.values()}
            self._mixed = {base: mixed for base, mixed in self._mixed.items() if base in bases}
            self._serial.forget(policy)
            if is_whole:
                gc.collect()  # a model's hooks refer to it, and what `tune_gc` has set would keep its weights for long

        await self._serial.run(work)

    async def forward(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> ForwardOutputs:
        """Compute `outputs` of rows under the present weights of `policy`, float32 [N] a row; see `Trainer.forward`."""
        mine = self._policy(policy)
        mine.check_outputs(outputs)
        if not outputs:
            return {}
        return await self._serial.run(lambda: self._in_slot(policy, lambda: mine.forward_pieces(batch, outputs).run()))

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, request_id: str, logprobs: bool = False
    ) -> StepReport:
        """Add the gradient of a batch to a policy; see `Trainer.forward_backward`."""
        mine = self._policy(policy)
        build_loss(loss)  # a loss that is not known is no request
        return await self._once(policy, request_id, lambda: mine.gradient_pieces(batch, loss, logprobs).run())

    async def forward_pieces(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> Pieces[ForwardOutputs]:
        """Prepare a `forward`, which `compute` then executes piece by piece."""
        mine = self._policy(policy)
        mine.check_outputs(outputs)
        rows = batch if outputs else ()
        return await self._serial.run(lambda: self._in_thread(lambda: mine.forward_pieces(rows, outputs)))

    async def gradient_pieces(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, logprobs: bool = False
    ) -> Pieces[StepReport]:
        """Prepare a `forward_backward`, which `compute` then executes piece by piece.

        No other gradient or update of the policy may be computed until the last piece.

        Args:
            loss: the loss of a token or of a value, by its name.
            logprobs: whether the report has those of the trained tokens.
        """
        mine, merged = self._policy(policy), not self._deterministic
        return await self._serial.run(
            lambda: self._in_thread(lambda: mine.gradient_pieces(batch, loss, logprobs, merged))
        )

    async def compute(self, pieces: Mapping[str, Pieces[Any]]) -> dict[str, Exception]:
        """Compute the next piece of requests, by policy, in one pass.

        Several requests must have the same `base`, and be no more than `most_together`.

        Returns:
            What has failed, by policy: then that policy is as before its request.
        """
        return await self._serial.run(lambda: self._in_thread(lambda: self._compute(pieces)))

    def _compute(self, pieces: Mapping[str, Pieces[Any]]) -> dict[str, Exception]:
        """Compute one pass; see `compute`."""
        ready, failures = self._in_memory(pieces)
        if len(ready) == 1:
            (name,) = ready
            try:
                pieces[name].compute()
            except Exception as error:  # noqa: BLE001 - of this request alone
                pieces[name].take_back()
                failures[name] = error
        elif ready:
            parts = {name: piece for name in ready if isinstance(piece := pieces[name], GradientPieces)}
            found = add_gradients(list(parts.values()), self._mixed_model(ready))
            failures |= {name: error for name, error in zip(parts, found, strict=True) if error is not None}
        return failures

    def _in_memory(self, names: Iterable[str]) -> tuple[dict[str, TorchPolicy], dict[str, Exception]]:
        """Load policies into memory; return those loaded, and the errors of the others."""
        ready, failures = dict[str, TorchPolicy](), dict[str, Exception]()
        for name in names:
            try:
                policy = self._policy(name)
                self._slots.use({**ready, name: policy})
            except Exception as error:  # noqa: BLE001 - of this policy alone
                failures[name] = error
            else:
                ready[name] = policy
        return ready, failures

    def _mixed_model(self, policies: Mapping[str, TorchPolicy]) -> MixedModel:
        """Return the model that computes common passes of policies on one base."""
        base = next(iter(policies.values())).model.base
        assert base is not None
        if base not in self._mixed:
            self._mixed[base] = MixedModel(base)
        return self._mixed[base]

    async def optim_step_together(self, requests: Sequence[UpdateRequest]) -> list[OptimReport | Exception]:
        """Apply the gradients of several policies in one pass, like `optim_step` for each.

        Returns:
            For each its report, or what failed.
        """

        def compute(new: Sequence[UpdateRequest]) -> list[OptimReport | Exception]:
            found, most = list[OptimReport | Exception](), self._slots.count or len(new)
            for start in range(0, len(new), most):
                found += self._updates(new[start : start + most])
            return found

        keys = [(request.policy, request.request_id) for request in requests]
        return await self._serial.run_together(
            keys, lambda new: self._in_thread(lambda: compute([requests[place] for place in new]))
        )

    def _updates(self, requests: Sequence[UpdateRequest]) -> list[OptimReport | Exception]:
        """Apply the gradients of as many policies as there are slots."""
        ready, failures = self._in_memory(request.policy for request in requests)
        fault_point("before_step")
        due = [request for request in requests if request.policy in ready]
        reports = step_together([(ready[request.policy].optimizer, request.params) for request in due])
        found = dict(zip([request.policy for request in due], reports, strict=True)) | failures
        for name, report in found.items():
            if not isinstance(report, Exception):
                ready[name].count(report)
        fault_point("after_step")
        return [found[request.policy] for request in requests]

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """Find episodes of `batch` that `policy` can't be trained on; once for each `request_id`.

        See `Trainer.untrainable`.
        """
        mine = self._policy(policy)
        return await self._serial.run_idempotent(
            policy, request_id, lambda: self._in_thread(lambda: mine.untrainable(batch))
        )

    async def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply that could be sampled under a grammar; see `Trainer.choices`."""
        mine = self._policy(policy)
        return await self._serial.run(lambda: self._in_thread(lambda: mine.choices(grammar, max_tokens, most)))

    async def optim_step(
        self, policy: str, params: OptimParams, request_id: str, network: Network = "policy"
    ) -> OptimReport:
        """Apply the gradient of `policy` or of its critic; see `Trainer.optim_step`."""
        mine = self._policy(policy)
        return await self._once(policy, request_id, lambda: mine.optim_step(params, network))

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Write a checkpoint of `policy` that transformers can load, once for each `request_id`; see `Trainer.save`."""
        mine = self._policy(policy)
        return await self._once(policy, request_id, lambda: mine.save(folder, state, self._keep))

    async def save_weights(self, policy: str, folder: Path, step: int, request_id: str) -> None:
        """Write the weights of `policy` after `step` to `folder`, once for each `request_id`.

        See `Trainer.save_weights`.
        """
        mine = self._policy(policy)
        await self._once(policy, request_id, lambda: mine.save_weights(folder, step))

    async def load(self, policy: str, folder: Path, step: int | None = None) -> dict[str, Any] | None:
        """Restore a policy's newest undamaged checkpoint in `folder`, or that of `step`; see `Trainer.load`."""
        mine = self._policy(policy)
        return await self._serial.run(lambda: self._in_slot(policy, lambda: mine.load(folder, step)))

    async def weights(self, policy: str) -> WeightSource:
        """Return the master weights themselves, without a copy; see `Trainer.weights`."""
        mine = self._policy(policy)

        async def work() -> WeightSource:
            if self._slots.count is not None:
                await self._in_slot(policy, lambda: None)
            mine.changed = False
            return LocalWeights([(name, parameter.detach()) for name, parameter in mine.parameters])

        return await self._serial.run(work)

    async def close(self) -> None:
        """Finish earlier requests, and stop the processes that walk grammars; see `Trainer.close`."""

        async def work() -> None:
            for policy in self._policies.values():
                policy.close()
            self._slots.close()

        await self._serial.run(work)

    def _policy(self, policy: str) -> TorchPolicy:
        """Return a policy by its name."""
        found = self._policies.get(policy)
        if found is None:
            raise NotFound(f"the trainer has no policy {policy!r}")
        return found

    async def _once(self, policy: str, request_id: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread, after earlier requests, unless the request was seen before."""
        return await self._serial.run_idempotent(policy, request_id, lambda: self._in_slot(policy, work))

    async def _in_slot(self, policy: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread, with the weights of a policy in memory."""

        def compute() -> T:
            self._slots.use({policy: self._policy(policy)})
            return work()

        return await self._in_thread(compute)

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
