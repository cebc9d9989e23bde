"""What a model says of the trained tokens of a micro-batch, from one flat forward pass over its trees.

Logits are the largest tensors of a step, [T, V], and memory traffic takes longer than the arithmetic. Autograd would
make a tensor of their size for each operation, forward and backward; here each direction makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint as recompute

from palestra.errors import ModelError
from palestra.models.causal_lm import CausalLM
from palestra.models.output_head import Correction, HeadWeights, RoundedHead, unpack_bits
from palestra.models.vision.vision import AXES, PictureRows, PlacedPicture
from palestra.trainer.constraints import GrammarMasks, allowed_tokens
from palestra.trainer.packing import MicroBatch, Tree
from palestra.trainer.tree_attention import TreeAttention
from palestra.types.calls import TokenSequence

T = TypeVar("T")


@dataclass(slots=True)
class Measured:
    """Results of the first pass over logits, reused when they are recomputed.

    Attributes:
        totals: [T, 1], logsumexp of the logits; None: not computed yet.
        entropies: [T], without gradient; None: not computed yet.
    """

    totals: Tensor | None = None
    entropies: Tensor | None = None


def token_logprobs(scores: Tensor, target: Tensor, measured: Measured | None = None) -> Tensor:
    """Return the log-probabilities [T] of the targets, with gradient. Scores are float32 [T, V], finite. `measured` has
    results for the same logits, and is filled if it is empty.
    """
    found: Tensor = _Logprobs.apply(scores, target, measured)  # type: ignore[no-untyped-call]
    return found


def token_logprobs_and_entropies(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the targets and the entropies, [T] each, both with gradient. Scores are float32
    [T, V], finite.
    """
    found: tuple[Tensor, Tensor] = _LogprobsAndEntropies.apply(scores, target)  # type: ignore[no-untyped-call]
    return found


class _Context(FunctionCtx):
    """What a forward pass leaves to the backward pass."""

    saved_tensors: tuple[Tensor, ...]


class _Logprobs(Function):
    @staticmethod
    def forward(ctx: _Context, scores: Tensor, target: Tensor, measured: Measured | None) -> Tensor:
        """Return log-probabilities [T]."""
        total = None if measured is None else measured.totals
        if total is None:
            parts, mass, total = _parts(scores)
            if measured is not None:
                measured.totals = total
                measured.entropies = (total - parts.mul_(scores).sum(dim=1, keepdim=True) / mass).squeeze(1)
        ctx.save_for_backward(scores, target, total)
        return _chosen(scores, target, total)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient [T, V] of the scores: (chosen - p) times that of the log-probability."""
        scores, target, total = ctx.saved_tensors
        of_logprob = gradients[0].unsqueeze(1)
        found = (scores - total).exp_().mul_(-of_logprob)
        return found.scatter_add_(1, target.unsqueeze(1), of_logprob), None, None


class _LogprobsAndEntropies(Function):
    @staticmethod
    def forward(ctx: _Context, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [T] each."""
        parts, mass, total = _parts(scores)
        mean = parts.mul_(scores).sum(dim=1, keepdim=True) / mass  # of the scores
        ctx.save_for_backward(scores, target, total, mean)
        return _chosen(scores, target, total), (total - mean).squeeze(1)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient [T, V] of the scores: that of the entropy is -p (score - mean score)."""
        scores, target, total, mean = ctx.saved_tensors
        of_logprob, of_entropy = (gradient.unsqueeze(1) for gradient in gradients)
        found = (scores - mean).mul_(-of_entropy).sub_(of_logprob).mul_((scores - total).exp_())
        return found.scatter_add_(1, target.unsqueeze(1), of_logprob), None


def _parts(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(scores - max) [T, V], its sums [T, 1], and the logsumexp of the scores [T, 1]."""
    top = scores.amax(dim=1, keepdim=True)
    parts = (scores - top).exp_()
    mass = parts.sum(dim=1, keepdim=True)
    return parts, mass, top + mass.log()


def _chosen(scores: Tensor, target: Tensor, total: Tensor) -> Tensor:
    return (scores.gather(1, target.unsqueeze(1)) - total).squeeze(1)


# Positions whose logits are computed at a time: 128 x 49,152 floats are 25 MB, and several of them exist together.
LOGIT_CHUNK = {"cpu": 128, "cuda": 2048}
_IMPOSSIBLE = -1e9  # the score of tokens that can't be sampled: finite, so that 0 x score is 0 in the entropy


def columns_of(micro: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of `MicroBatch.targets`, [T] each, on a device."""
    return {name: column.to(device) for name, column in micro.targets().items()}


def flat_hidden(
    model: CausalLM, micro: MicroBatch, weights: HeadWeights | None = None, pictures: PictureRows | None = None
) -> Tensor:
    """Return the model's last hidden states of all nodes of a micro-batch, float32 [N, hidden]. Pictures are computed
    unless they are given.
    """
    if pictures is None:
        pictures = flat_picture_rows(model, micro)
    ids, positions, attention = flat_inputs(micro.trees, model.device)
    return model.hidden(ids, flat_positions(model, micro, positions), attention, pictures, weights)


def flat_picture_rows(model: CausalLM, micro: MicroBatch) -> PictureRows | None:
    """Return the embeddings of a micro-batch's pictures, by node; None: no pictures."""
    return model.picture_rows(flat_pictures(model, micro))


def flat_inputs(trees: Sequence[Tree], device: torch.device) -> tuple[Tensor, Tensor, TreeAttention]:
    """Return the ids [N], positions [N] and attention of the nodes of trees, one tree after another."""
    ids = torch.tensor([i for tree in trees for i in tree.ids], device=device)
    positions = torch.tensor([p for tree in trees for p in tree.positions], device=device)
    return ids, positions, TreeAttention(trees, device)


def flat_positions(model: CausalLM, micro: MicroBatch, positions: Tensor) -> Tensor:
    """Return the positions of the nodes of a micro-batch: [N], or [3, N] if the model has 2D positions for images.

    A position depends only on earlier tokens, so rows that share a node agree on it.
    """
    found = positions
    for sample, offset, path in micro.samples:
        if not sample.media:
            continue
        own = model.positions(TokenSequence(sample.ids, sample.media))
        if own.ndim > 1:
            if found.ndim == 1:
                found = positions.repeat(AXES, 1)
            found[:, torch.from_numpy(path + offset).to(found.device)] = own.to(found.device)
    return found


def flat_pictures(model: CausalLM, micro: MicroBatch) -> list[tuple[PlacedPicture, NDArray[np.int64]]]:
    """Return the pictures of a micro-batch, each with the nodes [F] of its placeholders; shared ones occur several
    times.
    """
    found = list[tuple[PlacedPicture, NDArray[np.int64]]]()
    for sample, offset, path in micro.samples:
        if sample.media and model.vision is None:
            raise ModelError(f"a row of episode {sample.episode_id} has a picture, and the model reads text only")
        if sample.media and model.vision is not None:
            placed = model.vision.placed(sample.ids, sample.media)
            found += [(picture, path[picture.positions] + offset) for picture in placed]
    return found


class TokenForward:
    """Computes log-probabilities and entropies of trained tokens with one model."""

    def __init__(self, model: CausalLM, masks: GrammarMasks, device: torch.device) -> None:
        self.model, self._masks = model, masks
        self._size = LOGIT_CHUNK[device.type]

    def __call__(
        self,
        micro: MicroBatch,
        columns: dict[str, Tensor],
        *,
        entropy_gradient: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probabilities and the entropies at their positions, float32 [T] each.

        Logits of at most `LOGIT_CHUNK` positions exist at a time, because [T, V] floats would not fit into memory. With
        more positions the backward pass computes the logits again. `hidden` [N, hidden] are the last hidden states of
        all nodes, if they are known.
        """
        states, chunks = self._chunks(micro, columns, hidden)
        if not chunks:
            empty = states.sum(dtype=torch.float32).expand(0)
            return empty, empty if entropy_gradient else empty.detach()
        measure = self._with_entropy if entropy_gradient else self._measured
        pieces = [measure(chunk) for chunk in chunks]
        return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])

    def logprobs(self, micro: MicroBatch, columns: dict[str, Tensor], hidden: Tensor | None = None) -> Tensor:
        """Return the targets' log-probabilities alone, float32 [T]."""
        states, chunks = self._chunks(micro, columns, hidden)
        pieces = [self._alone(chunk) for chunk in chunks]
        return torch.cat(pieces) if pieces else states.new_zeros(0, dtype=torch.float32)

    def _chunks(
        self, micro: MicroBatch, columns: dict[str, Tensor], states: Tensor | None = None
    ) -> tuple[Tensor, list[_Chunk]]:
        """Return the hidden states [T, hidden] that predict the targets, and the chunks of their positions."""
        weights = self.model.head_weights()
        states = flat_hidden(self.model, micro, weights) if states is None else states
        hidden = states.index_select(0, columns["source"])
        allowed = allowed_tokens(micro.samples, self._masks, self.model.vocab_size)
        allowed = None if allowed is None else allowed.to(hidden.device)
        tempered, head = bool((columns["temperature"] != 1).any()), None if weights is None else RoundedHead(weights)
        return hidden, [
            _Chunk(
                hidden=hidden[part],
                head=head,
                target=columns["target"][part],
                temperature=columns["temperature"][part] if tempered else None,
                allowed=None if allowed is None else allowed[part],
                again=len(hidden) > self._size,
            )
            for part in (slice(i, i + self._size) for i in range(0, len(hidden), self._size))
        ]

    def _alone(self, chunk: _Chunk) -> Tensor:
        """Return log-probabilities, [T]."""
        return chunk.call(lambda hidden: token_logprobs(self._scores(hidden, chunk), chunk.target))

    def _measured(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Return log-probabilities with gradient and entropies without, [T] each."""
        measured = Measured()
        logprobs = chunk.call(lambda hidden: token_logprobs(self._scores(hidden, chunk), chunk.target, measured))
        assert measured.entropies is not None
        return logprobs, measured.entropies

    def _with_entropy(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [T] each, both with gradient."""
        return chunk.call(lambda hidden: token_logprobs_and_entropies(self._scores(hidden, chunk), chunk.target))

    def _scores(self, hidden: Tensor, chunk: _Chunk) -> Tensor:
        """Return the scores [T, V] from which the tokens of a chunk were drawn."""
        scores = self.model.logits(hidden, chunk.corrections, chunk.head)
        if chunk.temperature is not None:
            scores = scores / chunk.temperature.unsqueeze(1)
        if chunk.allowed is not None:  # the distribution from which the token was sampled had no other tokens
            scores = scores.masked_fill(~unpack_bits(chunk.allowed, scores.shape[1]), _IMPOSSIBLE)
        return scores


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Positions whose logits exist at the same time.

    Attributes:
        hidden: [T, hidden], at the positions that predict the targets.
        head: the output layer, for all chunks of the micro-batch; None: the model's module.
        temperature: [T], at which the tokens were sampled; None: all at 1.
        allowed: [T, B] bits of the tokens that could have been sampled; None: all.
        corrections: of the logits; they are not recomputed.
    """

    hidden: Tensor
    head: RoundedHead | None
    target: Tensor
    temperature: Tensor | None
    allowed: Tensor | None
    again: bool
    corrections: list[Correction] = field(default_factory=list)

    def call(self, function: Callable[[Tensor], T]) -> T:
        """Return what `function` returns for the hidden states."""
        found: T = recompute(function, self.hidden, use_reentrant=False) if self.again else function(self.hidden)
        return found
