"""One pass of a base for several policies with adapters on it: the next micro-batch of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.models.mixed_adapters import MixedModel
from palestra.models.row_groups import Runs
from palestra.trainer.base import OptimParams
from palestra.trainer.pieces import GradientPieces
from palestra.trainer.token_forward import flat_inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRequest:
    """The arguments of one `Trainer.optim_step` of a policy's own network."""

    policy: str
    params: OptimParams
    request_id: str


def add_gradients(parts: Sequence[GradientPieces], mixed: MixedModel) -> list[Exception | None]:
    """Compute the next piece of several policies in one pass, and add each gradient to its policy's.

    Args:
        parts: requests of different policies with adapters on the base of `mixed`, each with a piece left.

    Returns:
        For each what has failed, or None; the gradient of a policy that fails is as before its request. If the pass
        itself fails, all requests begin again, each from then on alone, so that one can't take others with it.
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
    """Compute one pass; a part whose loss fails adds no gradient, and `failures` has why.

    The losses' own gradients are computed part by part, so that the logits of one part exist at a time.
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
