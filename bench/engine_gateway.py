"""The gateway with the fake engine at 512 calls in flight: CPU and memory of a call, growth, the first chunk."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from typing import Any

from figures import Part
from load_runs import Runs, measure
from processes import HERE, KEY, Server, bare_server, palestra_server, run_json, shown

IN_FLIGHT = 512
COST_TABLE = f"Gateway, fake engine: {IN_FLIGHT} calls in flight (calls as in data-plane)"
HELD_TABLE = "Gateway: memory of the calls that wait for the engine"
GROWTH_TABLE = "Gateway: resident memory over many calls, in episodes of 16 calls that end"
STREAM_TABLE = "Gateway: time to the first streamed chunk, fake engine"
HELD_SECONDS = 5.0  # that the engine takes for a reply, so that all calls are waiting at the same time
QUICK_CALLS, FULL_CALLS = 20_000, 100_000
TASKS = [{"id": f"t{number}", "question": f"What is {number} + {number}? " * 10} for number in range(64)]
# Steps end and are trained (by a trainer that only hashes), as in a real run: what they had must be given back.
ENDING = {"rollout": {"groups_per_step": 64, "group_size": 8, "lease_seconds": 3600.0}}
ENDLESS = {"rollout": {"groups_per_step": 64, "group_size": 64, "lease_seconds": 3600.0}}
SLOW = {**ENDLESS, "engine": {"kind": "fake", "delay_seconds": HELD_SECONDS}}


def run(part: Part, quick: bool) -> None:
    """Each on a server of its own, so that one's memory is not the other's."""
    runs = Runs(repeats=1, seconds=3.0) if quick else Runs(repeats=3, seconds=5.0)
    with palestra_server(ENDLESS, TASKS) as palestra, bare_server() as bare:
        servers = (palestra, bare)
        measure(Part(name="warm-up"), "", "chat", 8, servers, Runs(repeats=1, seconds=1), "call", "")
        measure(part, COST_TABLE, "chat", IN_FLIGHT, servers, runs, "call", f"{IN_FLIGHT} in flight")
        add_first_chunks(part, palestra, runs)
    with palestra_server(SLOW, TASKS) as slow:
        add_held(part, slow)
    with palestra_server(ENDING, TASKS) as palestra:
        add_growth(part, palestra, QUICK_CALLS if quick else FULL_CALLS)


def add_held(part: Part, server: Server) -> None:
    """KiB that a waiting call takes."""
    found, command = _load("held", server, "--workers", IN_FLIGHT)
    part.add(HELD_TABLE, f"{IN_FLIGHT} waiting", command, KiB_per_call=found["held_kib"], errors=[found["errors"]])


def add_growth(part: Part, server: Server, calls: int) -> None:
    """Resident memory at quarters of the calls, and how fast it grows in the second half."""
    found, command = _load("growth", server, "--workers", IN_FLIGHT, "--calls", calls)
    samples = [(done, mib) for done, mib in found["rss_mib"]]
    columns = {f"MiB at {share}%": [_at(samples, calls * share / 100)] for share in (0, 25, 50, 75, 100)}
    late = [(float(done), mib) for done, mib in samples if done >= calls / 2]
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope * 1e3
    part.add(
        GROWTH_TABLE,
        f"{calls:,} calls, {IN_FLIGHT} in flight",
        command,
        **columns,
        **{"MiB a 1,000 calls in the second half": [slope]},
        calls_per_s=[found["per_second"]],
        server__CPU__ms_per_call=[found["server_cpu_ms"]],
        errors=[found["errors"]],
    )
    _note_errors(part, "growth", found)


def add_first_chunks(part: Part, server: Server, runs: Runs) -> None:
    """Milliseconds to the first chunk and to the last; a note where the server does not stream."""
    for workers in (1, IN_FLIGHT):
        results = []
        for _ in range(runs.repeats):
            found, command = _load("stream", server, "--workers", workers, "--seconds", runs.seconds)
            if found.get("refused"):
                part.notes.append(f"streaming is skipped: the server refuses it ({found['refused']})")
                return
            results.append(found)
        columns = {name: [found[key] for found in results] for name, key in STREAM_COLUMNS.items()}
        part.add(STREAM_TABLE, f"{workers} in flight", command, **columns)
        _note_errors(part, f"{workers} streams", results[-1])


STREAM_COLUMNS = {
    "first chunk p50 ms": "first_p50_ms",
    "first chunk p99 ms": "first_p99_ms",
    "last chunk p50 ms": "p50_ms",
    "streams_per_s": "per_second",
    "errors": "errors",
}


def _load(work: str, server: Server, *options: object) -> tuple[dict[str, Any], str]:
    command = (sys.executable, HERE / "load_gateway.py", work)
    return run_json((*command, server.url, KEY, server.pid, *options)), shown((*command, "URL", "KEY", "PID", *options))


def _note_errors(part: Part, row: str, found: Mapping[str, Any]) -> None:
    part.notes.extend(f"{row}: {count} x {kind}" for kind, count in found["error_kinds"].items())


def _at(samples: list[tuple[int, float]], calls: float) -> float:
    """MiB at the sample that is nearest to so many calls."""
    return min(samples, key=lambda sample: abs(sample[0] - calls))[1]
