"""Model calls through the data plane: a real server, a fake engine, a durable store, a closed loop of clients."""

from __future__ import annotations

import known
from figures import Part
from load_runs import Runs, measure
from processes import bare_server, palestra_server

IN_FLIGHT = (1, 64, 512)
TABLE = "Data plane: calls of 2 messages, 155 words, logprobs, at most 32 tokens; store on disk (synchronous=FULL)"
# One step that never ends: every worker of every run finds an episode.
JOB = {"rollout": {"groups_per_step": 64, "group_size": 64, "lease_seconds": 3600.0}}
TASKS = [{"id": f"t{number}", "question": f"What is {number} + {number}? " * 10} for number in range(64)]


def run(part: Part, runs: Runs) -> None:
    """Palestra and the floor in turns, at each number of calls in flight."""
    with palestra_server(JOB, TASKS) as palestra, bare_server() as bare:
        servers = (palestra, bare)
        measure(Part(name="warm-up"), "", "chat", 8, servers, Runs(repeats=1, seconds=1), "call", "")
        for workers in IN_FLIGHT:
            measure(part, TABLE, "chat", workers, servers, runs, "call", f"{workers} in flight")
    known.add_gateways(part)
