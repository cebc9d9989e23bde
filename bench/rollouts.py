"""Rollouts with steps that sleep: Palestra's whole way beside bare asyncio, Tunix and verifiers, in turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import known
from figures import Part
from processes import HERE, ROOT, run_json, shown
from sleeps import STEPS, Workload

TABLE = "Rollouts: {0.episodes:,} episodes of 5 steps, {0.slots:,} at a time, sleeping {1:g} ms a step in the mean"
ONE_CORE_TABLE = (
    "{0.episodes:,} episodes of 5 steps, {0.slots:,} at a time: the least that one core could do (computed)"
)
STEP_MICROS = (400, 300, 200, 150, 100, 50)
TOOLS_TABLE = "100 tool calls of 100 ms in one turn, milliseconds"
SMALL = Workload(episodes=1000, slots=256, mean_seconds=0.05)
LARGE = Workload(episodes=10_000, slots=10_000, mean_seconds=0.5)
PEERS = ROOT / ".venv-peers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A runner, which is given the workload."""

    name: str
    command: tuple[object, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


PALESTRA = Contestant(name="Palestra, synchronous=FULL", command=(sys.executable, HERE / "rollouts_palestra.py"))
NORMAL = Contestant(
    name="Palestra, synchronous=NORMAL",
    command=(sys.executable, HERE / "rollouts_palestra.py", "--synchronous", "NORMAL"),
)
FLOOR = Contestant(name="bare asyncio (floor)", command=(sys.executable, HERE / "rollouts_asyncio.py"))
PYTHONPATH = {"PYTHONPATH": "bench"}
TUNIX = Contestant(
    name="Tunix 0.1.7, 256 threads",
    command=(PEERS / "tunix" / "bin" / "python", HERE / "peers" / "rollouts_tunix.py"),
    environment=PYTHONPATH | {"JAX_PLATFORMS": "cpu"},
)
VERIFIERS = Contestant(
    name="verifiers, classic",
    command=(PEERS / "verifiers-classic" / "bin" / "python", HERE / "peers" / "rollouts_verifiers.py"),
    environment=PYTHONPATH,
)


def run(part: Part, quick: bool) -> None:
    """The small workload for all, the large one for Palestra and the floor, then tools."""
    field = [FLOOR, PALESTRA, NORMAL]
    for peer in (TUNIX, VERIFIERS):
        if ROOT.joinpath(str(peer.command[0])).exists():
            field.append(peer)
        else:
            part.notes.append(f"{peer.name} is skipped: it has no environment; bench/peers/README.md says how")
    add_workload(part, SMALL, field, rounds=2 if quick else 5)
    if not quick:
        add_workload(part, LARGE, [FLOOR, PALESTRA], rounds=2)
        add_one_core(part, LARGE)
    add_tools(part)
    known.add_rollouts(part)


def add_workload(part: Part, work: Workload, field: Sequence[Contestant], rounds: int) -> None:
    """All contestants in turns, each round in another order."""
    options = ("--episodes", work.episodes, "--slots", work.slots, "--mean-ms", work.mean_seconds * 1e3)
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in field}
    for number in range(rounds):
        for one in field if number % 2 == 0 else reversed(field):
            found[one.name].append(run_json((*one.command, *options), one.environment))
    table, ideal = TABLE.format(work, work.mean_seconds * 1e3), work.ideal_seconds()
    for one in field:
        walls = [result["wall"] for result in found[one.name]]
        part.add(
            table,
            one.name,
            shown((*one.command, *options), one.environment),
            wall__s=walls,
            wall__over__ideal=[wall / ideal for wall in walls],
            **{"CPU µs a step": [1e6 * result["cpu"] / work.episodes / STEPS for result in found[one.name]]},
            peak__RSS__MiB=[result["peak_rss_mib"] for result in found[one.name]],
        )
    part.notes.append(f"{table}: the ideal schedule takes {ideal:.3f} s; CPU is of the whole process, all threads")


def add_one_core(part: Part, work: Workload) -> None:
    """What the wall time would be at best if a step took so much of one core: computed, not run."""
    ideal = work.ideal_seconds()
    for micros in STEP_MICROS:
        wall = work.one_core_seconds(micros / 1e6)
        part.add(
            ONE_CORE_TABLE.format(work),
            f"{micros} µs a step",
            "Workload.one_core_seconds in bench/sleeps.py",
            wall__s=[wall],
            wall__over__ideal=[wall / ideal],
        )


def add_tools(part: Part) -> None:
    """One turn with many calls; the first turn, which makes the threads, is counted, too."""
    command = (sys.executable, HERE / "rollouts_tools.py")
    for name, values in run_json(command).items():
        part.add(TOOLS_TABLE, f"{name} tools", shown(command), turn__ms=values, median__ms=[statistics.median(values)])
