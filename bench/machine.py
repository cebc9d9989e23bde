"""Which machine this is, and whether anything else was running on it meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

QUIET_SHARE = 0.05  # of all cores: above it, a part is marked as disturbed
WATCH_SECONDS = 2.0


@contextmanager
def observed(machine: dict[str, Any]) -> Iterator[None]:
    """Fill `machine` with what the machine is, and how busy others kept it before and during the block."""
    machine |= {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "load_average_before": os.getloadavg(),
        "busy_share_before": round(psutil.cpu_percent(WATCH_SECONDS) / 100, 3),
        "fsyncs_per_second": round(_fsync_rate()),
    }
    busy, own, wall = _busy_seconds(), _own_seconds(), time.monotonic()
    try:
        yield
    finally:
        wall = time.monotonic() - wall
        others = max(0.0, _busy_seconds() - busy - (_own_seconds() - own))
        machine["seconds"] = round(wall, 1)
        machine["others_busy_share"] = round(others / wall / (os.cpu_count() or 1), 3)


def remark(machine: dict[str, Any]) -> str:
    """One line for people."""
    before, others = machine["busy_share_before"], machine["others_busy_share"]
    quiet = "quiet" if max(before, others) <= QUIET_SHARE else "NOT QUIET, measure again"
    load = " ".join(f"{value:.2f}" for value in machine["load_average_before"])
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}; load average before {load}; other processes "
        f"used {before:.0%} of the cores just before and {others:.0%} meanwhile ({quiet}); "
        f"{machine['fsyncs_per_second']} fsyncs/s on this disk"
    )


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name", platform.processor() or platform.machine())
    family = f" family {found['cpu family']} model {found['model']}" if "cpu family" in found else ""
    return name + family


def _busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0) + getattr(times, "softirq", 0))


def _own_seconds() -> float:
    """CPU seconds of this process and of all its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in both)


def _fsync_rate(seconds: float = 0.5) -> float:
    """Appends of 4 KiB, each made durable, a second: the most that one call at a time can be committed."""
    path = Path(__file__).with_name(".fsync")
    count, stop = 0, time.perf_counter() + seconds
    try:
        with path.open("wb", buffering=0) as file:
            while time.perf_counter() < stop:
                file.write(b"x" * 4096)
                os.fdatasync(file.fileno())
                count += 1
    finally:
        path.unlink(missing_ok=True)
    return count / seconds
