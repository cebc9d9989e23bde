"""Which versions the weights in training descend from, after a run has returned to earlier ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Return(NamedTuple):
    """After step `step`, training went on with the weights of version `to`."""

    step: int
    to: int


class Lineage(NamedTuple):
    """The descent of the weights of each step. A version has the number of the step that made it.

    Attributes:
        returns: in the order of their steps.
    """

    returns: tuple[Return, ...] = ()

    def age(self, step: int, version: int) -> int | None:
        """Return the steps from a version to the weights after `step`; None: these do not descend from it."""
        steps, newest = 0, step
        for at, to in reversed(self.returns):
            if at > newest or (at == newest != step):  # a version is what its step made, before a return
                continue
            if at < version <= newest:
                return steps + newest - version
            steps, newest = steps + newest - at, to
        return steps + newest - version if 0 <= version <= newest else None

    def strays(self, step: int, live: int, failed: Collection[int]) -> bool:
        """Return whether the weights after `step` do not descend from the live version, or do so through a version
        that failed.
        """
        age = self.age(step, live)
        if age is None:
            return True
        between = (self.age(step, version) for version in failed)
        return any(one is not None and one < age for one in between)

    def before(self, step: int) -> Lineage:
        """Return the lineage without returns after `step`, which a resumed run makes again."""
        return Lineage(tuple(one for one in self.returns if one.step <= step))

    def with_return(self, step: int, to: int) -> Lineage:
        """Return the lineage after one more return."""
        return Lineage((*(one for one in self.returns if one.step < step), Return(step, to)))
