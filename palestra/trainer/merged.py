"""Gradients of several policies with adapters on one base, in common passes.

The rows of each policy are packed as if they were alone, so that its losses, its shared prompts and the order of its
sums do not depend on others; micro-batches of several policies then go through the base together, as many as fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from palestra.algorithms.loss import LossSpec, ValueLoss
from palestra.algorithms.losses import build_loss
from palestra.models.causal_lm import CausalLM
from palestra.models.mixed_adapters import MixedModel, Runs
from palestra.trainer.base import OptimParams, StepReport
from palestra.trainer.gradient import Gradient
from palestra.trainer.packing import MicroBatch
from palestra.trainer.token_forward import flat_inputs
from palestra.trainer.torch_policy import TorchPolicy
from palestra.types.records import TrainSample


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientRequest:
    """The arguments of one `Trainer.forward_backward`."""

    policy: str
    batch: Sequence[TrainSample]
    loss: LossSpec
    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRequest:
    """The arguments of one `Trainer.optim_step` of a policy's own network."""

    policy: str
    params: OptimParams
    request_id: str


def groups_of(
    requests: Sequence[GradientRequest], bases: Sequence[CausalLM | None], most: int | None
) -> list[list[int]]:
    """Return the places of the requests that are computed together, in an order in which they can be computed.

    Args:
        requests: of any policies.
        bases: for each the base of its policy, which it is computed with; None: it is computed alone.
        most: how many policies a group has; None: any number. It has each once.
    """
    groups, newest = list[list[int]](), dict[int, list[int]]()
    for place, (request, base) in enumerate(zip(requests, bases, strict=True)):
        if base is None or isinstance(build_loss(request.loss), ValueLoss):
            groups.append([place])
            continue
        group = newest.get(id(base))
        if group is None or len(group) == most or any(requests[other].policy == request.policy for other in group):
            group = newest[id(base)] = []
            groups.append(group)
        group.append(place)
    return groups


@dataclass(slots=True, eq=False)
class _Work:
    """One policy's part of the common passes."""

    policy: TorchPolicy
    gradient: Gradient
    before: list[Tensor | None]  # its gradient before
    failure: Exception | None = None
    last: int = -1  # the newest pass that has a micro-batch of it


@dataclass(slots=True)
class _Pass:
    """Micro-batches that go through the base together."""

    parts: list[tuple[_Work, MicroBatch]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return how many tokens go through the base."""
        return sum(micro.tokens for _, micro in self.parts)


def merged_gradients(
    wanted: Sequence[tuple[TorchPolicy, GradientRequest]], mixed: MixedModel, tokens: int
) -> list[StepReport | Exception]:
    """Add the gradients of batches of different policies to theirs.

    Args:
        wanted: policies with adapters on the base of `mixed`, each once, and their batches, with losses of tokens.
        mixed: computes the passes.
        tokens: most of one pass, if no micro-batch has more.

    Returns:
        For each its report; or what failed, and then its gradient is as before, and the others have theirs.
    """
    found: list[StepReport | Exception | None] = [None] * len(wanted)
    work: dict[int, _Work] = {}
    for place, (policy, request) in enumerate(wanted):
        try:
            gradient = policy.gradient(request.batch, request.loss)
        except Exception as error:  # noqa: BLE001 - fails this request alone
            found[place] = error
        else:
            work[place] = _Work(policy, gradient, policy.optimizer.gradient())
    try:
        for one in _passes(list(work.values()), tokens):
            _add_gradients(one, mixed)
    except Exception:  # noqa: BLE001 - of a common pass: each is then computed alone, to find whose fault it is
        for place, part in work.items():
            part.policy.optimizer.put_gradient(part.before)
            found[place] = _alone(*wanted[place])
        return [one for one in found if one is not None]
    for place, part in work.items():
        if part.failure is not None:
            part.policy.optimizer.put_gradient(part.before)
        found[place] = part.failure or part.gradient.report()
    return [one for one in found if one is not None]


def _alone(policy: TorchPolicy, request: GradientRequest) -> StepReport | Exception:
    """Add the gradient of one policy by itself."""
    try:
        return policy.forward_backward(request.batch, request.loss)
    except Exception as error:  # noqa: BLE001 - of this request alone
        return error


def _passes(work: Sequence[_Work], tokens: int) -> list[_Pass]:
    """Put each micro-batch into the first pass that has room, after those of its policy before it."""
    passes = list[_Pass]()
    for part in work:
        for micro in part.gradient.micro_batches:
            room = (n for n, one in enumerate(passes) if n > part.last and one.tokens + micro.tokens <= tokens)
            part.last = next(room, len(passes))
            if part.last == len(passes):
                passes.append(_Pass())
            passes[part.last].parts.append((part, micro))
    return passes


def _add_gradients(one: _Pass, mixed: MixedModel) -> None:
    """Compute one pass, and add the gradient of each part; a part whose loss fails adds none.

    The losses' own gradients are computed part by part, so that the logits of one part exist at a time.
    """
    parts = [(part, micro) for part, micro in one.parts if part.failure is None]
    if not parts:
        return
    inputs = flat_inputs([tree for _, micro in parts for tree in micro.trees], mixed.model.device)
    runs: Runs = [(part.gradient.model.adapter, micro.tokens) for part, micro in parts]
    with torch.enable_grad():
        hidden = mixed.hidden(*inputs, runs)
    states = torch.split(hidden.detach(), [micro.tokens for _, micro in parts])
    gradients = list[Tensor]()
    for (part, micro), state in zip(parts, states, strict=True):
        own = state.clone().requires_grad_()
        try:
            part.gradient.loss_of(micro, own).backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - fails this request alone
            part.failure, own.grad = error, None
        gradients.append(torch.zeros_like(own) if own.grad is None else own.grad)
    hidden.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]
