"""What keeps the version on trial in its stage, in words."""

from __future__ import annotations

from palestra_live.gate.machine import RATIOS, Gate
from palestra_live.gate.records import VersionStage
from palestra_live.gate.statistics import FEWEST, Differences, pairs_needed


def standing(gate: Gate) -> str:
    """Return what the version on trial waits for, in one line; empty: none is on trial."""
    if (trial := gate.trial) is None:
        return ""
    stage = gate.stages[trial.version]
    if stage is VersionStage.CANDIDATE:
        why = "held-out tasks are not scored yet" if trial.held_out is None else "the audit is not over"
    elif stage is VersionStage.SHADOW:
        why = _undecided(gate, trial.shadow, gate.bounds.margin, 0.0)
    else:
        found, margin = trial.canary["score"].differences, gate.canary_margin
        against = [_broken(gate, name) for name in gate.blocked_by()]
        if gate.held is not None:
            against.append(f"promotions are stopped by {gate.held}")
        if found.interval.low > margin:
            why = f"wins, but {', '.join(against)}" if against else "wins, which its next session decides"
        else:
            why = ", and ".join([_undecided(gate, found, margin, gate.bounds.canary), *against])
    return f"version {trial.version}, {stage}: {why}"


def _broken(gate: Gate, name: str) -> str:
    """Return how far a version is beyond a guardrail."""
    assert gate.trial is not None
    mean, most = gate.trial.canary[name].differences.mean, getattr(gate.bounds.guardrails, name)
    if name not in RATIOS:
        return f"{name} {mean:+.3f} > {most:g}"
    times = "∞" if mean >= 1.0 else f"{(1.0 + mean) / (1.0 - mean):.2f}"  # see `Pairing.add`
    return f"{name} {times} times > {most:g}"


def _undecided(gate: Gate, found: Differences, margin: float, share: float) -> str:
    """Return how many more pairs it takes. `share`: of the sessions that give pairs; 0: sessions are not counted."""
    gap, most = abs(found.mean - margin), gate.bounds.pairs
    if found.size < FEWEST:
        left, why = FEWEST - found.size, "before anything is decided"
    elif gap > 0.0 and (needed := pairs_needed(gap, found.deviation)) <= most:
        left, why = max(needed - found.size, 1), f"if the difference stays {found.mean:+.3f} (margin {margin:g})"
    else:
        left, why = most - found.size, f"until it is rejected: {found.mean:+.3f} is too near to the margin {margin:g}"
    sessions = f" (about {left / share:,.0f} sessions)" if share else ""
    return f"{left:,} more pairs{sessions} {why}"
