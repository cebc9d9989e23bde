"""Requests computed piece by piece, so that a trainer can interleave requests of several policies.

A piece is one micro-batch. Each policy's rows are packed separately and computed in order, so neither the pieces nor
their sums depend on other policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import ValueLoss
from palestra.models.causal_lm import CausalLM
from palestra.trainer.base import CRITIC_METRICS, StepReport
from palestra.trainer.critic import Critic
from palestra.trainer.gradient import Gradient, numbers_by_row, report_of
from palestra.trainer.metrics import MetricSums
from palestra.trainer.optimizer import Optimizer
from palestra.trainer.packing import MicroBatch
from palestra.types.calls import Floats

T = TypeVar("T")


class Pieces(ABC, Generic[T]):
    """A request about one policy, split into micro-batches that are computed one after another."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Begin with all micro-batches left."""
        self._left = deque(micro_batches)

    @property
    def tokens(self) -> int:
        """Return how many tokens the next piece has; 0: all pieces are computed."""
        return self._left[0].tokens if self._left else 0

    @property
    def base(self) -> CausalLM | None:
        """Return the model that can compute the next piece together with others; None: it must be computed alone."""
        return None

    def compute(self) -> None:
        """Compute the next piece alone. After an error the caller must call `take_back`."""
        self._compute(self._left.popleft())

    @abstractmethod
    def _compute(self, micro: MicroBatch) -> None: ...

    @abstractmethod
    def result(self) -> T:
        """Return the answer to the request. All pieces must be computed."""

    def take_back(self) -> None:
        """Undo the changes of all pieces, so that the request may be sent again."""

    def run(self) -> T:
        """Compute all pieces; a failure changes nothing."""
        try:
            while self.tokens:
                self.compute()
        except Exception:
            self.take_back()
            raise
        return self.result()


class ForwardPieces(Pieces[ForwardOutputs]):
    """Numbers of the trained tokens of rows."""

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        outputs: Collection[ForwardOutput],
        forward: Callable[[MicroBatch, Collection[ForwardOutput]], Mapping[ForwardOutput, Tensor]],
    ) -> None:
        """Begin without rows.

        Args:
            forward: returns the numbers of one micro-batch, [T] each.
        """
        super().__init__(micro_batches)
        self._forward = forward
        self._found: dict[ForwardOutput, list[Floats]] = {name: [] for name in outputs}

    def _compute(self, micro: MicroBatch) -> None:
        computed = self._forward(micro, self._found.keys())
        for name, rows in self._found.items():
            rows += numbers_by_row(micro, computed[name])

    def result(self) -> ForwardOutputs:
        """Return for each output and row the numbers of its trained tokens, float32 [N], NaN elsewhere."""
        return self._found


class _GradientOf(Pieces[StepReport]):
    """A request that adds to the gradient of one network."""

    def __init__(self, micro_batches: Sequence[MicroBatch], optimizer: Optimizer) -> None:
        super().__init__(micro_batches)
        self._optimizer = optimizer
        self._before: list[Tensor | None] | None = None  # the gradient before the first piece; None: there was none

    def keep_gradient(self) -> None:
        """Save the gradient from before this request, once."""
        # Without the copy, a request that fails halfway and is sent again would add a part of its gradient twice.
        if self._before is None:
            self._before = self._optimizer.gradient()

    def take_back(self) -> None:
        """Restore the gradient as it was before this request."""
        if self._before is not None:
            self._optimizer.put_gradient(self._before)
            self._before = None


class CriticPieces(_GradientOf):
    """A request that adds the gradient of a batch to a critic's gradient."""

    def __init__(self, micro_batches: Sequence[MicroBatch], critic: Critic, loss: ValueLoss) -> None:
        """Begin without a gradient."""
        super().__init__(micro_batches, critic.optimizer)
        self._all, self._critic, self._loss = micro_batches, critic, loss
        self._sums = MetricSums([metric.name for metric in (*CRITIC_METRICS, *loss.metrics)])

    def _compute(self, micro: MicroBatch) -> None:
        self.keep_gradient()
        self._sums.add(self._critic.add_gradient(micro, self._loss))

    def result(self) -> StepReport:
        """Return the counts and the metrics of the whole batch."""
        return report_of(self._all, self._sums)


class GradientPieces(_GradientOf):
    """The gradient of a policy.

    For a loss over sequences, the first pieces measure episodes that are split over several micro-batches, without a
    gradient.
    """

    def __init__(self, optimizer: Optimizer, make: Callable[[], Gradient], base: CausalLM | None) -> None:
        """Prepare the request.

        Args:
            make: returns the batch's `Gradient`, on which nothing was computed yet.
            base: computes it in common passes with other policies; None: it is computed alone.
        """
        self.gradient = make()
        super().__init__(self.gradient.micro_batches, optimizer)
        self._make, self._base = make, base
        self._unmeasured = deque(self.gradient.unmeasured)

    @property
    def tokens(self) -> int:
        """Return how many tokens the next piece has; 0: all pieces are computed."""
        return self._unmeasured[0].tokens if self._unmeasured else super().tokens

    @property
    def base(self) -> CausalLM | None:
        """Return the model that can compute the next piece together with others; None: it must be computed alone."""
        return None if self._unmeasured else self._base

    def compute(self) -> None:
        """Compute the next piece alone; see `Pieces.compute`."""
        if self._unmeasured:
            self.gradient.measure(self._unmeasured.popleft())
        else:
            super().compute()

    def _compute(self, micro: MicroBatch) -> None:
        self.keep_gradient()
        loss = self.gradient.loss_of(micro)
        if loss.requires_grad:  # not where an adapter is of the head alone and no token is trained
            loss.backward()  # type: ignore[no-untyped-call]

    def take_next(self) -> MicroBatch:
        """Return the next micro-batch; the caller adds its gradient."""
        self.keep_gradient()
        return self._left.popleft()

    def start_again(self) -> None:
        """Begin again, from now on alone: a common pass failed, and any of its policies may be the reason."""
        self.take_back()
        self.gradient, self._base = self._make(), None
        self._left, self._unmeasured = deque(self.gradient.micro_batches), deque(self.gradient.unmeasured)

    def result(self) -> StepReport:
        """Return the counts and the metrics of the whole batch."""
        return self.gradient.report()
