"""A critic: a copy of the policy's model with value heads in place of the language-model head.

A critic of states has one head. A critic of actions has two heads, and the smaller value counts, so that overestimation
does not feed itself. A target copy follows slowly and computes the critic's own targets (Haarnoja et al. 2018). A
critic of replies has one head, without a bias, as transformers' models for the classification of sequences have.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from palestra.algorithms.base import CriticKind, ForwardOutput
from palestra.algorithms.loss import Reduction, Sum, ValueInputs, ValueLoss
from palestra.config import TrainerConfig
from palestra.errors import CheckpointError, ConfigError
from palestra.models.causal_lm import CausalLM
from palestra.models.device import precision_of
from palestra.trainer.base import CRITIC_METRICS, OptimParams, OptimReport, StepReport
from palestra.trainer.checkpoint import FOLDER_OF_REWARDS
from palestra.trainer.gradient import report_of
from palestra.trainer.metrics import MetricSums
from palestra.trainer.optimizer import Optimizer, read_named, write_named
from palestra.trainer.packing import MicroBatch, Pass
from palestra.trainer.token_forward import columns_of, flat_hidden

_WEIGHTS, _MOMENTS, _TARGET = "critic-weights", "critic-optimizer", "critic-target"  # prefixes of files
OUTPUTS: Mapping[CriticKind, frozenset[ForwardOutput]] = {
    "states": frozenset({"values", "next_values"}),
    "actions": frozenset({"action_values", "target_action_values"}),
    "replies": frozenset({"action_values"}),
}
"""What each kind of critic computes."""
_HEAD_DEVIATION = 1e-2  # of the initial weights of twin heads: equal ones would stay equal for ever


class Critic:
    """The weights and the optimizer of a critic; its methods run in the trainer's thread."""

    def __init__(
        self, model: CausalLM, config: TrainerConfig, kind: CriticKind, target: CausalLM | None = None
    ) -> None:
        """Take over a model's float32 weights, and add value heads whose values begin at or near 0. The critic alone
        uses the model; `target` is the copy that a critic of actions has.
        """
        if kind == "replies":
            check_classifier(model)
        self._kind, self._net = kind, _ValueNet(model, config, kind)
        self._target = None if target is None else _ValueNet(target, config, kind)
        self.outputs = OUTPUTS[kind]
        self.optimizer = Optimizer(self._net.named_parameters())

    def values(self, micro: MicroBatch, outputs: Collection[ForwardOutput]) -> dict[ForwardOutput, Tensor]:
        """Return numbers of each trained token, float32 [T] for each output, without gradient."""
        columns = columns_of(micro, self._net.device)
        found: dict[ForwardOutput, Tensor] = {}
        with torch.no_grad():
            if self._kind == "states":
                (of_nodes,) = self._net(micro).unbind(-1)
                found["values"] = of_nodes.index_select(0, columns["source"])
                found["next_values"] = of_nodes.index_select(0, columns["node"])
                return found
            if "action_values" in outputs:
                found["action_values"] = self._net(micro, columns["node"]).amin(dim=-1)
            if "target_action_values" in outputs:
                assert self._target is not None
                found["target_action_values"] = self._target(micro, columns["node"]).amin(dim=-1)
        return found

    def add_gradient(self, micro: MicroBatch, loss: ValueLoss) -> dict[str, Reduction]:
        """Add the gradient of one micro-batch, and return its metrics."""
        columns = columns_of(micro, self._net.device)
        with torch.enable_grad():
            values = self._net(micro, columns["source" if self._kind == "states" else "node"])
            output = loss(ValueInputs(values=values, old_values=columns.get("values"), returns=columns["returns"]))
            total = (output.loss * columns["loss_weights"]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        found: dict[str, Reduction] = {"critic_loss": Sum(total.detach())}
        assert found.keys() == {metric.name for metric in CRITIC_METRICS}
        return {**output.metrics, **found}

    def optim_step(self, params: OptimParams) -> OptimReport:
        """Apply the gradient unless it is not finite, clear it, and update the target copy."""
        report = self.optimizer.step(params)
        if self._target is not None and report.applied:
            with torch.no_grad():
                for (_, copy), (_, own) in zip(self._target.named_parameters(), self.optimizer.parameters, strict=True):
                    copy.lerp_(own, params.target_rate)
        return report

    def write(self, folder: Path, tokenizer: Any) -> None:
        """Write weights and optimizer into a checkpoint's folder; `tokenizer` goes with a critic of replies."""
        own = [(name, parameter.detach()) for name, parameter in self.optimizer.parameters]
        if self._kind == "replies":
            write_reward_model(folder, self._net.model, tokenizer, own)
        else:
            write_named(folder, _WEIGHTS, own)
        self.optimizer.write(folder, _MOMENTS)
        if self._target is not None:
            write_named(folder, _TARGET, [(name, p.detach()) for name, p in self._target.named_parameters()])

    def read(self, folder: Path) -> None:
        """Load weights and optimizer from a checkpoint's folder."""
        parameters = self.optimizer.parameters
        if self._kind == "replies":
            saved = read_reward_model(folder, self._net.model, [name for name, _ in parameters])
        else:
            saved = read_named(folder, _WEIGHTS)
        copy_weights(parameters, saved, folder)
        self.optimizer.read(folder, _MOMENTS)
        if self._target is not None:
            copy_weights(self._target.named_parameters(), read_named(folder, _TARGET), folder)


class CriticGradient:
    """The losses of a batch for a critic, micro-batch by micro-batch; see `Gradient`."""

    def __init__(self, critic: Critic, loss: ValueLoss, micro_batches: Sequence[MicroBatch]) -> None:
        """Prepare a batch; nothing is computed yet."""
        self._critic, self._loss, self._micro_batches = critic, loss, micro_batches
        self._sums = MetricSums([metric.name for metric in (*CRITIC_METRICS, *loss.metrics)])

    def passes(self) -> list[Pass]:
        """Return what has to be computed before `report`, in order."""
        return [Pass(micro, self._add) for micro in self._micro_batches]

    def _add(self, micro: MicroBatch) -> None:
        self._sums.add(self._critic.add_gradient(micro, self._loss))

    def report(self) -> StepReport:
        """Return the counts and the metrics of the whole batch."""
        return report_of(self._micro_batches, self._sums)


class _ValueNet:
    """The body of a model, with value heads."""

    def __init__(self, model: CausalLM, config: TrainerConfig, kind: CriticKind) -> None:
        """Take over the model, which computes in the precision of `config` from here on."""
        model.compute_in(precision_of(config.dtype, model.device))
        self.model = model
        heads, bias = 2 if kind == "actions" else 1, kind != "replies"
        self._head = nn.Linear(int(model.config.hidden_size), heads, bias=bias, device=model.device)
        if bias:
            nn.init.zeros_(self._head.bias)
        nn.init.zeros_(self._head.weight)  # of random values, the first advantages of a critic of states would be noise
        if heads > 1:
            drawn = torch.randn(self._head.weight.shape, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                self._head.weight.copy_(_HEAD_DEVIATION * drawn)

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self.model.device

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return each weight that is trained once, with its name."""
        body = [(f"body.{name}", parameter) for name, parameter in self.model.body_parameters()]
        return [*body, *((f"value_head.{name}", parameter) for name, parameter in self._head.named_parameters())]

    def __call__(self, micro: MicroBatch, nodes: Tensor | None = None) -> Tensor:
        """Return the values of nodes, [n, heads], in the precision of the heads' weights, which is float32."""
        hidden = flat_hidden(self.model, micro)
        values: Tensor = self._head(
            (hidden if nodes is None else hidden.index_select(0, nodes)).to(self._head.weight.dtype)
        )
        return values


def copy_weights(parameters: Sequence[tuple[str, nn.Parameter]], weights: dict[str, Tensor], path: Path) -> None:
    """Copy weights of a checkpoint into parameters of the same names. Matrices are [n, d], norms and biases [d], on the
    CPU.
    """
    for name, parameter in parameters:
        if name not in weights or weights[name].shape != parameter.shape:
            raise CheckpointError(f"{path} has no weight {name} of shape {tuple(parameter.shape)}: another model")
        with torch.no_grad():
            parameter.copy_(weights[name])


_FILE = "model.safetensors"
_HEAD, _BODY = "value_head.", "body."  # beginnings of the critic's names


def check_classifier(model: CausalLM) -> None:
    """Raise ConfigError unless transformers has a model for the classification of sequences on this body."""
    if type(model.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigError(
            "algorithm 'reward_model' needs a model with which transformers can classify sequences, and it can't with "
            f"{type(model.config).__name__}"
        )


def write_reward_model(
    checkpoint: Path, model: CausalLM, tokenizer: Any, parameters: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a critic of replies into a new folder of a checkpoint, from which transformers loads it.

    Args:
        model: the critic's, for its configuration.
        parameters: of the critic, by its names: matrices [n, d] and norms [d].
    """
    folder = checkpoint / FOLDER_OF_REWARDS
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    config = copy.deepcopy(model.config)
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    config.num_labels, config.pad_token_id, config.dtype = 1, None, "float32"
    config._attn_implementation = "sdpa"
    config.save_pretrained(folder)
    body = f"{model.model.base_model_prefix}."
    tensors = {_file_name(name, body): parameter.detach().cpu().contiguous() for name, parameter in parameters}
    safetensors.torch.save_file(tensors, folder / _FILE, metadata={"format": "pt"})


def read_reward_model(checkpoint: Path, model: CausalLM, names: Iterable[str]) -> dict[str, Tensor]:
    """Return what `write_reward_model` wrote, [n, d] or [d], on the CPU, by the critic's names.

    Args:
        names: of the critic's parameters.

    Raises:
        CheckpointError: the checkpoint has no reward model.
    """
    file, body = checkpoint / FOLDER_OF_REWARDS / _FILE, f"{model.model.base_model_prefix}."
    if not file.is_file():
        raise CheckpointError(f"{checkpoint} has no reward model")
    found = safetensors.torch.load_file(file)
    own = {name: _file_name(name, body) for name in names}
    return {name: found[there] for name, there in own.items() if there in found}


def _file_name(name: str, body: str) -> str:
    """Return the name of a critic's parameter in the file; `body` begins those of the model's body."""
    return f"score.{name.removeprefix(_HEAD)}" if name.startswith(_HEAD) else body + name.removeprefix(_BODY)
