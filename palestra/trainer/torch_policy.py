"""One policy that is trained in this process: float32 master weights, bf16 compute, AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from palestra.algorithms.loss import Loss, LossInputs, Max, Mean, Reduction, Sum
from palestra.config import TrainerConfig
from palestra.errors import CheckpointError, InvalidAlgorithm
from palestra.faults import fault_point
from palestra.grammars.bounds import TRAINER_BOUNDS
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import CausalLM
from palestra.models.grammar_masks import unpack_bits, vocabulary_of
from palestra.trainer import checkpoint
from palestra.trainer.base import TRAINER_METRICS, OptimParams, OptimReport, StepReport
from palestra.trainer.constraints import allowed_tokens, grammar_problem
from palestra.trainer.metrics import MetricSums
from palestra.trainer.packing import MicroBatch, TreeAttention, pack
from palestra.trainer.sequences import SequenceMeans
from palestra.trainer.untrainable import record_problems
from palestra.types.calls import Floats, PolicyVersion
from palestra.types.records import TrainSample

# More tokens are slower even on two cores: attention in a tree takes time with its square (docs/benchmarks.md).
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
# Positions whose logits are computed at a time: 256 x 49,152 floats are 50 MB, and several of them exist together.
LOGIT_CHUNK = {"cpu": 256, "cuda": 8192}
_OPTIMIZER_FILE = "optimizer-{}.safetensors"
_SHARD_BYTES = 2**28
_IMPOSSIBLE = -1e9  # the score of tokens that can't be sampled: finite, so that 0 x score is 0 in the entropy


class TorchPolicy:
    """The weights, the optimizer and the version of one policy; its methods run in the trainer's thread.

    Attributes:
        parameters: each weight once, with its name.
        optimizer: AdamW over these weights.
        version: of the weights.
        changed: whether there was an update since the weights were handed to an engine.
    """

    def __init__(self, model: CausalLM, tokenizer: Any, config: TrainerConfig) -> None:
        """Take over a model's weights as they are, at version 0.0.

        Args:
            model: has float32 weights; it computes in the precision of `config` from here on.
            tokenizer: the model's, which is written beside its weights.
            config: how gradients are computed.
        """
        model.compute_in(getattr(torch, config.dtype))
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self.parameters = model.named_parameters()
        self.optimizer = torch.optim.AdamW(
            [  # norms and biases, in the second group, do not decay, as in the Trainer of transformers
                {"params": [p for _, p in self.parameters if p.ndim >= 2]},
                {"params": [p for _, p in self.parameters if p.ndim < 2]},
            ],
            fused=True,
        )
        self._device = self.parameters[0][1].device
        self._micro_batch_tokens = config.micro_batch_tokens or MICRO_BATCH_TOKENS[self._device.type]
        self._grammars = Grammars(vocabulary_of(tokenizer, model.vocab_size), TRAINER_BOUNDS)
        self.version = PolicyVersion(0, 0)
        self.changed = False

    def close(self) -> None:
        """End the processes that walk the policy's grammars."""
        self._grammars.close()

    def untrainable(self, batch: Sequence[TrainSample]) -> dict[str, str]:
        """Find episodes with numbers that are not finite, unknown tokens, or replies that miss their grammar.

        Returns:
            For each such episode its id and the reason; see `Trainer.untrainable`.
        """
        found = record_problems(batch)
        for sample in batch:
            if sample.episode_id not in found:
                outside = (sample.ids < 0) | (sample.ids >= self._model.vocab_size)
                problem = grammar_problem(sample, self._grammars)
                if outside.any():
                    problem = f"token {int(sample.ids[outside][0])} is none of the model's {self._model.vocab_size}"
                if problem is not None:
                    found[sample.episode_id] = problem
        return found

    def logprobs(self, batch: Sequence[TrainSample]) -> list[Floats]:
        """Return for each row the logprobs of its trained tokens under the present weights, float32 [N], else NaN."""
        found: list[Floats] = []
        for micro in pack(batch, self._micro_batch_tokens):
            with torch.no_grad():
                logprobs, _, _ = self._forward(micro)
            values = iter(logprobs.cpu().numpy())
            for sample, _, _ in micro.samples:
                row = np.full(len(sample.ids), np.nan, np.float32)
                row[sample.loss_mask] = [next(values) for _ in range(int(sample.loss_mask.sum()))]
                found.append(row)
        return found

    def forward_backward(self, batch: Sequence[TrainSample], loss: Loss) -> StepReport:
        """Add the gradient of the whole batch, or of nothing if an error occurs, so that the request may be sent again.

        Args:
            batch: S rows.
            loss: the loss of a token.
        """
        # Without the copy, a request that fails halfway and is sent again would add a part of its gradient twice.
        before = [None if p.grad is None else p.grad.clone() for _, p in self.parameters]
        try:
            return self._all_micro_batches(batch, loss)
        except Exception:
            for (_, parameter), gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            raise

    def _all_micro_batches(self, batch: Sequence[TrainSample], loss: Loss) -> StepReport:
        """Add the gradients of all micro-batches in order, and return their metrics and counts."""
        sums = MetricSums([metric.name for metric in (*TRAINER_METRICS, *loss.metrics)])
        micro_batches = pack(batch, self._micro_batch_tokens)
        means = self._sequence_means(micro_batches, loss) if loss.over_sequences else None
        computed, trained = 0, 0
        for micro in micro_batches:
            sums.add(self._micro_batch(micro, loss, means))
            computed += micro.tokens
            trained += int(sum(sample.loss_mask.sum() for sample, _, _ in micro.samples))
        return StepReport(
            rows=len(batch),
            trained_tokens=trained,
            forward_tokens=computed,
            flat_tokens=sum(len(sample.ids) for sample in batch),
            metrics=sums.result(trained),
        )

    def _sequence_means(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> SequenceMeans:
        """Return the means over the episodes that are not whole in one micro-batch, by a pass without gradient."""
        means = SequenceMeans(micro_batches)
        for micro in means.split:
            with torch.no_grad():
                logprobs, _, targets = self._forward(micro)
                means.add(micro, loss.of_sequence(self._inputs(logprobs, targets)))
        return means

    def _inputs(self, logprobs: Tensor, targets: Mapping[str, Tensor]) -> LossInputs:
        """Return the inputs of a loss for the tokens of a micro-batch.

        Args:
            logprobs: float32 [T], from `_forward`.
            targets: the columns of `_forward`.
        """
        return LossInputs(
            logprobs=logprobs,
            sampling_logprobs=targets["sampling_logprobs"],
            old_logprobs=targets.get("old_logprobs"),
            advantages=targets["advantages"],
            on_policy=(targets["version"] == targets["version"].new_tensor(self.version)).all(dim=1),
        )

    def _micro_batch(self, micro: MicroBatch, loss: Loss, means: SequenceMeans | None) -> dict[str, Reduction]:
        """Add the gradient of one micro-batch, and return its metrics.

        Args:
            micro: the micro-batch.
            loss: the loss of a token.
            means: over whole episodes; None: the loss needs none.
        """
        with torch.enable_grad():
            logprobs, entropy, targets = self._forward(micro)
            inputs = self._inputs(logprobs, targets)
            if means is not None:
                inputs = replace(inputs, sequence_means=means.of(micro, loss.of_sequence(inputs)))
            output = loss(inputs)
            if output.loss.shape != logprobs.shape:
                raise InvalidAlgorithm(
                    f"the loss {loss.name!r} returns {list(output.loss.shape)} numbers for {len(logprobs)} tokens; it "
                    "returns one for each token"
                )
            if bool(output.loss.isnan().any()):
                raise InvalidAlgorithm(_not_a_number(loss, micro, output.loss))
            total = (output.loss * targets["loss_weights"]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        gap = (logprobs.detach() - targets["sampling_logprobs"]).abs()
        return {
            **output.metrics,
            "loss": Sum(total.detach()),
            "entropy": Mean(entropy),
            "logprob_gap_mean": Mean(gap),
            "logprob_gap_max": Max(gap),
        }

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return logprobs and entropies [T] of the trained tokens, and the columns of `MicroBatch.targets` for them.

        If a row has grammars, the columns contain `allowed`, [T, B] (see `allowed_tokens`).
        """
        device = self._device
        targets = {name: column.to(device) for name, column in micro.targets().items()}
        ids = torch.tensor([i for tree in micro.trees for i in tree.ids], device=device)
        positions = torch.tensor([p for tree in micro.trees for p in tree.positions], device=device)
        hidden = self._model.hidden(ids, positions, TreeAttention(micro.trees, device))
        allowed = allowed_tokens(micro.samples, self._grammars, self._model.vocab_size)
        targets |= {} if allowed is None else {"allowed": allowed.to(device)}
        logprobs, entropy = self._logprobs(hidden.index_select(0, targets["source"]), targets)
        return logprobs, entropy, targets

    def _logprobs(self, hidden: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probabilities (with gradient) and entropies, float32 [T] each.

        Logits of at most `logit_chunk` positions exist at a time, because T x V floats would not fit into memory; with
        more positions the logits are computed again in the backward pass.

        Args:
            hidden: [T, hidden], at the positions that predict the targets.
            targets: the columns of `_forward`.
        """
        size = min(self._config.logit_chunk, LOGIT_CHUNK[self._device.type])
        pieces = [
            _call(
                self._chunk,
                hidden[i : i + size],
                targets["target"][i : i + size],
                targets["temperature"][i : i + size],
                *([targets["allowed"][i : i + size]] if "allowed" in targets else []),
                again=len(hidden) > size,
            )
            for i in range(0, len(hidden), size)
        ]
        if not pieces:
            empty = hidden.sum(dtype=torch.float32).expand(0)
            return empty, empty.detach()
        return torch.cat([p for p, _ in pieces]), torch.cat([e for _, e in pieces])

    def _chunk(
        self, hidden: Tensor, target: Tensor, temperature: Tensor, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [T] each, of the positions of one chunk.

        Args:
            hidden: [T, hidden], at the positions that predict the targets.
            target: [T] token ids.
            temperature: [T], at which the tokens were sampled.
            allowed: [T, B] bits of the tokens that could have been sampled; None: all.
        """
        scores = self._model.logits(hidden) / temperature.unsqueeze(1)
        if allowed is not None:  # the distribution from which the token was sampled had no other tokens
            scores = scores.masked_fill(~unpack_bits(allowed, scores.shape[1]), _IMPOSSIBLE)
        total = scores.logsumexp(dim=-1)
        chosen = scores.gather(1, target.unsqueeze(1)).squeeze(1) - total
        with torch.no_grad():
            mean_score = ((scores - total.unsqueeze(1)).exp() * scores).sum(dim=-1)
            entropy = total - mean_score
        return chosen, entropy

    def optim_step(self, params: OptimParams) -> OptimReport:
        """Apply the gradient unless it is not finite, clear it, and count the version; see `Trainer.optim_step`."""
        fault_point("before_step")
        for group, decay in zip(self.optimizer.param_groups, (params.weight_decay, 0.0), strict=True):
            group |= {
                "lr": params.learning_rate,
                "betas": params.betas,
                "eps": params.epsilon,
                "weight_decay": decay,
            }
        norm = float(torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], params.max_grad_norm))
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
            if not self.changed:  # all updates between two publications together make one version
                self.version, self.changed = self.version.following, True
        self.optimizer.zero_grad(set_to_none=True)
        fault_point("after_step")
        return OptimReport(learning_rate=params.learning_rate, grad_norm=norm if finite else 0.0, applied=finite)

    def save(self, folder: Path, state: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint that transformers can load without conversion; see `Trainer.save`.

        Args:
            folder: where the checkpoints are.
            state: JSON to keep beside the weights.
            keep: how many checkpoints stay.
        """
        full = {**state, "incarnation": self.version.incarnation, "n": self.version.n}
        return checkpoint.write(folder, int(state["step"]), self._fill, full, keep)

    def _fill(self, folder: Path) -> None:
        """Write weights, tokenizer and optimizer into a checkpoint's folder."""
        self._model.save(folder, self._tokenizer)
        tensors: dict[str, Tensor] = {}
        number = 0
        for name, parameter in self.parameters:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
            # safetensors copies a whole shard before it writes it, so shards are kept small.
            if sum(t.nbytes for t in tensors.values()) >= _SHARD_BYTES:
                safetensors.torch.save_file(tensors, folder / _OPTIMIZER_FILE.format(number))
                tensors, number = {}, number + 1
        if tensors:
            safetensors.torch.save_file(tensors, folder / _OPTIMIZER_FILE.format(number))

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Restore weights, optimizer and version from the newest undamaged checkpoint; see `Trainer.load`."""
        newest = checkpoint.newest_good(folder)
        if newest is None:
            return None
        path, state = newest
        weights: dict[str, Tensor] = {}
        for file in sorted(path.glob("model*.safetensors")):
            weights |= safetensors.torch.load_file(file)
        optimizer: dict[str, Tensor] = {}
        for file in sorted(path.glob(_OPTIMIZER_FILE.format("*"))):
            optimizer |= safetensors.torch.load_file(file)
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in optimizer.items():
            kind, _, name = key.partition(".")
            moments.setdefault(name, {})[kind] = value
        for name, parameter in self.parameters:
            if name not in weights or weights[name].shape != parameter.shape:
                raise CheckpointError(f"{path} has no weight {name} of shape {tuple(parameter.shape)}: another model")
            with torch.no_grad():
                parameter.copy_(weights[name])
        self._restore_optimizer(moments)
        self.version = PolicyVersion(int(state["incarnation"]), int(state["n"]))
        return state

    def _restore_optimizer(self, moments: Mapping[str, dict[str, Tensor]]) -> None:
        """Give the optimizer the state of each parameter, by name, as read from a checkpoint on the CPU.

        The optimizer itself moves the tensors to the parameters' devices, and `step` to where a fused update reads it.

        Args:
            moments: for each weight its state; moments have the weight's shape, [n, d] or [d], and `step` is scalar.
        """
        state = self.optimizer.state_dict()
        names = {parameter: name for name, parameter in self.parameters}
        ordered = [names[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        state["state"] = {number: moments[name] for number, name in enumerate(ordered) if name in moments}
        self.optimizer.load_state_dict(state)


def _not_a_number(loss: Loss, micro: MicroBatch, values: Tensor) -> str:
    """Return which tokens of which episodes a loss [T] is not a number for, in words."""
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


def _call(function: Callable[..., Any], *arguments: Tensor, again: bool) -> Any:
    """Call `function`; with `again` its intermediate results are dropped and computed again in the backward pass.

    Args:
        function: returns tensors.
        arguments: tensors, such as [T, hidden].
        again: whether to save memory.
    """
    return recompute(function, *arguments, use_reentrant=False) if again else function(*arguments)
