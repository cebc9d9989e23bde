"""Agreement between the ranks of a trainer, by collective operations in the same order on each rank.

Gloo sends every weight through the loopback interface, which takes several times as long as a copy, on the cores that
compute. Here each rank writes its numbers into its own shared-memory file and reads the files of the others. Gloo only
synchronizes, and so still detects a rank that dies.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from palestra.process.channel import TakenBack

T = TypeVar("T")


def reserve_file(path: Path, size: int, head: bytes = b"") -> None:
    """Create a file whose `size` bytes are allocated on disk: a write to a mapped page without backing is a SIGBUS."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, size)


def mapped(path: Path, size: int) -> Tensor:
    """Map a file as uint8 [size]; processes that map it share the memory."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def rows_of_rank(rows: int, rank: int, count: int) -> slice:
    """Return the rows of a matrix, or numbers of a vector, that FSDP assigns to a rank."""
    size = math.ceil(rows / count)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))


class Exchange:
    """A shared-memory file for each rank, as large as the largest operation; unlinked once all ranks have mapped it.

    All ranks make the same calls in the same order.
    """

    def __init__(self, folder: Path) -> None:
        """Begin without files. The folder is in shared memory, the same for all ranks."""
        self._folder = folder
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        self._files: list[Tensor] = []  # uint8, of each rank

    def meet(self) -> None:
        """Wait until all ranks call this."""
        dist.barrier()

    def slots(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the memory of each rank, [size] each; only this rank's may be written. Collective."""
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
    """An all-gather through an `Exchange`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill [n * ranks] with all ranks' parts, synchronously; `input_tensor` [n], this rank's, may be there."""
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
    """A reduce-scatter through an `Exchange`; sums are always in the order of the ranks."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill [n] with this rank's part of the sum over all ranks of `input_tensor` [n * ranks], synchronously."""
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


class RankGroup:
    """The ranks of one trainer, seen from one of them.

    Attributes:
        is_first: whether this rank writes the files that exist once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_first = device, dist.get_rank() == 0

    def largest(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over all ranks."""
        found = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [int(number) for number in found]

    def share(self, folder: Path) -> bool:
        """Return whether all ranks see the same files in a folder, as on one machine."""
        mark = folder / "first-rank"
        if self.is_first:
            with contextlib.suppress(OSError):
                mark.touch()
        self.largest(0)
        (missing,) = self.largest(int(not mark.exists()))
        return not missing

    def check(self, problem: Exception | None) -> None:
        """Raise TakenBack if any rank has a problem. The caller must undo the request's changes then."""
        (found,) = self.largest(int(problem is not None))
        if found:
            raise TakenBack(problem) from problem


class Problem:
    """The first error of a rank in a request, raised only when all ranks have reached the request's end."""

    error: Exception | None = None

    def catch(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns; None: it failed, and the error is recorded."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - raised by `RankGroup.check`
            self.error = self.error or error
            return None
