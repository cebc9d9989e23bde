"""The weights that every worker of a pool must have: the present ones of each policy that changed since the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from palestra.models.weights import WeightSource
from palestra.types.calls import PolicyVersion


class KeptWeights(Protocol):
    """Weights that any worker can read while this object is referenced."""

    @property
    def source(self) -> WeightSource:
        """Return the source that a worker reads."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WantedPolicy:
    """A policy as every worker should have it. Equality is identity.

    Attributes:
        like: initial policy whose kind of model it has; None: it is an initial policy itself.
        weights: None: those that `like` had at the start.
    """

    name: str
    like: str | None
    version: PolicyVersion
    weights: KeptWeights | None


def missing(wanted: Mapping[str, WantedPolicy], present: Mapping[str, WantedPolicy]) -> list[WantedPolicy]:
    """Return the policies that a worker still has to take, in a valid order.

    Copies of a policy's first weights come before that policy's own new weights, which would replace them.
    """
    due = [policy for name, policy in wanted.items() if present.get(name) is not policy]
    return sorted(due, key=lambda policy: policy.weights is not None)


def leftover(wanted: Mapping[str, WantedPolicy], present: Mapping[str, WantedPolicy]) -> list[str]:
    """Return the added policies that a worker must remove; see `missing`."""
    return [name for name, policy in present.items() if policy.like is not None and name not in wanted]
