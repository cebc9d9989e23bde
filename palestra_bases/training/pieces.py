"""Requests computed piece by piece, so that a trainer can interleave requests of several policies.

A piece is one micro-batch. Each policy's rows are packed separately and computed in order, so neither the pieces nor
their sums depend on other policies. Pieces of several policies with adapters on one base can share a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from palestra.models.adapter_stacks import Runs
from palestra.models.causal_lm import CausalLM
from palestra.models.mixed_adapters import MixedModel
from palestra.trainer.base import StepReport
from palestra.trainer.gradient import Gradient
from palestra.trainer.optimizer import Optimizer
from palestra.trainer.packing import MicroBatch, Pass
from palestra.trainer.token_forward import flat_inputs

T = TypeVar("T")


class Pieces(Generic[T]):
    """A request about one policy, split into micro-batches that are computed one after another."""

    def __init__(self, passes: Sequence[Pass], result: Callable[[], T], optimizer: Optimizer | None = None) -> None:
        """Begin with all passes left. `optimizer`: whose gradient the request adds to; None: no gradient."""
        self._left, self._result, self._optimizer = deque(passes), result, optimizer
        self._before: list[Tensor | None] | None = None  # the gradient before the first piece; None: it was not kept

    @property
    def tokens(self) -> int:
        """Return how many tokens the next piece has; 0: all pieces are computed."""
        return self._left[0].micro.tokens if self._left else 0

    @property
    def base(self) -> CausalLM | None:
        """Return the model that can compute the next piece together with others; None: it must be computed alone."""
        return None

    def compute(self) -> None:
        """Compute the next piece alone. After an error the caller must call `take_back`."""
        one = self._take()
        one.work(one.micro)

    def _take(self) -> Pass:
        """Return the next pass, and keep the gradient as it was before the request."""
        # Without the copy, a request that fails halfway and is sent again would add a part of its gradient twice.
        if self._optimizer is not None and self._before is None:
            self._before = self._optimizer.gradient()
        return self._left.popleft()

    def take_back(self) -> None:
        """Restore the gradient from before this request, so that it may be sent again."""
        if self._optimizer is not None and self._before is not None:
            self._optimizer.put_gradient(self._before)
            self._before = None

    def result(self) -> T:
        """Return the answer to the request. All pieces must be computed."""
        return self._result()


class GradientPieces(Pieces[StepReport]):
    """The gradient of a policy with an adapter, which can share passes with others."""

    def __init__(self, gradient: Gradient, again: Callable[[], Gradient], optimizer: Optimizer, base: CausalLM) -> None:
        super().__init__(gradient.passes(), gradient.report, optimizer)
        self.gradient, self._again = gradient, again
        self._base: CausalLM | None = base

    @property
    def base(self) -> CausalLM | None:
        """Return the model that can compute the next piece together with others; None: it must be computed alone."""
        return self._base if self._left and self._left[0].adds else None

    def take_next(self) -> MicroBatch:
        """Return the next micro-batch; the caller adds its gradient."""
        return self._take().micro

    def start_again(self) -> None:
        """Begin again, from now on alone: a common pass failed, and any of its policies may be the reason."""
        self.take_back()
        self.gradient, self._base = self._again(), None
        self._left, self._result = deque(self.gradient.passes()), self.gradient.report


def add_gradients(parts: Sequence[GradientPieces], mixed: MixedModel) -> list[Exception | None]:
    """Compute the next piece of several policies in one pass, and add each gradient to its policy's.

    Return each policy's error, or None; after an error the policy's gradient is as before its request. If the pass
    itself fails, all requests restart and are computed alone, so that none can fail the others.

    Args:
        parts: of different policies with adapters on the base of `mixed`, each with a piece left.
    """
    failures: list[Exception | None] = [None] * len(parts)
    try:
        _add_gradients(parts, mixed, failures)
    except Exception:  # noqa: BLE001 - raised again by the request whose fault it is, when that is computed alone
        return [_started_again(part) for part in parts]
    for part, failure in zip(parts, failures, strict=True):
        if failure is not None:
            part.take_back()
    return failures


def _started_again(part: GradientPieces) -> Exception | None:
    try:
        part.start_again()
    except Exception as error:  # noqa: BLE001 - fails this request alone
        return error
    return None


def _add_gradients(parts: Sequence[GradientPieces], mixed: MixedModel, failures: list[Exception | None]) -> None:
    """Compute one pass; a part whose loss fails adds no gradient, and its error is in `failures`.

    Loss gradients are computed part by part, so that only one part's logits exist at a time.
    """
    micro_batches = [part.take_next() for part in parts]
    inputs = flat_inputs([tree for micro in micro_batches for tree in micro.trees], mixed.model.device)
    runs: Runs = [(part.gradient.model.adapter, micro.tokens) for part, micro in zip(parts, micro_batches, strict=True)]
    with torch.enable_grad():
        hidden = mixed.hidden(*inputs, runs)
    states = torch.split(hidden.detach(), [micro.tokens for micro in micro_batches])
    gradients = list[Tensor]()
    for number, (part, micro, state) in enumerate(zip(parts, micro_batches, states, strict=True)):
        own = state.clone().requires_grad_()
        try:
            part.gradient.loss_of(micro, own).backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - fails this request alone
            failures[number], own.grad = error, None
        gradients.append(torch.zeros_like(own) if own.grad is None else own.grad)
    if hidden.requires_grad:  # not where all adapters are those of heads alone
        hidden.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]
