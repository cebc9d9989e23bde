"""A critic: a copy of the policy's model with a value head in place of the head that predicts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from palestra.algorithms.loss import Max, Mean, Reduction, Sum, ValueInputs, ValueLoss
from palestra.config import TrainerConfig
from palestra.errors import CheckpointError
from palestra.models.causal_lm import CausalLM
from palestra.trainer.base import CRITIC_METRICS, OptimParams, OptimReport
from palestra.trainer.optimizer import Optimizer, read_shards, write_shards
from palestra.trainer.packing import MicroBatch
from palestra.trainer.token_forward import columns_of, flat_hidden

_WEIGHTS, _MOMENTS = "critic-weights", "critic-optimizer"  # prefixes of the files in a checkpoint


class Critic:
    """The weights and the optimizer of a critic; its methods run in the trainer's thread.

    Attributes:
        optimizer: AdamW over the weights of the body and of the value head.
    """

    def __init__(self, model: CausalLM, config: TrainerConfig) -> None:
        """Take over a model's weights, float32, and give it a value head of zeros: every value is 0 at first.

        Args:
            model: a model of the critic's own; what only predicts tokens of it is never used.
            config: how gradients are computed.
        """
        model.compute_in(getattr(torch, config.dtype))
        self._model = model
        self._head = nn.Linear(int(model.config.hidden_size), 1, device=model.device)
        nn.init.zeros_(self._head.weight)  # of random values, the first advantages would be noise
        nn.init.zeros_(self._head.bias)
        body = [(f"body.{name}", parameter) for name, parameter in model.model.base_model.named_parameters()]
        head = [(f"value_head.{name}", parameter) for name, parameter in self._head.named_parameters()]
        self.optimizer = Optimizer([*body, *head])

    def values(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the values of the states before and after each trained token, float32 [T] each, without gradient."""
        columns = columns_of(micro, self._model.device)
        with torch.no_grad():
            of_nodes = self._values(flat_hidden(self._model, micro))
        return of_nodes.index_select(0, columns["source"]), of_nodes.index_select(0, columns["node"])

    def add_gradient(self, micro: MicroBatch, loss: ValueLoss) -> dict[str, Reduction]:
        """Add the gradient of one micro-batch, and return its metrics.

        Args:
            micro: rows with `values` and `returns`.
            loss: the loss of a value.
        """
        columns = columns_of(micro, self._model.device)
        with torch.enable_grad():
            values = self._values(flat_hidden(self._model, micro).index_select(0, columns["source"]))
            output = loss(ValueInputs(values=values, old_values=columns["values"], returns=columns["returns"]))
            total = (output.loss * columns["loss_weights"]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        error = (values.detach() - columns["returns"]).abs()
        found: dict[str, Reduction] = {
            "critic_loss": Sum(total.detach()),
            "critic_error_mean": Mean(error),
            "critic_error_max": Max(error),
        }
        assert found.keys() == {metric.name for metric in CRITIC_METRICS}
        return {**output.metrics, **found}

    def optim_step(self, params: OptimParams) -> OptimReport:
        """Apply the gradient unless it is not finite, and clear it."""
        return self.optimizer.step(params)

    def write(self, folder: Path) -> None:
        """Write weights and optimizer into a checkpoint's folder."""
        write_shards(folder, _WEIGHTS, [(name, p.detach()) for name, p in self.optimizer.parameters])
        self.optimizer.write(folder, _MOMENTS)

    def read(self, folder: Path) -> None:
        """Take over weights and optimizer from a checkpoint's folder.

        Raises:
            CheckpointError: the checkpoint has no critic, or that of another model.
        """
        copy_weights(self.optimizer.parameters, read_shards(folder, _WEIGHTS), folder)
        self.optimizer.read(folder, _MOMENTS)

    def _values(self, hidden: Tensor) -> Tensor:
        """Return the values [T] of hidden states [T, hidden]; the head computes in float32."""
        values: Tensor = self._head(hidden.to(self._head.weight.dtype)).squeeze(-1)
        return values


def copy_weights(parameters: Sequence[tuple[str, nn.Parameter]], weights: dict[str, Tensor], path: Path) -> None:
    """Copy weights of a checkpoint into parameters of the same names.

    Args:
        parameters: each weight once, with its name.
        weights: by name, on the CPU; matrices are [n, d], norms and biases [d].
        path: of the checkpoint, for the message.

    Raises:
        CheckpointError: one is not there, or has another shape.
    """
    for name, parameter in parameters:
        if name not in weights or weights[name].shape != parameter.shape:
            raise CheckpointError(f"{path} has no weight {name} of shape {tuple(parameter.shape)}: another model")
        with torch.no_grad():
            parameter.copy_(weights[name])
