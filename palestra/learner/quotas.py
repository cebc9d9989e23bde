"""Quotas: which environment each group of a step plays, in exact proportion to the environments' weights.

Tijdeman 1980, "The chairman assignment problem": of the environments whose quota is due, the one comes next whose
deadline is earliest. After any number of groups, over all steps, each of n environments has had its quota of them with
an error of at most 1 - 1 / (2n - 2) groups. Always taking the largest remainder has no such bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm

Shares = Mapping[str, Fraction]


def exact_shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Return the share of each environment; all add up to 1, exactly."""
    whole = sum(map(Fraction, weights.values()))
    return {name: Fraction(weight) / whole for name, weight in weights.items()}


def next_environments(shares: Shares, spent: Shares, cost: Shares, count: int) -> list[str]:
    """Return the environments of the next groups. `spent` is what the groups so far have taken, their number or their
    tokens; `cost` is what a group takes: 1, or an estimate of its tokens.
    """
    if len(shares) == 1:
        return list(shares) * count
    due = Fraction(1, 2 * len(shares) - 2)
    # What the mean group takes.
    a_group = 1 / sum((share / cost[name] for name, share in shares.items()), Fraction())
    total = sum(spent.values(), Fraction())
    growth = {name: share * a_group / cost[name] for name, share in shares.items()}
    lacking = {name: (share * total - spent[name]) / cost[name] for name, share in shares.items()}
    # As integers: sums of fractions take 15 times as long.
    scale = lcm(due.denominator, *(value.denominator for value in (*growth.values(), *lacking.values())))
    grows = {name: int(value * scale) for name, value in growth.items()}
    lacks, found = {name: int(value * scale) for name, value in lacking.items()}, list[str]()
    least, most = int(due * scale), int((1 - due) * scale)
    for _ in range(count):
        for name, more in grows.items():
            lacks[name] += more
        late = [name for name in shares if lacks[name] >= least] or [max(shares, key=lacks.__getitem__)]
        found.append(min(late, key=lambda name: Fraction(most - lacks[name], grows[name])))
        lacks[found[-1]] -= scale
    return found


def unfilled(slots: Sequence[str], registered: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the environments of a step's groups that are not registered.

    A replacement plays the environment of the first replaced group that has none, so that quotas hold. `slots` are the
    environments of the step's first groups, in order; `registered` is the environment of each group, in order, and
    whether it was replaced.
    """
    first, later = registered[: len(slots)], registered[len(slots) :]
    waiting = [name for name, replaced in first if replaced]
    for name, replaced in later:
        waiting.remove(name)
        if replaced:
            waiting.append(name)
    return [*slots[len(first) :], *waiting]
