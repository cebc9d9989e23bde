"""One policy that is trained in this process: float32 master weights, bf16 compute, AdamW; perhaps with a critic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.algorithms.base import ForwardOutput
from palestra.algorithms.loss import BaseLoss, Loss, LossInputs, LossSpec, Max, Mean, Reduction, Sum, ValueLoss
from palestra.algorithms.losses import build_loss
from palestra.config import TrainerConfig
from palestra.errors import ConfigError, InvalidAlgorithm
from palestra.faults import fault_point
from palestra.grammars.bounds import TRAINER_BOUNDS
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import CausalLM
from palestra.models.device import return_freed_memory
from palestra.models.grammar_masks import vocabulary_of
from palestra.trainer import checkpoint
from palestra.trainer.base import CRITIC_METRICS, Network, OptimParams, OptimReport, StepReport
from palestra.trainer.constraints import GrammarMasks, choices_of, grammar_problem
from palestra.trainer.critic import Critic, copy_weights
from palestra.trainer.metrics import MetricSums
from palestra.trainer.optimizer import Named, Optimizer
from palestra.trainer.packing import MicroBatch, pack
from palestra.trainer.penalties import add_penalties, measured_with, policy_metrics
from palestra.trainer.sequences import SequenceMeans
from palestra.trainer.token_forward import TokenForward, columns_of
from palestra.trainer.untrainable import record_problems
from palestra.types.calls import Floats, PolicyVersion
from palestra.types.records import TrainSample

# More tokens are slower even on two cores: attention in a tree takes time with its square (docs/benchmarks.md).
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
_OPTIMIZER = "optimizer"  # prefix of its files in a checkpoint
AddGradient = Callable[[MicroBatch], dict[str, Reduction]]


class TorchPolicy:
    """The weights, the optimizer and the version of one policy; its methods run in the trainer's thread.

    Attributes:
        optimizer: AdamW over the policy's weights.
        version: of the weights.
        changed: whether there was an update since the weights were handed to an engine.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        config: TrainerConfig,
        frozen: Mapping[ForwardOutput, CausalLM] | None = None,
        critic: CausalLM | None = None,
        critic_target: CausalLM | None = None,
    ) -> None:
        """Take over a model's weights as they are, at version 0.0.

        Args:
            model: what is trained of it is float32; it computes in the precision of `config` from here on.
            tokenizer: the model's, which is written beside its weights.
            config: how gradients are computed.
            frozen: models in the precision of `config` that are never trained, by the output that each computes:
                `reference_logprobs`, `teacher_logprobs`; None: there are none.
            critic: a copy of the policy's model for a critic, float32; None: there is no critic.
            critic_target: another copy for a critic of actions; None: the critic is one of states.
        """
        model.compute_in(getattr(torch, config.dtype))
        self._model, self._tokenizer = model, tokenizer
        self.optimizer = Optimizer(model.own_parameters())
        self._micro_batch_tokens = config.micro_batch_tokens or MICRO_BATCH_TOKENS[model.device.type]
        self._grammars = Grammars(vocabulary_of(tokenizer, model.vocab_size), TRAINER_BOUNDS)
        masks = GrammarMasks(self._grammars)
        self._forward = TokenForward(model, config, masks)
        self._frozen = {name: TokenForward(other, config, masks) for name, other in (frozen or {}).items()}
        self._critic = None if critic is None else Critic(critic, config, critic_target)
        self.version = PolicyVersion(0, 0)
        self.changed = False

    @property
    def parameters(self) -> Named:
        """Return each weight that is trained once, with its name."""
        return self.optimizer.parameters

    def close(self) -> None:
        """End the processes that walk the policy's grammars."""
        self._grammars.close()

    def untrainable(self, batch: Sequence[TrainSample]) -> dict[str, str]:
        """Find episodes with numbers that are not finite, unknown tokens, or replies that miss their grammar.

        Returns:
            For each such episode its id and the reason; see `Trainer.untrainable`.
        """
        found = record_problems(batch)
        for sample in batch:
            if sample.episode_id not in found:
                outside = (sample.ids < 0) | (sample.ids >= self._model.vocab_size)
                problem = grammar_problem(sample, self._grammars)
                if outside.any():
                    problem = f"token {int(sample.ids[outside][0])} is none of the model's {self._model.vocab_size}"
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

    def forward(
        self, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]
    ) -> dict[ForwardOutput, list[Floats]]:
        """Return for each output and row the numbers of its trained tokens, float32 [N], else NaN.

        Args:
            batch: S rows.
            outputs: what `check_outputs` has let pass.
        """
        found: dict[ForwardOutput, list[Floats]] = {name: [] for name in outputs}
        for micro in pack(batch, self._micro_batch_tokens):
            computed: dict[ForwardOutput, Tensor] = {}
            if "old_logprobs" in found:
                computed["old_logprobs"] = self._logprobs(self._forward, micro)
            for name in found.keys() & self._frozen.keys():
                computed[name] = self._logprobs(self._frozen[name], micro)
            if self._critic is not None and (wanted := found.keys() & self._critic.outputs):
                computed |= self._critic.values(micro, wanted)
            for name, rows in found.items():
                rows += _rows_of(micro, computed[name])
        return found

    def forward_backward(self, batch: Sequence[TrainSample], spec: LossSpec, logprobs: bool = False) -> StepReport:
        """Add the gradient of the whole batch, or of nothing if an error occurs, so that the request may be sent again.

        Args:
            batch: S rows.
            spec: the loss of a token, or of a value: then the gradient is the critic's, and there are no logprobs.
            logprobs: whether the report has those of the trained tokens.

        Raises:
            ConfigError: it is a loss of values, and there is no critic; or a penalty needs logprobs of a reference that
                the rows do not have.
        """
        loss, micro_batches = build_loss(spec), pack(batch, self._micro_batch_tokens)
        if isinstance(loss, ValueLoss):
            critic = self._critic_for(loss)
            names = [metric.name for metric in (*CRITIC_METRICS, *loss.metrics)]
            return critic.optimizer.whole_or_nothing(
                lambda: self._all_micro_batches(micro_batches, names, lambda micro: critic.add_gradient(micro, loss))
            )
        names = [metric.name for metric in policy_metrics(spec, loss, measured_with(batch))]

        def work() -> StepReport:
            rows: list[Floats] | None = [] if logprobs else None
            means = self._sequence_means(micro_batches, loss) if loss.over_sequences else None
            report = self._all_micro_batches(
                micro_batches, names, lambda micro: self._add_gradient(micro, spec, loss, means, rows)
            )
            return report if rows is None else replace(report, logprobs=tuple(rows))

        return self.optimizer.whole_or_nothing(work)

    def _all_micro_batches(
        self, micro_batches: Sequence[MicroBatch], metrics: Collection[str], add_gradient: AddGradient
    ) -> StepReport:
        """Add the gradients of all micro-batches in order, and return their metrics and counts.

        Args:
            micro_batches: all rows of the batch.
            metrics: names of the metrics that are reported.
            add_gradient: adds the gradient of one micro-batch, and returns its metrics.
        """
        sums = MetricSums(metrics)
        for micro in micro_batches:
            sums.add(add_gradient(micro))
        rows = [sample for micro in micro_batches for sample, _, _ in micro.samples]
        trained = int(sum(sample.loss_mask.sum() for sample in rows))
        return StepReport(
            rows=len(rows),
            trained_tokens=trained,
            forward_tokens=sum(micro.tokens for micro in micro_batches),
            flat_tokens=sum(len(sample.ids) for sample in rows),
            metrics=sums.result(trained),
        )

    def _sequence_means(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> SequenceMeans:
        """Return the means over the episodes that are not whole in one micro-batch, by a pass without gradient."""
        means = SequenceMeans(micro_batches)
        for micro in means.split:
            targets = columns_of(micro, self._model.device)
            with torch.no_grad():
                logprobs = self._forward.logprobs(micro, targets)
                means.add(micro, loss.of_sequence(self._inputs(logprobs, targets)))
        return means

    def _inputs(self, logprobs: Tensor, targets: Mapping[str, Tensor]) -> LossInputs:
        """Return the inputs of a loss for the tokens of a micro-batch.

        Args:
            logprobs: float32 [T], of the trained tokens.
            targets: the columns of the micro-batch.
        """
        return LossInputs(
            logprobs=logprobs,
            sampling_logprobs=targets["sampling_logprobs"],
            old_logprobs=targets.get("old_logprobs"),
            reference_logprobs=targets.get("reference_logprobs"),
            advantages=targets["advantages"],
            on_policy=(targets["version"] == targets["version"].new_tensor(self.version)).all(dim=1),
        )

    def _add_gradient(
        self, micro: MicroBatch, spec: LossSpec, loss: Loss, means: SequenceMeans | None, rows: list[Floats] | None
    ) -> dict[str, Reduction]:
        """Add the gradient of one micro-batch to the policy's, and return its metrics.

        Args:
            micro: trees of rows.
            spec: has the coefficients of the penalties.
            loss: the loss of a token.
            means: over whole episodes; None: the loss needs none.
            rows: the logprobs of each row are added to it; None: they are not wanted.
        """
        targets = columns_of(micro, self._model.device)
        with torch.enable_grad():
            logprobs, entropy = self._forward(micro, targets, entropy_gradient=spec.entropy_coefficient != 0.0)
            inputs = self._inputs(logprobs, targets)
            if means is not None:
                inputs = replace(inputs, sequence_means=means.of(micro, loss.of_sequence(inputs)))
            output = loss(inputs)
            _check_numbers(loss, micro, output.loss)
            losses, measured = add_penalties(output.loss, inputs, entropy, spec)
            total = (losses * targets["loss_weights"]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        if rows is not None:
            rows += _rows_of(micro, logprobs.detach())
        sampled = targets["sampling_logprobs"].isfinite()  # other tokens could have been sampled, and were not
        gap = (logprobs.detach() - targets["sampling_logprobs"]).abs()
        return {
            **output.metrics,
            **measured,
            "loss": Sum(total.detach()),
            "entropy": Mean(entropy.detach()),
            "logprob_gap_mean": Mean(gap, sampled),
            "logprob_gap_max": Max(gap[sampled]),
        }

    def _logprobs(self, model: TokenForward, micro: MicroBatch) -> Tensor:
        """Return the log-probabilities [T] of a micro-batch's trained tokens under a model, without gradient."""
        with torch.no_grad():
            return model.logprobs(micro, columns_of(micro, self._model.device))

    def _critic_for(self, loss: BaseLoss) -> Critic:
        if self._critic is None:
            raise ConfigError(f"the loss {loss.name!r} is of a critic, and this policy has none")
        return self._critic

    def optim_step(self, params: OptimParams, network: Network) -> OptimReport:
        """Apply the gradient unless it is not finite, clear it, and count the version; see `Trainer.optim_step`.

        Args:
            params: the numbers of this update.
            network: whose gradient; the critic has no version.

        Raises:
            ConfigError: there is no critic.
        """
        if network == "critic":
            if self._critic is None:
                raise ConfigError("this policy has no critic")
            return self._critic.optim_step(params)
        fault_point("before_step")
        report = self.optimizer.step(params)
        if report.applied and not self.changed:  # all updates between two publications together make one version
            self.version, self.changed = self.version.following, True
        fault_point("after_step")
        return report

    def save(self, folder: Path, state: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint that transformers can load without conversion; see `Trainer.save`.

        Args:
            folder: where the checkpoints are.
            state: JSON to keep beside the weights.
            keep: how many checkpoints stay.
        """
        full = {**state, "incarnation": self.version.incarnation, "n": self.version.n}
        written = checkpoint.write(folder, int(state["step"]), self._fill, full, keep)
        return_freed_memory()  # here, because a checkpoint takes long in any case and is written every few steps
        return written

    def save_weights(self, folder: Path, step: int) -> None:
        """Write weights and tokenizer alone; see `Trainer.save_weights`.

        Args:
            folder: to write.
            step: after which the policy has these weights.
        """
        state = {"incarnation": self.version.incarnation, "n": self.version.n}
        checkpoint.write_weights(folder, step, lambda path: self._model.save(path, self._tokenizer), state)
        return_freed_memory()

    def _fill(self, folder: Path) -> None:
        """Write weights, tokenizer, optimizer and critic into a checkpoint's folder."""
        self._model.save(folder, self._tokenizer)
        self.optimizer.write(folder, _OPTIMIZER)
        if self._critic is not None:
            self._critic.write(folder)

    def load(self, folder: Path, step: int | None) -> dict[str, Any] | None:
        """Restore weights, optimizer, critic and version from the newest undamaged checkpoint, or that of a step."""
        found = checkpoint.good(folder, step)
        if found is None:
            return None
        path, state = found
        copy_weights(self.parameters, self._model.read(path), path)
        self.optimizer.read(path, _OPTIMIZER)
        if self._critic is not None:
            self._critic.read(path)
        self.version = PolicyVersion(int(state["incarnation"]), int(state["n"]))
        return state


def _rows_of(micro: MicroBatch, numbers: Tensor) -> list[Floats]:
    """Return numbers [T] of a micro-batch's trained tokens as a float32 [N] for each of its rows, else NaN."""
    found, start, flat = list[Floats](), 0, numbers.cpu().numpy()
    for sample, _, _ in micro.samples:
        row = np.full(len(sample.ids), np.nan, np.float32)
        stop = start + int(sample.loss_mask.sum())
        row[sample.loss_mask], start = flat[start:stop], stop
        found.append(row)
    return found


def _check_numbers(loss: Loss, micro: MicroBatch, values: Tensor) -> None:
    """Check what a loss has returned for the trained tokens of a micro-batch, which should be [T].

    Raises:
        InvalidAlgorithm: `values` are not one number for each token; the message names the episodes.
    """
    tokens = int(sum(sample.loss_mask.sum() for sample, _, _ in micro.samples))
    if values.shape != (tokens,):
        raise InvalidAlgorithm(
            f"the loss {loss.name!r} returns {list(values.shape)} numbers for {tokens} tokens; it returns one for each "
            "token"
        )
    if bool(values.isnan().any()):
        raise InvalidAlgorithm(_not_a_number(loss, micro, values))


def _not_a_number(loss: Loss, micro: MicroBatch, values: Tensor) -> str:
    """Return which tokens of which episodes a loss [T] is not a number for, in words."""
    wrong = values.detach().isnan().cpu().numpy()
    places, start = list[str](), 0
    for sample, _, _ in micro.samples:
        trained = np.flatnonzero(sample.loss_mask)
        found = trained[wrong[start : start + len(trained)]]
        start += len(trained)
        if len(found):
            places.append(f"token {int(found[0])} of episode {sample.episode_id}")
    return (
        f"the loss {loss.name!r} is not a number (NaN) for {int(wrong.sum())} tokens: {', '.join(places[:8])}"
        f"{', …' if len(places) > 8 else ''}; the weights are as before"
    )
