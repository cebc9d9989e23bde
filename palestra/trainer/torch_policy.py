"""One policy that is trained in this process: float32 master weights, bf16 compute, AdamW; perhaps with a critic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.algorithms.base import CriticKind, ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec, ValueLoss
from palestra.algorithms.losses import build_loss
from palestra.config import TrainerConfig
from palestra.errors import ConfigError
from palestra.faults import fault_point
from palestra.grammars.matcher import TRAINER_BOUNDS, vocabulary_of
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import CausalLM
from palestra.models.device import precision_of, return_freed_memory
from palestra.trainer import checkpoint
from palestra.trainer.base import Network, OptimParams, OptimReport, StepReport, record_problems
from palestra.trainer.constraints import GrammarMasks, choices_of, grammar_problem
from palestra.trainer.critic import Critic, CriticGradient, copy_weights
from palestra.trainer.gradient import Gradient, numbers_by_row
from palestra.trainer.optimizer import Named, Optimizer
from palestra.trainer.packing import MicroBatch, Pass, pack
from palestra.trainer.serial import VersionedPolicy
from palestra.trainer.token_forward import TokenForward, columns_of
from palestra.types.calls import Floats
from palestra.types.records import TrainSample

# More tokens are slower even on two cores: attention in a tree takes time with its square (docs/benchmarks.md).
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
OPTIMIZER = "optimizer"  # prefix of its files in a checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyNetworks:
    """The networks of a policy.

    Attributes:
        model: its trained weights are float32.
        frozen: models that are never trained, by output: `reference_logprobs`, `teacher_logprobs`.
        critic: a float32 copy of the policy's model; None: no critic.
        critic_kind: what the critic's values are of.
        critic_target: target copy of a critic of actions.
    """

    model: CausalLM
    tokenizer: Any
    frozen: Mapping[ForwardOutput, CausalLM] = field(default_factory=dict)
    critic: CausalLM | None = None
    critic_kind: CriticKind = "states"
    critic_target: CausalLM | None = None


class TorchPolicy(VersionedPolicy):
    """The weights, the optimizer and the version of one policy; the trainer's thread runs its methods."""

    def __init__(
        self,
        networks: PolicyNetworks,
        config: TrainerConfig,
        make_optimizer: Callable[[Named], Optimizer] = Optimizer,
        device: torch.device | None = None,
    ) -> None:
        """Take over a model's weights as they are, at version 0.0. The networks compute in the precision of `config`
        from now on; without `device` they are where their weights are.
        """
        model, tokenizer = networks.model, networks.tokenizer
        device = device or model.device
        model.compute_in(precision_of(config.dtype, device))
        self.model, self._tokenizer = model, tokenizer
        self.optimizer = make_optimizer(model.own_parameters())
        self.micro_batch_tokens = config.micro_batch_tokens or MICRO_BATCH_TOKENS[device.type]
        self._grammars = Grammars(vocabulary_of(tokenizer, model.vocab_size), TRAINER_BOUNDS)
        masks = GrammarMasks(self._grammars)
        self._forward = TokenForward(model, masks, device)
        self._frozen = {name: TokenForward(other, masks, device) for name, other in networks.frozen.items()}
        self._critic = (
            None
            if networks.critic is None
            else Critic(networks.critic, config, networks.critic_kind, networks.critic_target)
        )

    @property
    def parameters(self) -> Named:
        """Return each weight that is trained once, with its name."""
        return self.optimizer.parameters

    def close(self) -> None:
        """Stop the process that compiles the policy's grammars."""
        self._grammars.close()

    def untrainable(self, batch: Sequence[TrainSample]) -> dict[str, str]:
        """Find episodes with numbers that are not finite, unknown tokens, or replies outside their grammar.

        See `Trainer.untrainable`.
        """
        found = record_problems(batch)
        for sample in batch:
            if sample.episode_id not in found:
                outside = (sample.ids < 0) | (sample.ids >= self.model.vocab_size)
                problem = grammar_problem(sample, self._grammars)
                if outside.any():
                    problem = f"token {int(sample.ids[outside][0])} is none of the model's {self.model.vocab_size}"
                if problem is not None:
                    found[sample.episode_id] = problem
        return found

    def choices(self, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply that could be sampled under a grammar; see `Trainer.choices`."""
        return choices_of(grammar, max_tokens, most, self._grammars, self._tokenizer.eos_token_id)

    def check_outputs(self, outputs: Collection[ForwardOutput]) -> None:
        """Raise ConfigError unless `forward` can compute these outputs."""
        known: set[ForwardOutput] = {"old_logprobs"}
        known |= self._frozen.keys()
        known |= self._critic.outputs if self._critic is not None else set()
        if unknown := set(outputs) - known:
            raise ConfigError(f"this trainer can't compute {', '.join(sorted(unknown))} of this policy")

    def forward(self, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]) -> ForwardOutputs:
        """Return numbers of the trained tokens of rows: for each output a float32 [N] a row, else NaN."""
        found: dict[ForwardOutput, list[Floats]] = {name: [] for name in outputs}
        for micro, work, _ in self.forward_passes(batch, found):
            work(micro)
        return found

    def forward_passes(self, batch: Sequence[TrainSample], found: dict[ForwardOutput, list[Floats]]) -> list[Pass]:
        """Return what `forward` has to compute; each pass adds its rows to `found`, by output."""

        def add(micro: MicroBatch) -> None:
            computed = self._forward_of(micro, found.keys())
            for name, rows in found.items():
                rows += numbers_by_row(micro, computed[name])

        return [Pass(micro, add) for micro in pack(batch, self.micro_batch_tokens)]

    def _forward_of(self, micro: MicroBatch, outputs: Collection[ForwardOutput]) -> dict[ForwardOutput, Tensor]:
        """Return outputs of one micro-batch, [T] each."""
        computed: dict[ForwardOutput, Tensor] = {}
        if "old_logprobs" in outputs:
            computed["old_logprobs"] = self._logprobs(self._forward, micro)
        for name in self._frozen.keys() & outputs:
            computed[name] = self._logprobs(self._frozen[name], micro)
        if self._critic is not None and (wanted := self._critic.outputs & set(outputs)):
            computed |= self._critic.values(micro, wanted)
        return computed

    def forward_backward(self, batch: Sequence[TrainSample], spec: LossSpec, logprobs: bool = False) -> StepReport:
        """Add the gradient of a batch, or nothing if that fails; see `Trainer.forward_backward`."""
        gradient, optimizer = self.gradient(batch, spec, logprobs)
        # Without the copy, a request that fails halfway and is sent again would add a part of its gradient twice.
        before = optimizer.gradient()
        try:
            for micro, work, _ in gradient.passes():
                work(micro)
        except Exception:
            optimizer.put_gradient(before)
            raise
        return gradient.report()

    def gradient(
        self, batch: Sequence[TrainSample], spec: LossSpec, logprobs: bool = False
    ) -> tuple[Gradient | CriticGradient, Optimizer]:
        """Return the losses of a batch, of which nothing is computed yet, and the optimizer that applies the gradient.
        The loss of a value has the critic's gradient, and no logprobs.
        """
        loss = build_loss(spec)
        micro_batches = pack(batch, self.micro_batch_tokens)
        if not isinstance(loss, ValueLoss):
            return Gradient(self._forward, self.version, batch, spec, micro_batches, logprobs), self.optimizer
        if self._critic is None:
            raise ConfigError(f"the loss {loss.name!r} is of a critic, and this policy has none")
        return CriticGradient(self._critic, loss, micro_batches), self._critic.optimizer

    def _logprobs(self, model: TokenForward, micro: MicroBatch) -> Tensor:
        """Return the log-probabilities [T] of a micro-batch's trained tokens under a model, without gradient."""
        with torch.no_grad():
            return model.logprobs(micro, columns_of(micro, self.model.device))

    def optim_step(self, params: OptimParams, network: Network) -> OptimReport:
        """Apply the gradient unless it is not finite, clear it, and count the version; see `Trainer.optim_step`."""
        if network == "critic":
            if self._critic is None:
                raise ConfigError("this policy has no critic")
            return self._critic.optim_step(params)
        fault_point("before_step")
        report = self.optimizer.step(params)
        if report.applied:
            self.count_update()
        fault_point("after_step")
        return report

    def save(self, folder: Path, state: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint that transformers can load; see `Trainer.save`."""
        written = checkpoint.write(folder, int(state["step"]), self._fill, self.stored(state), keep)
        return_freed_memory()  # here, because a checkpoint takes long in any case and is written every few steps
        return written

    def save_weights(self, folder: Path, step: int) -> None:
        """Write weights and tokenizer alone; see `Trainer.save_weights`."""
        checkpoint.write_weights_folder(
            folder, step, lambda path: self.model.save(path, self._tokenizer), self.stored({})
        )
        return_freed_memory()

    def optimizers(self) -> list[tuple[str, Optimizer]]:
        """Return the optimizers of the policy's networks, by names of files."""
        own = [("policy", self.optimizer)]
        return own if self._critic is None else [*own, ("critic", self._critic.optimizer)]

    def _fill(self, folder: Path) -> None:
        """Write weights, tokenizer, optimizer and critic into a checkpoint's folder."""
        self.model.save(folder, self._tokenizer)
        self.optimizer.write(folder, OPTIMIZER)
        if self._critic is not None:
            self._critic.write(folder, self._tokenizer)

    def load(self, folder: Path, step: int | None) -> dict[str, Any] | None:
        """Restore weights, optimizer, critic and version from the newest undamaged checkpoint, or that of a step."""
        found = checkpoint.good(folder, step)
        if found is None:
            return None
        path, state = found
        copy_weights(self.parameters, self.model.read(path), path)
        self.optimizer.read(path, OPTIMIZER)
        if self._critic is not None:
            self._critic.read(path)
        self.restore_version(state)
        return state
