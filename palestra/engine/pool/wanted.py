"""What every worker of a pool has to sample from: the present weights of each policy that changed since the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from palestra.models.weights import WeightSource
from palestra.types.calls import PolicyVersion


class KeptWeights(Protocol):
    """Weights that can be read at any time, by any worker, until nothing refers to this object."""

    @property
    def source(self) -> WeightSource:
        """Return what a worker reads."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WantedPolicy:
    """One policy as every worker should have it. Two of them are the same only if they are the same object.

    Attributes:
        name: of the policy.
        like: the policy of the start whose kind of model it has; None: it is one of the start itself.
        version: what its tokens say.
        weights: its weights; None: those that `like` had at the start.
    """

    name: str
    like: str | None
    version: PolicyVersion
    weights: KeptWeights | None


def missing(wanted: Mapping[str, WantedPolicy], present: Mapping[str, WantedPolicy]) -> list[WantedPolicy]:
    """Return the policies that a worker still has to take, in an order in which it can.

    Copies of a policy's first weights come before that policy's own new weights, which would replace them.

    Args:
        wanted: by name.
        present: what the worker has taken, by name.
    """
    due = [policy for name, policy in wanted.items() if present.get(name) is not policy]
    return sorted(due, key=lambda policy: policy.weights is not None)


def leftover(wanted: Mapping[str, WantedPolicy], present: Mapping[str, WantedPolicy]) -> list[str]:
    """Return the names of added policies that a worker has and should not have any more; see `missing`."""
    return [name for name, policy in present.items() if policy.like is not None and name not in wanted]
