"""What `palestra live` does with the gate: `status` shows its decisions, and the others are orders to it."""

from __future__ import annotations

import getpass
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import ConfigError
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra_live.gate.ledger import Decided
    from palestra_live.gate.machine import Gate

ORDERS = ("promote", "back", "hold", "resume")


def obey(folder: Path, order: str, which: str | None, reason: str | None) -> int:
    """Store an order in the gate of a run, which its server follows within a second, and print what it changes.

    Whoever may write to the folder of a run may give orders; the gate records the name of the account.

    Raises:
        ConfigError: the order has no reason, or cannot be followed.
        NotFound: the run has no gate.
        StoreError: its file is damaged.
    """
    import asyncio  # here, because help is quick without it

    from palestra_live.gate.ledger import GateLedger, replay
    from palestra_live.gate.records import Ordered

    if not reason or not reason.strip():
        raise ConfigError(f"say why: palestra live {order} … --reason 'TEXT'; the gate records it")
    if (which is None) == (order == "promote") or not re.fullmatch(r"\d{1,18}", which or "0"):
        raise ConfigError("the number of a version is named to promote it, and in no other order: palestra live status")
    version = None if which is None else int(which)
    replay(folder)
    told = Ordered(order=order, by=_account(), reason=" ".join(reason.split()), version=version)  # type: ignore[arg-type]

    async def give() -> None:
        ledger = GateLedger(folder)
        try:
            for one in await ledger.add(f"order {secrets.token_hex(16)}", told):
                say(_line(time.time(), one))
        finally:
            ledger.close()

    asyncio.run(give())
    return 0


def show_gate(folder: Path) -> int:
    """Print the versions of a run and the decisions about them, all of which are made again from the observations.

    Raises:
        NotFound: the run has no gate.
        StoreError: a stored decision does not follow from the observations.
    """
    from palestra_live.gate.ledger import replay

    gate, decided = replay(folder)
    for line in status(gate, decided):
        say(line)
    return 0


def status(gate: Gate, decided: list[Decided]) -> list[str]:
    """Return the lines of `palestra live status`."""
    from palestra_live.gate.standing import standing

    lines = [f"version {version}: {stage.replace('_', ' ')}" for version, stage in sorted(gate.stages.items())]
    if gate.held is not None:
        lines.append(f"promotions are stopped: {gate.held}")
    if (trial := gate.trial) is not None:
        for name, found in (("shadow", trial.shadow), ("canary", trial.canary["score"].differences)):
            if found.size:
                low, high = found.interval
                difference = f"difference {found.mean:+.3f} ({low:+.3f} to {high:+.3f})"
                lines.append(f"{name} {trial.version}: {found.size} pairs, {difference}")
        lines.append(standing(gate))
    if (watch := gate.watch) is not None:
        lines.append(
            f"watch: {watch.sessions} sessions, floor {watch.floor:.3f}, evidence {watch.evidence.nats:.2f} nats"
        )
    return [*lines, "", *(_line(one.at, one.decision) for one in decided)]


def _line(at: float, decision: object) -> str:
    from palestra_live.gate.records import GateDecision

    assert isinstance(decision, GateDecision)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    stages = "" if decision.after is None else f" -> {decision.after.replace('_', ' ')}"
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in decision.data.items())
    return f"{when}  version {decision.version}{stages}: {decision.why}" + (f" ({numbers})" if numbers else "")


def _account() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        import os

        return f"uid {os.getuid()}"
