"""The trainer of a base that tenants share: pieces, passes of several policies, and adapters that wait on disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.config import TrainerConfig
from palestra.models.causal_lm import CausalLM
from palestra.models.device import device_of
from palestra.models.loading import LoadedModels
from palestra.models.mixed_adapters import MixedModel
from palestra.trainer.base import StepReport
from palestra.trainer.gradient import Gradient
from palestra.trainer.torch_policy import MICRO_BATCH_TOKENS, TorchPolicy
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import Floats
from palestra.types.records import TrainSample
from palestra_bases.training.pieces import GradientPieces, Pieces, add_gradients
from palestra_bases.training.slots import Slots


class SharedTrainer(TorchTrainer):
    """A trainer for `TrainingQueue`: computes requests piece by piece, and several policies in one pass."""

    def __init__(
        self,
        config: TrainerConfig,
        keep: int,
        models: LoadedModels,
        deterministic: bool = False,
        slots: int | None = None,
    ) -> None:
        """Create a trainer without policies; see `TorchTrainer`. `slots`: limit of adapters in memory with gradients
        and optimizers; others are on disk, and return bit for bit when trained. None: unlimited.
        """
        super().__init__(config, keep, models, deterministic)
        self._merges = not deterministic
        self._slots = Slots(slots)
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

    async def forward_pieces(
        self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> Pieces[ForwardOutputs]:
        """Prepare a `forward`, which `compute` then executes piece by piece."""
        mine = self._policy(policy)
        mine.check_outputs(outputs)

        def work() -> Pieces[ForwardOutputs]:
            found: dict[ForwardOutput, list[Floats]] = {name: [] for name in outputs}
            return Pieces(mine.forward_passes(batch if outputs else (), found), lambda: found)

        return await self._serial.run(lambda: self._in_thread(work))

    async def gradient_pieces(
        self, policy: str, batch: Sequence[TrainSample], loss: LossSpec, logprobs: bool = False
    ) -> Pieces[StepReport]:
        """Prepare a `forward_backward`, which `compute` then executes piece by piece.

        No other gradient or update of the policy may be computed until the last piece.
        """
        mine = self._policy(policy)

        def again() -> Gradient:
            made, _ = mine.gradient(batch, loss, logprobs)
            assert isinstance(made, Gradient)
            return made

        def work() -> Pieces[StepReport]:
            gradient, optimizer = mine.gradient(batch, loss, logprobs)
            if self._merges and mine.model.base is not None and isinstance(gradient, Gradient):
                return GradientPieces(gradient, again, optimizer, mine.model.base)
            return Pieces(gradient.passes(), gradient.report, optimizer)

        return await self._serial.run(lambda: self._in_thread(work))

    async def compute(self, pieces: Mapping[str, Pieces[Any]]) -> dict[str, Exception]:
        """Compute the next piece of requests, by policy, in one pass.

        Several requests must have the same `base`, and be no more than `most_together`.

        Returns:
            What has failed, by policy: then that policy is as before its request.
        """
        return await self._serial.run(lambda: self._in_thread(lambda: self._compute(pieces)))

    def _compute(self, pieces: Mapping[str, Pieces[Any]]) -> dict[str, Exception]:
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
        base = next(iter(policies.values())).model.base
        assert base is not None
        if base not in self._mixed:
            self._mixed[base] = MixedModel(base)
        return self._mixed[base]

    def _at_hand(self, name: str) -> TorchPolicy:
        policy = self._policy(name)
        self._slots.use({name: policy})
        return policy

    def _add(self, name: str, policy: TorchPolicy) -> None:
        self._slots.use({name: policy})
        super()._add(name, policy)

    def _drop(self, name: str) -> None:
        super()._drop(name)
        self._slots.forget(name)
        bases = {other.model.base for other in self._policies.values()}
        self._mixed = {base: mixed for base, mixed in self._mixed.items() if base in bases}

    async def close(self) -> None:
        """Finish earlier requests, and remove adapters from disk; see `Trainer.close`."""
        await super().close()
        self._slots.close()
