"""Collective operations of ranks on one machine through memory that all of them have mapped.

Gloo sends every weight through the loopback interface, which takes several times as long as a copy, on the cores that
compute. Here each rank writes its numbers for the others into a shared-memory file of its own, and reads the files of
the others; gloo only tells when all have written, and when all have read. So gloo still notices a rank that dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from palestra.trainer.sharded.mapped import mapped, reserve_file


class Exchange:
    """A file of shared memory for each rank, which grows to the largest operation; it has no name once all map it.

    All ranks make the same calls in the same order.
    """

    def __init__(self, folder: Path) -> None:
        """Map nothing yet.

        Args:
            folder: in shared memory, the same for all ranks.
        """
        self._folder = folder
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        self._files: list[Tensor] = []  # uint8, of each rank

    def meet(self) -> None:
        """Return when all ranks have come here."""
        dist.barrier()

    def slots(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the memory of each rank, [size] of a precision; that of this rank may be written. Collective."""
        needed = size * dtype.itemsize
        if not self._files or len(self._files[0]) < needed:
            self._grow(needed)
        return [file[:needed].view(dtype) for file in self._files]

    def _grow(self, size: int) -> None:
        """Map files of `size` bytes in the place of smaller ones."""
        self._files = []
        paths = [self._folder / f"exchange-{rank}" for rank in range(self._count)]
        reserve_file(paths[self._rank], size)
        own = mapped(paths[self._rank], size)
        self.meet()  # all files are there, and have their size
        self._files = [own if rank == self._rank else mapped(path, size) for rank, path in enumerate(paths)]
        self.meet()
        paths[self._rank].unlink()
        self.meet()  # a file of this name is made again only when the present one has none


class _Allocation:
    """Memory for an operation, from the process's own."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of this size, [n], and precision on a device."""
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangedGather(_Allocation, AllGather):
    """Gathers the parts of all ranks."""

    def __init__(self, exchange: Exchange) -> None:
        """Gather by what the ranks exchange."""
        self._exchange = exchange

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill a tensor with the parts of all ranks.

        Args:
            output_tensor: [n * ranks]; the part of this rank may be there already.
            input_tensor: the part of this rank, [n].
            async_op: not used: the parts are there when this returns.
        """
        slots, rank = self._exchange.slots(len(input_tensor), input_tensor.dtype), group.rank()
        slots[rank].copy_(input_tensor)
        parts = output_tensor.view(group.size(), -1)
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        self._exchange.meet()
        for number, slot in enumerate(slots):
            if number != rank:
                parts[number].copy_(slot)
        self._exchange.meet()


class ExchangedReduction(_Allocation, ReduceScatter):
    """Adds up what all ranks have, each rank a part of it; always in the order of the ranks."""

    def __init__(self, exchange: Exchange) -> None:
        """Add up what the ranks exchange."""
        self._exchange = exchange

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill a tensor with the sum of this rank's part over all ranks.

        Args:
            output_tensor: [n].
            input_tensor: the numbers of this rank for all parts, [n * ranks].
            async_op: not used: the sum is there when this returns.
        """
        assert op == dist.ReduceOp.SUM
        slots, rank = self._exchange.slots(len(input_tensor), input_tensor.dtype), group.rank()
        own = input_tensor.view(group.size(), -1)
        for number, part in enumerate(slots[rank].view_as(own)):
            if number != rank:
                part.copy_(own[number])
        self._exchange.meet()
        given = [own[rank] if number == rank else slot.view_as(own)[rank] for number, slot in enumerate(slots)]
        torch.add(given[0], given[1], out=output_tensor)
        for more in given[2:]:
            output_tensor.add_(more)
        self._exchange.meet()
