"""The trainer: float32 master weights, bf16 compute, AdamW, in a thread of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from palestra.config import CheckpointConfig, OptimizerConfig, TrainerConfig
from palestra.errors import CheckpointError
from palestra.faults import fault_point
from palestra.grammars.bounds import TRAINER_BOUNDS
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import CausalLM, set_threads
from palestra.models.grammar import unpack_bits, vocabulary_of
from palestra.schemas.protocols import Engine, OptimReport, StepReport
from palestra.schemas.records import Floats, PolicyVersion, TrainSample
from palestra.threads import in_thread
from palestra.trainer import checkpoint
from palestra.trainer.constraints import allowed_tokens, grammar_problem
from palestra.trainer.packing import MicroBatch, TreeAttend, pack
from palestra.trainer.serial import Serial
from palestra.trainer.untrainable import record_problems

T = TypeVar("T")
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
# On two cores more is slower, too: attention within a tree of rows takes time with its square (docs/benchmarks.md).
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
_OPTIMIZER_FILE = "optimizer-{}.safetensors"
_SHARD_BYTES = 2**28
_IMPOSSIBLE = -1e9  # finite, so that 0 x score is 0 in the entropy


class TorchTrainer:
    """Implements `Trainer` for one policy."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        policy: str,
        optimizer: OptimizerConfig,
        config: TrainerConfig,
        checkpoints: CheckpointConfig,
    ) -> None:
        """`model` has float32 weights; it computes in the precision of `config` from here on."""
        model.compute_in(getattr(torch, config.dtype))
        self._model, self._tokenizer, self._policy = model, tokenizer, policy
        self._config, self._max_grad_norm, self._keep = config, optimizer.max_grad_norm, checkpoints.keep
        self._parameters = model.named_parameters()
        self._optimizer = torch.optim.AdamW(
            [  # weights of norms and biases do not decay, as in the Trainer of transformers
                {"params": [p for _, p in self._parameters if p.ndim >= 2], "weight_decay": optimizer.weight_decay},
                {"params": [p for _, p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            fused=True,
        )
        self._device = self._parameters[0][1].device
        self._micro_batch_tokens = config.micro_batch_tokens or MICRO_BATCH_TOKENS[self._device.type]
        self._grammars = Grammars(vocabulary_of(tokenizer, model.vocab_size), TRAINER_BOUNDS)
        self._version = PolicyVersion(0, 0)
        self._changed = False  # since they were published
        self._serial = Serial()
        self._working = asyncio.Lock()

    def version(self, policy: str) -> PolicyVersion:
        """See `Trainer`."""
        return self._version

    def begin_incarnation(self, incarnation: int) -> None:
        """What was done before this restart can't be repeated bit by bit: versions from here on say so."""
        self._version = PolicyVersion(incarnation, self._version.n)

    async def forward_backward(
        self, policy: str, batch: Sequence[TrainSample], loss: Loss, request_id: str
    ) -> StepReport:
        """See `Trainer`."""
        return await self._serial.once(request_id, lambda: self._run(lambda: self._forward_backward(batch, loss)))

    async def untrainable(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> dict[str, str]:
        """See `Trainer`."""
        return await self._serial.once(request_id, lambda: self._run(lambda: self._untrainable(batch)))

    async def logprobs(self, policy: str, batch: Sequence[TrainSample], request_id: str) -> list[Floats]:
        """See `Trainer`."""
        return await self._serial.once(request_id, lambda: self._run(lambda: self._logprobs_of(batch)))

    async def optim_step(self, policy: str, learning_rate: float, request_id: str) -> OptimReport:
        """See `Trainer`."""
        return await self._serial.once(request_id, lambda: self._run(lambda: self._optim_step(learning_rate)))

    async def save(self, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """See `Trainer`. The folder loads in transformers as it is."""
        full = {**state, "incarnation": self._version.incarnation, "n": self._version.n}
        return await self._serial.once(
            request_id,
            lambda: self._run(lambda: checkpoint.write(folder, int(state["step"]), self._fill, full, self._keep)),
        )

    async def load(self, folder: Path) -> dict[str, Any] | None:
        """See `Trainer`."""
        return await self._run(lambda: self._load(folder))

    async def publish(self, policy: str, engine: Engine, request_id: str) -> PolicyVersion:
        """See `Trainer`."""

        async def hand_over() -> PolicyVersion:
            fault_point("before_publish")
            weights = [(name, p.detach()) for name, p in self._parameters]
            await engine.update_weights(policy, self._version, weights)
            self._changed = False
            fault_point("after_publish")
            return self._version

        return await self._serial.once(request_id, hand_over)

    async def close(self) -> None:
        """See `Trainer`."""
        async with self._working:  # what has begun is finished
            self._grammars.close()

    async def _run(self, work: Callable[[], T]) -> T:
        def compute() -> T:
            set_threads(self._config.threads)
            return work()

        async with self._working:
            job = asyncio.ensure_future(in_thread(compute, "palestra-trainer", daemon=False))
            try:
                return await asyncio.shield(job)
            finally:
                await asyncio.wait((job,))  # also where nobody waits for it any more

    # The trainer's thread.

    def _forward_backward(self, batch: Sequence[TrainSample], loss: Loss) -> StepReport:
        """Add the gradient of the whole batch, or, where that fails, of nothing: the request may be sent again."""
        before = [None if p.grad is None else p.grad.clone() for _, p in self._parameters]
        try:
            return self._all_micro_batches(batch, loss)
        except Exception:
            for (_, parameter), gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            raise

    def _all_micro_batches(self, batch: Sequence[TrainSample], loss: Loss) -> StepReport:
        totals: dict[str, Tensor] = {}
        gap_max, computed, trained = 0.0, 0, 0
        for micro in pack(batch, self._micro_batch_tokens):
            sums = self._micro_batch(micro, loss)
            gap_max = max(gap_max, float(sums.pop("gap_max")))
            for name, value in sums.items():
                totals[name] = totals.get(name, torch.zeros(())) + value
            computed += micro.tokens
            trained += int(sum(sample.loss_mask.sum() for sample, _, _ in micro.samples))
        loss_sum, fresh, fresh_clipped = (float(totals.pop(n, 0.0)) for n in ("loss", "fresh", "fresh_clipped"))
        metrics = {name: float(value) / max(trained, 1) for name, value in totals.items()}
        metrics |= {"loss": loss_sum, "gap_max": gap_max}
        metrics["clipped_on_policy"] = fresh_clipped / fresh if fresh else math.nan
        return StepReport(
            rows=len(batch),
            trained_tokens=trained,
            forward_tokens=computed,
            flat_tokens=sum(len(sample.ids) for sample in batch),
            metrics=metrics,
        )

    def _untrainable(self, batch: Sequence[TrainSample]) -> dict[str, str]:
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

    def _logprobs_of(self, batch: Sequence[TrainSample]) -> list[Floats]:
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

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """[T] log-probabilities and entropies of the trained tokens, and what belongs to them."""
        device = self._device
        targets = {name: column.to(device) for name, column in micro.targets().items()}
        ids = torch.tensor([i for tree in micro.trees for i in tree.ids], device=device)
        positions = torch.tensor([p for tree in micro.trees for p in tree.positions], device=device)
        hidden = self._model.hidden(ids, positions, TreeAttend(micro.trees, device))
        allowed = allowed_tokens(micro.samples, self._grammars, self._model.vocab_size)
        targets |= {} if allowed is None else {"allowed": allowed.to(device)}
        logprobs, entropy = self._logprobs(hidden.index_select(0, targets["source"]), targets)
        return logprobs, entropy, targets

    def _micro_batch(self, micro: MicroBatch, loss: Loss) -> dict[str, Tensor]:
        """Forward and backward; returns sums over the trained tokens."""
        with torch.enable_grad():
            logprobs, entropy, targets = self._forward(micro)
            losses, report = loss(logprobs, targets["behaviour"], targets["advantage"])
            total = (losses * targets["weight"]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        gap = (logprobs.detach() - targets["behaviour"]).abs()
        fresh = (targets["version"] == targets["version"].new_tensor(self._version)).all(dim=1)
        sums = {name: values.sum() for name, values in report.items()}
        return sums | {
            "fresh": fresh.sum(),
            "fresh_clipped": report["clipped"][fresh].sum(),
            "loss": total.detach(),
            "entropy": entropy.sum(),
            "gap": gap.sum(),
            "gap_max": gap.max() if len(gap) else torch.zeros(()),
        }

    def _logprobs(self, hidden: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """[T, hidden] to the targets' log-probabilities (with gradient) and entropies, [T] float32 each.

        Logits of at most `logit_chunk` positions exist at a time; of more they are computed again in the backward pass.
        """
        size = self._config.logit_chunk
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
        scores = self._model.logits(hidden) / temperature.unsqueeze(1)
        if allowed is not None:  # the distribution that was sampled from had no other tokens
            scores = scores.masked_fill(~unpack_bits(allowed, scores.shape[1]), _IMPOSSIBLE)
        total = scores.logsumexp(dim=-1)
        chosen = scores.gather(1, target.unsqueeze(1)).squeeze(1) - total
        with torch.no_grad():
            mean_score = ((scores - total.unsqueeze(1)).exp() * scores).sum(dim=-1)
            entropy = total - mean_score
        return chosen, entropy

    def _optim_step(self, learning_rate: float) -> OptimReport:
        fault_point("before_step")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        norm = float(torch.nn.utils.clip_grad_norm_([p for _, p in self._parameters], self._max_grad_norm))
        finite = math.isfinite(norm)
        if finite:
            self._optimizer.step()
            if not self._changed:  # several updates between two publications are one version
                self._version, self._changed = self._version.following, True
        self._optimizer.zero_grad(set_to_none=True)
        fault_point("after_step")
        return OptimReport(learning_rate=learning_rate, grad_norm=norm if finite else 0.0, applied=finite)

    def _fill(self, folder: Path) -> None:
        """Write weights, tokenizer and optimizer into a checkpoint's folder."""
        self._model.save(folder, self._tokenizer)
        tensors: dict[str, Tensor] = {}
        number = 0
        for name, parameter in self._parameters:
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
            if sum(t.nbytes for t in tensors.values()) >= _SHARD_BYTES:  # a shard is copied whole to be written
                safetensors.torch.save_file(tensors, folder / _OPTIMIZER_FILE.format(number))
                tensors, number = {}, number + 1
        if tensors:
            safetensors.torch.save_file(tensors, folder / _OPTIMIZER_FILE.format(number))

    def _load(self, folder: Path) -> dict[str, Any] | None:
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
        for name, parameter in self._parameters:
            if name not in weights or weights[name].shape != parameter.shape:
                raise CheckpointError(f"{path} has no weight {name} of shape {tuple(parameter.shape)}: another model")
            with torch.no_grad():
                parameter.copy_(weights[name])
        self._restore_optimizer(moments)
        self._version = PolicyVersion(int(state["incarnation"]), int(state["n"]))
        return state

    def _restore_optimizer(self, moments: Mapping[str, dict[str, Tensor]]) -> None:
        """Give the optimizer the state of each parameter, by name, as read from a checkpoint on the CPU.

        The optimizer itself moves it to where its parameter is, and `step` to where a fused update reads it.
        """
        state = self._optimizer.state_dict()
        names = {parameter: name for name, parameter in self._parameters}
        ordered = [names[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]
        state["state"] = {number: moments[name] for number, name in enumerate(ordered) if name in moments}
        self._optimizer.load_state_dict(state)


def _call(function: Callable[..., Any], *arguments: Tensor, again: bool) -> Any:
    return recompute(function, *arguments, use_reentrant=False) if again else function(*arguments)
