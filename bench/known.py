"""Figures of peers that were measured at another time, for reading Palestra's beside them."""

from __future__ import annotations

from figures import Part

SOURCE = "issue 2 (measured earlier on a machine of this kind, with the same kind of load; not run here)"
GATEWAY = {1: 804.0, 64: 512.0, 512: 301.0}  # rllm-model-gateway, calls a second by calls in flight
STORE = 559.0  # Agent Lightning, episodes a second

# 1,000 episodes x 5 steps of 50 ms in the mean, 256 at a time: wall seconds
ROLLOUTS = {"Tunix, 256 threads": 1.91, "verifiers, classic": 2.06, "verifiers v1": 18.6}


def add_gateways(part: Part) -> None:
    """Beside the data plane."""
    table = "Data plane, known peers (measured elsewhere or earlier, not in this run)"
    row = "rllm-model-gateway, in-memory store"
    columns = {f"calls_per_s, {inflight} in flight": [rate] for inflight, rate in GATEWAY.items()}
    part.add(table, row, SOURCE, **columns)


def add_stores(part: Part) -> None:
    """Beside claim + end."""
    table = "Claim + end, known peers (measured elsewhere or earlier, not in this run)"
    part.add(table, "Agent Lightning, in-memory store, without HTTP", SOURCE, episodes_per_s=[STORE])


def add_rollouts(part: Part) -> None:
    """Beside rollouts that sleep 50 ms a step."""
    table = "Rollouts, known peers (measured elsewhere or earlier, not in this run)"
    for row, seconds in ROLLOUTS.items():
        part.add(table, row, SOURCE, wall__s=[seconds])
