"""One rank's part of a policy: a shard of its weights and moments, and a share of each batch.

Weights are not gathered: no rank needs more memory than it has, and all write at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import Loss, LossSpec
from palestra.algorithms.losses import build_loss
from palestra.config import TrainerConfig
from palestra.errors import ConfigError
from palestra.models.causal_lm import CausalLM
from palestra.models.device import return_freed_memory
from palestra.models.tensor_file import in_aligned_order, lay_out, write_weights
from palestra.models.weights import LocalWeights
from palestra.process.channel import TakenBack
from palestra.trainer.base import StepReport
from palestra.trainer.gradient import Gradient, numbers_by_row
from palestra.trainer.metrics import SentSums
from palestra.trainer.optimizer import Named
from palestra.trainer.packing import MicroBatch, pack
from palestra.trainer.token_forward import TokenForward, columns_of, flat_hidden, flat_picture_rows
from palestra.trainer.torch_policy import OPTIMIZER, PolicyNetworks, TorchPolicy
from palestra.types.calls import Floats
from palestra.types.records import TrainSample
from palestra_sharded.group import Problem, RankGroup, mapped, reserve_file, rows_of_rank
from palestra_sharded.network import ShardedNetwork, ShardedOptimizer, local_part, take_weights, whole_of


class WeightFile:
    """Layout of a safetensors file with all weights of a policy, the same on every rank."""

    def __init__(self, parameters: Named, dtype: torch.dtype) -> None:
        """Lay out the weights. Weights with fewer than two dimensions are float32."""
        types = [dtype if p.ndim >= 2 else torch.float32 for _, p in parameters]
        typed = in_aligned_order([(p, (name, p.shape, own)) for (name, p), own in zip(parameters, types, strict=True)])
        self._header, (*starts, self._size) = lay_out([shaped for _, shaped in typed])
        self._places = [(p, own, start) for (p, (_, _, own)), start in zip(typed, starts, strict=True)]

    def begin(self, path: Path) -> None:
        """Create the file without weights, on one rank."""
        try:
            reserve_file(path, self._size, self._header)
        except OSError as error:
            raise OSError(f"weights can't be written to {path}: {error}") from error

    def fill(self, path: Path) -> None:
        """Write this rank's rows, rounded, into a file that `begin` created."""
        rank, count = dist.get_rank(), dist.get_world_size()
        whole = mapped(path, self._size)
        for parameter, dtype, start in self._places:
            rows = rows_of_rank(parameter.shape[0], rank, count)
            width = dtype.itemsize * math.prod(parameter.shape[1:])
            first = start + rows.start * width
            part = whole[first : first + (rows.stop - rows.start) * width].view(dtype)
            part.copy_(local_part(parameter.detach()).flatten())


class RankPolicy(TorchPolicy):
    """One rank's part of a policy. All ranks call each method together, each with its own rows.

    A rank that fails continues with idle passes, so that the others do not wait for it; then all ranks undo the
    request.
    """

    def __init__(
        self,
        network: ShardedNetwork,
        frozen: Mapping[ForwardOutput, ShardedNetwork],
        tokenizer: Any,
        config: TrainerConfig,
        group: RankGroup,
    ) -> None:
        """Take over sharded networks. `frozen` are those that are never trained, by the output that each computes."""
        models = {name: other.model for name, other in frozen.items()}
        # Weights that are offloaded are on the CPU between two passes.
        own = PolicyNetworks(model=network.model, tokenizer=tokenizer, frozen=models)
        super().__init__(own, config, make_optimizer=ShardedOptimizer, device=group.device)
        self._network, self._others, self._group = network, frozen, group

    def outputs(self, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]) -> ForwardOutputs:
        """Return numbers of the trained tokens of this rank's rows; see `Trainer.forward`.

        The outputs must have passed `check_outputs`.
        """
        problem = Problem()
        micro_batches = problem.catch(lambda: pack(batch, self.micro_batch_tokens)) or []
        found = dict[ForwardOutput, list[Floats]]()
        for name in sorted(outputs):
            network, forward = self._others.get(name, self._network), self._frozen.get(name, self._forward)
            rows = found.setdefault(name, [])

            def add(micro: MicroBatch, hidden: Tensor, of: TokenForward = forward, to: list[Floats] = rows) -> None:
                to += numbers_by_row(micro, of.logprobs(micro, columns_of(micro, hidden.device), hidden))

            self._without_gradient(network, micro_batches, add, problem)
        self._group.check(problem.error)
        return found

    def add_gradient(self, batch: Sequence[TrainSample], spec: LossSpec, logprobs: bool) -> tuple[StepReport, SentSums]:
        """Add the gradient of all ranks' rows. Return this rank's counts, and the sums of its metrics."""
        loss = build_loss(spec)
        if not isinstance(loss, Loss):
            raise ConfigError(f"the loss {loss.name!r} is of a critic, and this policy has none")
        problem, before = Problem(), self.optimizer.gradient()

        def prepared() -> Gradient:
            micro_batches = pack(batch, self.micro_batch_tokens)
            return Gradient(self._forward, self.version, batch, spec, micro_batches, logprobs)

        gradient = problem.catch(prepared)
        if gradient is None:
            self._without_gradient(self._network, (), lambda *_: None, problem)
        else:
            self._without_gradient(self._network, gradient.unmeasured, gradient.measure, problem)
        for micro in self._passes([] if gradient is None else gradient.micro_batches):
            total = self._network.compute(partial(self._loss, gradient, micro, problem))
            total.backward()
        try:
            self._group.check(problem.error)
        except TakenBack:
            self.optimizer.put_gradient(before)
            raise
        assert gradient is not None
        return gradient.report(), gradient.sums.sent()

    def _loss(self, gradient: Gradient | None, micro: MicroBatch | None, problem: Problem) -> Tensor:
        """Return the loss of a micro-batch, or a scalar 0 if this rank has no micro-batch left or has failed."""
        if gradient is None or micro is None or problem.error is not None:
            return self._network.idle()
        hidden = _hidden(self.model, micro, problem)
        if hidden is None:
            return self._network.idle()
        loss = problem.catch(lambda: gradient.loss_of(micro, hidden))
        return self._network.touched(hidden.sum() * 0.0 if loss is None else loss)

    def _without_gradient(
        self,
        network: ShardedNetwork,
        micro_batches: Sequence[MicroBatch],
        work: Callable[[MicroBatch, Tensor], None],
        problem: Problem,
    ) -> None:
        """Compute as many passes as any rank needs."""

        def one(micro: MicroBatch | None) -> None:
            if micro is None or problem.error is not None:
                network.idle()
                return
            hidden = _hidden(network.model, micro, problem)
            if hidden is None:
                network.idle()
            else:
                problem.catch(lambda: work(micro, hidden))

        with torch.no_grad():
            for micro in self._passes(micro_batches):
                network.compute(partial(one, micro))

    def _passes(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        """Yield micro-batches, then None while other ranks have more. Collective."""
        (most,) = self._group.largest(len(micro_batches))
        for micro, _ in zip_longest(micro_batches, range(most)):
            yield micro

    def fill(self, folder: Path, moments: bool) -> None:
        """Write weights and tokenizer, as one process writes them, and this rank's moments. Collective.

        The first rank gathers the weights one by one in CPU memory, and writes them.
        """
        problem = Problem()
        self._write_weights(folder, problem)
        if moments:
            problem.catch(lambda: self.optimizer.write(folder, OPTIMIZER))
        self._group.check(problem.error)
        return_freed_memory()

    def _write_weights(self, folder: Path, problem: Problem) -> None:
        weights = dict(_gathered(self.model.saved_parameters(), None, keep=self._group.is_first))
        if self._group.is_first:
            problem.catch(lambda: self.model.save(folder, self._tokenizer, weights))

    def read(self, folder: Path) -> None:
        """Load this rank's part of a checkpoint written by any number of ranks or by one process."""
        problem = Problem()
        problem.catch(lambda: take_weights(self.parameters, self.model.read(folder), folder))
        self._group.check(problem.error)
        self.optimizer.read(folder, OPTIMIZER)

    def publish_parts(self, path: Path, dtype: torch.dtype) -> None:
        """Write this rank's rows into a file that all ranks see. Collective. Vectors are float32."""
        file, part, problem = WeightFile(self.parameters, dtype), path.with_name(f"{path.name}.part"), Problem()
        if self._group.is_first:
            problem.catch(lambda: file.begin(part))
        self._group.check(problem.error)
        problem.catch(lambda: file.fill(part))
        self._group.check(problem.error)
        if self._group.is_first:
            problem.catch(lambda: part.replace(path))
        self._group.check(problem.error)

    def publish(self, path: Path, dtype: torch.dtype) -> None:
        """Gather the weights and write them on the first rank's machine. Collective. Vectors are float32."""
        problem = Problem()
        found = list(_gathered(self.parameters, dtype, keep=self._group.is_first))
        if self._group.is_first:
            problem.catch(lambda: write_weights(LocalWeights(found), path))
        self._group.check(problem.error)


def _hidden(model: CausalLM, micro: MicroBatch, problem: Problem) -> Tensor | None:
    """Return the last hidden states of a micro-batch, [N, hidden]; None: an image cannot be computed.

    Then `problem` has the error, and the caller must make an idle pass: the text model's pass is collective and did not
    run.
    """
    pictures = problem.catch(lambda: flat_picture_rows(model, micro))
    return None if problem.error is not None else flat_hidden(model, micro, pictures=pictures)


def _gathered(parameters: Named, dtype: torch.dtype | None, keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights on the CPU, [n, d] or [d], one after another, on the rank that keeps them. Collective."""
    for name, parameter in parameters:
        part = parameter.detach()
        whole = whole_of(part if dtype is None or part.ndim < 2 else part.to(dtype))
        if keep:
            yield name, whole.cpu()
