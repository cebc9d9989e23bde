"""Claims and ends: how many episodes a second go through the data plane, alone and with one model call in each."""

from __future__ import annotations

import known
from data_plane import TASKS
from figures import Part
from load_runs import Runs, measure
from processes import bare_server, palestra_server

WORKERS = (1, 64, 512)
# Steps of ordinary groups; with so many a step, few end meanwhile, and those are trained by a trainer that only hashes.
JOB = {"rollout": {"groups_per_step": 1024, "group_size": 8, "lease_seconds": 3600.0}}
TABLES = {
    "episodes": "Claim + end, store on disk (synchronous=FULL)",
    "played": "Claim + one call + end, store on disk (synchronous=FULL)",
}


def run(part: Part, runs: Runs) -> None:
    """Palestra and the floor in turns, with each number of workers."""
    with palestra_server(JOB, TASKS) as palestra, bare_server() as bare:
        servers = (palestra, bare)
        measure(Part(name="warm-up"), "", "played", 4, servers, Runs(repeats=1, seconds=1), "episode", "")
        for work, table in TABLES.items():
            for workers in WORKERS:
                measure(part, table, work, workers, servers, runs, "episode", f"{workers} worker{'s' * (workers > 1)}")
    known.add_stores(part)
