"""AdamW over the named weights of one network, and its state on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from palestra.trainer.base import OptimParams, OptimReport

Named = Sequence[tuple[str, nn.Parameter]]
T = TypeVar("T")
_SHARD_BYTES = 2**28


class Optimizer:
    """AdamW over these weights.

    Attributes:
        parameters: each weight once, with its name.
        adamw: the optimizer of torch.
    """

    def __init__(self, parameters: Named) -> None:
        """Create the optimizer without moments.

        Args:
            parameters: each weight once, with its name.
        """
        self.parameters = parameters
        self.adamw = torch.optim.AdamW(
            [  # norms and biases, in the second group, do not decay, as in the Trainer of transformers
                {"params": [p for _, p in parameters if p.ndim >= 2]},
                {"params": [p for _, p in parameters if p.ndim < 2]},
            ],
            fused=True,
        )

    def whole_or_nothing(self, work: Callable[[], T]) -> T:
        """Run work that adds gradients, and take all of them back if it fails, so that it may be tried again."""
        # Without the copy, a request that fails halfway and is sent again would add a part of its gradient twice.
        before = [None if p.grad is None else p.grad.clone() for _, p in self.parameters]
        try:
            return work()
        except Exception:
            for (_, parameter), gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            raise

    def step(self, params: OptimParams) -> OptimReport:
        """Apply the gradient unless it is not finite, and clear it.

        Args:
            params: the numbers of this update.
        """
        for group, decay in zip(self.adamw.param_groups, (params.weight_decay, 0.0), strict=True):
            group |= {
                "lr": params.learning_rate,
                "betas": params.betas,
                "eps": params.epsilon,
                "weight_decay": decay,
            }
        norm = float(torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], params.max_grad_norm))
        finite = math.isfinite(norm)
        if finite:
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return OptimReport(learning_rate=params.learning_rate, grad_norm=norm if finite else 0.0, applied=finite)

    def write(self, folder: Path, prefix: str) -> None:
        """Write the moments into files of a folder, `PREFIX-N.safetensors`.

        Args:
            folder: where to write; it has to exist.
            prefix: of the files' names.
        """
        state = self.adamw.state
        write_shards(
            folder,
            prefix,
            ((f"{key}.{name}", value) for name, p in self.parameters for key, value in state.get(p, {}).items()),
        )

    def read(self, folder: Path, prefix: str) -> None:
        """Take over the moments that `write` has written; a weight without any starts without.

        Args:
            folder: where they are.
            prefix: of the files' names.
        """
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in read_shards(folder, prefix).items():
            kind, _, name = key.partition(".")
            moments.setdefault(name, {})[kind] = value
        self._restore(moments)

    def _restore(self, moments: Mapping[str, dict[str, Tensor]]) -> None:
        """Give the optimizer the state of each parameter, by name, as read from a checkpoint on the CPU.

        The optimizer itself moves the tensors to the parameters' devices, and `step` to where a fused update reads it.

        Args:
            moments: for each weight its state; moments have the weight's shape, [n, d] or [d], and `step` is scalar.
        """
        state = self.adamw.state_dict()
        names = {parameter: name for name, parameter in self.parameters}
        ordered = [names[parameter] for group in self.adamw.param_groups for parameter in group["params"]]
        state["state"] = {number: moments[name] for number, name in enumerate(ordered) if name in moments}
        self.adamw.load_state_dict(state)


def write_shards(folder: Path, prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write named tensors into files of a folder, `PREFIX-N.safetensors`; nothing is written where there are none.

    Args:
        folder: where to write; it has to exist.
        prefix: of the files' names.
        tensors: matrices [n, d], norms and biases [d], or scalar, with names that are unique.
    """
    shard: dict[str, Tensor] = {}
    number = 0
    for name, tensor in tensors:
        shard[name] = tensor
        # safetensors copies a whole shard before it writes it, so shards are kept small.
        if sum(t.nbytes for t in shard.values()) >= _SHARD_BYTES:
            safetensors.torch.save_file(shard, folder / f"{prefix}-{number}.safetensors")
            shard, number = {}, number + 1
    if shard:
        safetensors.torch.save_file(shard, folder / f"{prefix}-{number}.safetensors")


def read_shards(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors, [n, d], [d] or scalar, of all files `PREFIX-*.safetensors` of a folder, on the CPU, by name.

    Args:
        folder: where they are.
        prefix: of the files' names.
    """
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob(f"{prefix}-*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found
