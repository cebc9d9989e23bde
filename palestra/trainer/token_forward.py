"""What a model says of the trained tokens of a micro-batch, from one flat forward pass over its trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from palestra.config import TrainerConfig
from palestra.errors import ModelError
from palestra.models.causal_lm import CausalLM
from palestra.models.grammar_masks import unpack_bits
from palestra.models.vision.placed import PlacedPicture
from palestra.trainer.constraints import GrammarMasks, allowed_tokens
from palestra.trainer.packing import MicroBatch, Tree
from palestra.trainer.tree_attention import TreeAttention

# Positions whose logits are computed at a time: 256 x 49,152 floats are 50 MB, and several of them exist together.
LOGIT_CHUNK = {"cpu": 256, "cuda": 8192}
_IMPOSSIBLE = -1e9  # the score of tokens that can't be sampled: finite, so that 0 x score is 0 in the entropy


def columns_of(micro: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of `MicroBatch.targets`, [T] each, on a device."""
    return {name: column.to(device) for name, column in micro.targets().items()}


def flat_hidden(model: CausalLM, micro: MicroBatch) -> Tensor:
    """Return the model's last hidden states of all nodes of a micro-batch, float32 [N, hidden]."""
    return model.hidden(*flat_inputs(micro.trees, model.device), model.picture_rows(flat_pictures(model, micro)))


def flat_inputs(trees: Sequence[Tree], device: torch.device) -> tuple[Tensor, Tensor, TreeAttention]:
    """Return ids [N] and positions [N] of the nodes of trees, one tree after another, and their attention."""
    ids = torch.tensor([i for tree in trees for i in tree.ids], device=device)
    positions = torch.tensor([p for tree in trees for p in tree.positions], device=device)
    return ids, positions, TreeAttention(trees, device)


def flat_pictures(model: CausalLM, micro: MicroBatch) -> list[tuple[PlacedPicture, NDArray[np.int64]]]:
    """Return the pictures of a micro-batch, each with the nodes [F] of its placeholders; rows name shared ones again.

    Raises:
        ModelError: there is a picture, and the model reads text only.
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

    def __init__(self, model: CausalLM, config: TrainerConfig, masks: GrammarMasks) -> None:
        """Keep the model; nothing is computed yet.

        Args:
            model: the policy's, or a reference's.
            config: how many positions' logits may exist at a time.
            masks: walks the grammars of constrained replies.
        """
        self._model, self._masks = model, masks
        self._size = min(config.logit_chunk, LOGIT_CHUNK[model.device.type])

    def __call__(
        self,
        micro: MicroBatch,
        columns: dict[str, Tensor],
        *,
        entropy_gradient: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probabilities and the entropies at their positions, float32 [T] each.

        Logits of at most `logit_chunk` positions exist at a time, because T x V floats would not fit into memory; with
        more positions the logits are computed again in the backward pass.

        Args:
            micro: trees of rows.
            columns: its columns on the model's device (`columns_of`).
            entropy_gradient: whether the entropies have a gradient, as the log-probabilities have.
            hidden: the last hidden states of all nodes, [N, hidden]; None: they are computed.
        """
        chunk = self._with_entropy if entropy_gradient else self._chunk
        states, pieces = self._pieces(chunk, micro, columns, hidden)
        if not pieces:
            empty = states.sum(dtype=torch.float32).expand(0)
            return empty, empty if entropy_gradient else empty.detach()
        return torch.cat([p for p, _ in pieces]), torch.cat([e for _, e in pieces])

    def logprobs(self, micro: MicroBatch, columns: dict[str, Tensor]) -> Tensor:
        """Return the targets' log-probabilities alone, float32 [T]: for a pass that needs no entropies.

        Args:
            micro: trees of rows.
            columns: its columns on the model's device.
        """
        hidden, pieces = self._pieces(self._chosen, micro, columns)
        return torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.float32)

    def _pieces(
        self, chunk: Callable[..., Any], micro: MicroBatch, columns: dict[str, Tensor], states: Tensor | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Return the hidden states [T, hidden] that predict the targets, and what `chunk` returns for parts of them.

        Args:
            chunk: is given hidden states, targets, temperatures and, if a grammar restricts any, the allowed tokens.
            micro: trees of rows.
            columns: its columns on the model's device.
            states: the last hidden states of all nodes, [N, hidden]; None: they are computed.
        """
        states = flat_hidden(self._model, micro) if states is None else states
        hidden = states.index_select(0, columns["source"])
        allowed = allowed_tokens(micro.samples, self._masks, self._model.vocab_size)
        given = [columns["target"], columns["temperature"]]
        if allowed is not None:
            given.append(allowed.to(hidden.device))
        return hidden, [
            _call(
                chunk,
                hidden[i : i + self._size],
                *(column[i : i + self._size] for column in given),
                again=len(hidden) > self._size,
            )
            for i in range(0, len(hidden), self._size)
        ]

    def _chosen(self, hidden: Tensor, target: Tensor, temperature: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return log-probabilities, [T]; see `_scores`."""
        scores, total = self._scores(hidden, temperature, allowed)
        return scores.gather(1, target.unsqueeze(1)).squeeze(1) - total

    def _chunk(
        self, hidden: Tensor, target: Tensor, temperature: Tensor, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities with gradient and entropies without, [T] each; see `_scores`."""
        scores, total = self._scores(hidden, temperature, allowed)
        chosen = scores.gather(1, target.unsqueeze(1)).squeeze(1) - total
        with torch.no_grad():
            return chosen, _entropy(scores, total)

    def _with_entropy(
        self, hidden: Tensor, target: Tensor, temperature: Tensor, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [T] each, both with gradient; see `_scores`."""
        scores, total = self._scores(hidden, temperature, allowed)
        return scores.gather(1, target.unsqueeze(1)).squeeze(1) - total, _entropy(scores, total)

    def _scores(self, hidden: Tensor, temperature: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the scores [T, V] of the positions of one chunk, and the logarithm [T] of the sum of their exponents.

        Args:
            hidden: [T, hidden], at the positions that predict the targets.
            temperature: [T], at which the tokens were sampled.
            allowed: [T, B] bits of the tokens that could have been sampled; None: all.
        """
        scores = self._model.logits(hidden) / temperature.unsqueeze(1)
        if allowed is not None:  # the distribution from which the token was sampled had no other tokens
            scores = scores.masked_fill(~unpack_bits(allowed, scores.shape[1]), _IMPOSSIBLE)
        return scores, scores.logsumexp(dim=-1)


def _entropy(scores: Tensor, total: Tensor) -> Tensor:
    """Return the entropies [T] of the distributions with scores [T, V] and logarithms of sums [T]."""
    mean_score = ((scores - total.unsqueeze(1)).exp() * scores).sum(dim=-1)
    return total - mean_score


def _call(function: Callable[..., Any], *arguments: Tensor, again: bool) -> Any:
    """Call `function`; with `again` its intermediate results are dropped and computed again in the backward pass.

    Args:
        function: returns tensors.
        arguments: tensors, such as [T, hidden].
        again: whether to save memory.
    """
    return recompute(function, *arguments, use_reentrant=False) if again else function(*arguments)
