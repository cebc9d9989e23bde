"""What the ranks of a trainer agree on, by collective operations that all of them call in the same order."""

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
    """The ranks of one trainer, as one of them sees the others.

    Attributes:
        device: of this rank's numbers.
        is_first: whether this rank writes what is written once.
    """

    def __init__(self, device: torch.device) -> None:
        """Stand for the process group that has been initialised."""
        self.device, self.is_first = device, dist.get_rank() == 0

    def largest(self, *numbers: int) -> list[int]:
        """Return the largest of each of these numbers on any rank."""
        found = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [int(number) for number in found]

    def share(self, folder: Path) -> bool:
        """Return whether all ranks see the same files in a folder, as ranks on one machine do."""
        mark = folder / "first-rank"
        if self.is_first:
            with contextlib.suppress(OSError):
                mark.touch()
        self.largest(0)
        (missing,) = self.largest(int(not mark.exists()))
        return not missing

    def check(self, problem: Exception | None) -> None:
        """Return if no rank has a problem.

        Raises:
            TakenBack: a rank has one; the caller has undone what the request has changed.
        """
        (found,) = self.largest(int(problem is not None))
        if found:
            raise TakenBack(problem) from problem


class Problem:
    """The first error of a rank at a request, which it raises when all ranks have come to the request's end."""

    error: Exception | None = None

    def catch(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns; None: it has failed, and the error is noted."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - raised by `RankGroup.check`
            self.error = self.error or error
            return None
