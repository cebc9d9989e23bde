"""Quotas: which environment each group of a step plays, in exact proportion to the environments' weights.

Tijdeman 1980, "The chairman assignment problem": of the environments whose quota is due, the one comes next whose
deadline is earliest. After any number of groups, over all steps, each of n environments has had its quota of them with
an error of at most 1 - 1 / (2n - 2) groups. Always taking the largest remainder has no such bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

Shares = Mapping[str, Fraction]


def exact_shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Return the share of each environment; all add up to 1, exactly."""
    whole = sum(map(Fraction, weights.values()))
    return {name: Fraction(weight) / whole for name, weight in weights.items()}


def next_environments(shares: Shares, spent: Shares, cost: Shares, count: int) -> list[str]:
    """Return the environments of the next groups.

    Args:
        shares: of each environment, by name.
        spent: what the groups so far have taken: their number, or their tokens.
        cost: what a group takes: 1, or an estimate of its tokens.
        count: number of groups.
    """
    if len(shares) == 1:
        return list(shares) * count
    due = Fraction(1, 2 * len(shares) - 2)
    a_group = 1 / sum(share / cost[name] for name, share in shares.items())  # what the mean group takes
    taken, found = Counter[str](), list[str]()
    total = sum(spent.values(), Fraction())
    for number in range(1, count + 1):
        lacks = {
            name: (share * (total + number * a_group) - spent[name]) / cost[name] - taken[name]
            for name, share in shares.items()
        }
        late = [name for name in shares if lacks[name] >= due] or [max(shares, key=lacks.__getitem__)]
        found.append(min(late, key=lambda name: (1 - due - lacks[name]) * cost[name] / shares[name]))
        taken[found[-1]] += 1
    return found


def unfilled(slots: Sequence[str], registered: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the environments of a step's groups that are not registered.

    A replacement plays the environment of the first replaced group that has none, so that quotas hold.

    Args:
        slots: the environments of the step's first groups, in order.
        registered: environment of each group of the step, in order, and whether it was replaced.
    """
    first, later = registered[: len(slots)], registered[len(slots) :]
    waiting = [name for name, replaced in first if replaced]
    for name, replaced in later:
        waiting.remove(name)
        if replaced:
            waiting.append(name)
    return [*slots[len(first) :], *waiting]
