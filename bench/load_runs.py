"""Runs of the load generator against servers that are up at the same time, one server after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from figures import Part
from processes import HERE, KEY, Server, run_json, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """How often and how long."""

    repeats: int
    seconds: float


def measure(
    part: Part,
    table: str,
    work: str,
    workers: int,
    servers: Sequence[Server],
    runs: Runs,
    unit: str,
    how: str,
) -> None:
    """Add a row for each server. Servers take turns, so that what disturbs the machine disturbs all of them.

    Args:
        part: where the row goes, with `table`.
        table: its title.
        work: what the load generator does: see load.py.
        workers: how many do it at the same time.
        servers: what it is done to.
        runs: how often and how long.
        unit: of the work, in the singular.
        how: what is said of the row after the server's name.
    """
    results: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    command = [sys.executable, HERE / "load.py", work]
    options = ["--workers", workers, "--seconds", runs.seconds]
    for _ in range(runs.repeats):
        for server in servers:
            results[server.name].append(run_json([*command, server.url, KEY, server.pid, *options]))
    for server in servers:
        found = results[server.name]
        columns = {
            f"{unit}s_per_s": [run["per_second"] for run in found],
            "p50__ms": [run["p50_ms"] for run in found],
            "p99__ms": [run["p99_ms"] for run in found],
            f"server__CPU__ms_per_{unit}": [run["server_cpu_ms"] for run in found],
            "server__cores__busy": [run["server_cores"] for run in found],
            f"RSS__KiB_per_{unit}": [run["rss_kib"] for run in found],
            "tokens_per_reply": [run["reply_tokens"] for run in found if run["reply_tokens"]],
            "errors": [run["errors"] for run in found],
        }
        row = f"{server.name}, {how}"
        part.add(table, row, shown([*command, "URL", "KEY", "PID", *options]), **columns)
        for run in found:
            part.notes.extend(f"{row}: {count} x {kind}" for kind, count in run["error_kinds"].items())
