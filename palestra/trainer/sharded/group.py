"""Agreement between the ranks of a trainer, by collective operations in the same order on each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from palestra.process.channel import TakenBack

T = TypeVar("T")


class RankGroup:
    """The ranks of one trainer, seen from one of them.

    Attributes:
        is_first: whether this rank writes the files that exist once.
    """

    def __init__(self, device: torch.device) -> None:
        """Use the initialised process group."""
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
        """Raise TakenBack if any rank has a problem.

        Raises:
            TakenBack: the caller must undo the request's changes.
        """
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
