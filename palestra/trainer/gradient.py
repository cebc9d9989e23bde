"""The gradient of one batch of a policy: the loss of each micro-batch, with penalty and bonus, and its metrics.

Means have no gradient, so micro-batches stay independent. A micro-batch with only whole episodes computes its own
means. The others are computed once more beforehand, without a gradient, so that the result does not depend on packing
or on the size of micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from palestra.algorithms.loss import (
    KL_ESTIMATORS,
    Loss,
    LossInputs,
    LossMetric,
    LossSpec,
    Max,
    Mean,
    Reduction,
    Sum,
    kl_terms,
)
from palestra.algorithms.losses import build_loss
from palestra.errors import ConfigError, InvalidAlgorithm
from palestra.trainer.base import REFERENCE_METRICS, TRAINER_METRICS, StepReport
from palestra.trainer.metrics import MetricSums
from palestra.trainer.packing import MicroBatch, Pass
from palestra.trainer.token_forward import TokenForward, columns_of
from palestra.types.calls import Floats, PolicyVersion
from palestra.types.records import TrainSample


class SequenceMeans:
    """The mean of a number over the trained tokens of each episode of a batch."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Find the micro-batches that have a part of an episode only."""
        episodes = [{sample.episode_id for sample, _, _ in micro.samples} for micro in micro_batches]
        parts = Counter(name for names in episodes for name in names)
        self.split = [
            micro
            for micro, names in zip(micro_batches, episodes, strict=True)
            if any(parts[name] > 1 for name in names)
        ]
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, micro: MicroBatch, values: Tensor) -> None:
        """Add the numbers [T] of the trained tokens of a micro-batch of `split`."""
        _add(self._sums, micro, values)

    def of(self, micro: MicroBatch, values: Tensor) -> Tensor:
        """Return for each trained token of a micro-batch the mean over its episode, float32 [T], without a gradient.

        All micro-batches of `split` must have been added before.
        """
        sums = self._sums
        if not any(micro is other for other in self.split):
            sums = defaultdict(lambda: [0.0, 0.0])
            _add(sums, micro, values)
        columns = [
            np.full(int(sample.loss_mask.sum()), sums[sample.episode_id][0] / max(sums[sample.episode_id][1], 1.0))
            for sample, _, _ in micro.samples
        ]
        return torch.from_numpy(np.concatenate(columns)).to(values.device, torch.float32)


def _add(sums: defaultdict[str, list[float]], micro: MicroBatch, values: Tensor) -> None:
    """Add the numbers [T] of a micro-batch to sum and count of each episode; NaN (not sampled) does not count."""
    column = values.detach().double().cpu().numpy()
    start = 0
    for sample, _, _ in micro.samples:
        stop = start + int(sample.loss_mask.sum())
        entry = sums[sample.episode_id]
        own = column[start:stop]
        entry[0] += float(np.nansum(own))
        entry[1] += int((~np.isnan(own)).sum())
        start = stop


class Gradient:
    """The loss and the metrics of a batch, computed micro-batch by micro-batch."""

    def __init__(
        self,
        forward: TokenForward,
        version: PolicyVersion,
        batch: Sequence[TrainSample],
        spec: LossSpec,
        micro_batches: Sequence[MicroBatch],
        logprobs: bool = False,
    ) -> None:
        """Prepare a batch; nothing is computed yet. `micro_batches` are those of the whole batch; with `logprobs` the
        report has those of the trained tokens.
        """
        loss = build_loss(spec)
        assert isinstance(loss, Loss)
        self.model, self.micro_batches = forward.model, micro_batches
        self._forward, self._version, self._spec, self._loss = forward, version, spec, loss
        self.sums = MetricSums([metric.name for metric in _policy_metrics(spec, loss, batch)])
        self._means = SequenceMeans(micro_batches) if loss.over_sequences else None
        self._trained: list[tuple[MicroBatch, Tensor]] | None = [] if logprobs else None

    @property
    def unmeasured(self) -> Sequence[MicroBatch]:
        """Return the micro-batches that need `measure` before any call of `loss_of`.

        A loss over sequences needs it for episodes that are split over several micro-batches.
        """
        return () if self._means is None else self._means.split

    def passes(self) -> list[Pass]:
        """Return what has to be computed before `report`, in order."""
        measuring = [Pass(micro, self.measure, adds=False) for micro in self.unmeasured]
        return measuring + [Pass(micro, self.add) for micro in self.micro_batches]

    def add(self, micro: MicroBatch) -> None:
        """Add the gradient of one micro-batch."""
        loss = self.loss_of(micro)
        if loss.requires_grad:  # not where an adapter is of the head alone and no token is trained
            loss.backward()  # type: ignore[no-untyped-call]

    def measure(self, micro: MicroBatch, hidden: Tensor | None = None) -> None:
        """Add a micro-batch of `unmeasured` to the sequence means, by a forward pass without a gradient. `hidden` [N,
        hidden] are the last hidden states of all nodes, if they are known.
        """
        assert self._means is not None
        targets = columns_of(micro, self.model.device)
        with torch.no_grad():
            logprobs = self._forward.logprobs(micro, targets, hidden)
            self._means.add(micro, self._loss.of_sequence(self._inputs(logprobs, targets)))

    def loss_of(self, micro: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        """Return the loss of one micro-batch, a scalar with a gradient, and add up its metrics.

        `hidden` [N, hidden] are the last hidden states of all nodes, if they are known. Raises InvalidAlgorithm: the
        loss is not a number for each token.
        """
        targets = columns_of(micro, self.model.device)
        with torch.enable_grad():
            wanted = self._spec.entropy_coefficient != 0.0
            logprobs, entropy = self._forward(micro, targets, entropy_gradient=wanted, hidden=hidden)
            inputs = self._inputs(logprobs, targets)
            if self._means is not None:
                inputs = replace(inputs, sequence_means=self._means.of(micro, self._loss.of_sequence(inputs)))
            output = self._loss(inputs)
            _check_numbers(self._loss, micro, output.loss)
            losses, measured = _add_penalties(output.loss, inputs, entropy, self._spec)
            total = (losses * targets["loss_weights"]).sum()
        if self._trained is not None:
            self._trained.append((micro, logprobs.detach()))  # they stay on the device until all are computed
        sampled = targets["sampling_logprobs"].isfinite()  # other tokens could have been sampled, and were not
        gap = (logprobs.detach() - targets["sampling_logprobs"]).abs()
        found: dict[str, Reduction] = {
            **output.metrics,
            **measured,
            "loss": Sum(total.detach()),
            "entropy": Mean(entropy.detach()),
            "logprob_gap_mean": Mean(gap, sampled),
            "logprob_gap_max": Max(gap[sampled]),
        }
        self.sums.add(found)
        return total

    def report(self) -> StepReport:
        """Return metrics and counts, after `loss_of` was called for each micro-batch."""
        report = report_of(self.micro_batches, self.sums)
        if self._trained is None:
            return report
        return replace(
            report, logprobs=tuple(row for micro, found in self._trained for row in numbers_by_row(micro, found))
        )

    def _inputs(self, logprobs: Tensor, targets: Mapping[str, Tensor]) -> LossInputs:
        """Return the inputs of a loss for the tokens of a micro-batch."""
        return LossInputs(
            logprobs=logprobs,
            sampling_logprobs=targets["sampling_logprobs"],
            old_logprobs=targets.get("old_logprobs"),
            reference_logprobs=targets.get("reference_logprobs"),
            advantages=targets["advantages"],
            on_policy=(targets["version"] == targets["version"].new_tensor(self._version)).all(dim=1),
        )


def _policy_metrics(spec: LossSpec, loss: Loss, batch: Sequence[TrainSample]) -> tuple[LossMetric, ...]:
    """Return the metrics that a gradient of the policy reports."""
    reference = not batch or batch[0].reference_logprobs is not None
    if spec.kl_coefficient and not reference:
        raise ConfigError("a KL penalty needs rows with `reference_logprobs`")
    return (*TRAINER_METRICS, *(REFERENCE_METRICS if reference else ()), *loss.metrics)


def _add_penalties(
    losses: Tensor, inputs: LossInputs, entropy: Tensor, spec: LossSpec
) -> tuple[Tensor, dict[str, Reduction]]:
    """Return the losses [T] with penalty and bonus, and what was measured of both, whatever their coefficients."""
    now = inputs.logprobs.detach()
    # The tokens are of the sampling policy mu, so the mean of k3 with x = log mu - log pi is KL(mu || pi).
    log_ratio = inputs.sampling_logprobs - now
    found: dict[str, Reduction] = {"sampling_kl": Mean(kl_terms(log_ratio, "k3", torch.expm1), log_ratio.isfinite())}
    if inputs.reference_logprobs is not None:
        for estimator in KL_ESTIMATORS:
            terms = kl_terms(now - inputs.reference_logprobs, estimator, torch.expm1)
            found[f"reference_kl_{estimator}"] = Mean(terms)
        if spec.kl_coefficient:
            divergence = inputs.logprobs - inputs.reference_logprobs
            losses = losses + spec.kl_coefficient * kl_terms(divergence, spec.kl_estimator, torch.expm1)
    if spec.entropy_coefficient:
        losses = losses - spec.entropy_coefficient * entropy
    return losses, found


def report_of(micro_batches: Collection[MicroBatch], sums: MetricSums) -> StepReport:
    """Return the counts of a batch, and its metrics."""
    rows = [sample for micro in micro_batches for sample, _, _ in micro.samples]
    trained = int(sum(sample.loss_mask.sum() for sample in rows))
    return StepReport(
        rows=len(rows),
        trained_tokens=trained,
        forward_tokens=sum(micro.tokens for micro in micro_batches),
        flat_tokens=sum(len(sample.ids) for sample in rows),
        metrics=sums.result(trained),
    )


def numbers_by_row(micro: MicroBatch, numbers: Tensor) -> list[Floats]:
    """Spread numbers [T] of a micro-batch's trained tokens over its rows: float32 [N] each, NaN elsewhere."""
    found, start, flat = list[Floats](), 0, numbers.cpu().numpy()
    for sample, _, _ in micro.samples:
        row = np.full(len(sample.ids), np.nan, np.float32)
        stop = start + int(sample.loss_mask.sum())
        row[sample.loss_mask], start = flat[start:stop], stop
        found.append(row)
    return found


def _check_numbers(loss: Loss, micro: MicroBatch, values: Tensor) -> None:
    """Raise InvalidAlgorithm unless a loss is [T] finite numbers for the trained tokens of a micro-batch."""
    tokens = int(sum(sample.loss_mask.sum() for sample, _, _ in micro.samples))
    if values.shape != (tokens,):
        raise InvalidAlgorithm(
            f"the loss {loss.name!r} returns {list(values.shape)} numbers for {tokens} tokens; it returns one for each "
            "token"
        )
    if bool(values.isnan().any()):
        raise InvalidAlgorithm(_not_a_number(loss, micro, values))


def _not_a_number(loss: Loss, micro: MicroBatch, values: Tensor) -> str:
    """Describe the tokens and episodes for which a loss [T] is not a number."""
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
