"""How often the gate is wrong, and how soon it is right: simulated versions with known scores, looked at every pair.

`python bench/gate.py` prints a table; `--versions` and `--seed` choose how many are simulated, and which.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import numpy.typing as npt

from palestra_live.gate.statistics import ADDED, ALPHA, FEWEST, STAKE, TIGHTEST, WATCH_ALARM

Ends = npt.NDArray[np.float64]  # of each simulated version, the pair or session that decided; inf: none
COMPARED = [(0.6, 0.6, 10_000), (0.6, 0.7, 1_500), (0.6, 0.8, 1_500), (0.6, 0.4, 1_500), (0.95, 0.95, 10_000)]
WATCHED = [0.7, 0.6, 0.5, 0.4, 0.2]
FLOOR = 0.65


def sequences(differences: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return both ends of the confidence sequence after each of a row of differences; both [rows, pairs]."""
    log = np.log(ALPHA)
    rho = np.sqrt((-2 * log + np.log(-2 * log) + 1) / TIGHTEST)
    t = np.arange(1, differences.shape[1] + 1)
    mean = np.cumsum(differences, axis=1) / t
    variance = (ADDED + np.cumsum(differences**2, axis=1) - t * mean**2) / (t + ADDED)
    width = np.sqrt(2 * (t * rho**2 + 1) / (t**2 * rho**2) * np.log(np.sqrt(t * rho**2 + 1) / ALPHA))
    half = np.where(t < FEWEST, np.inf, np.sqrt(np.maximum(variance, 0)) * width)
    return np.maximum(mean - half, -1), np.minimum(mean + half, 1)


def comparisons(live: float, new: float, pairs: int, versions: int, seed: int) -> tuple[Ends, Ends]:
    """Return when versions are promoted, and when rejected, with a margin of 0 and scores of 0 and 1.

    Args:
        live: mean score of the live version.
        new: mean score of each new version.
    """
    rng = np.random.default_rng(seed)
    ours, theirs = (rng.random((versions, pairs)) < mean for mean in (new, live))
    low, high = sequences(ours.astype(float) - theirs)
    promoted, rejected = first(low > 0), first(high < 0)
    return np.where(promoted < rejected, promoted, np.inf), np.where(rejected < promoted, rejected, np.inf)


def alarms(mean: float, sessions: int, streams: int, seed: int) -> Ends:
    """Return when the watch of each stream of scores of 0 and 1 with a mean sends a version back."""
    scores = np.random.default_rng(seed).random((streams, sessions)) < mean
    nats, over = np.zeros(streams), np.zeros((streams, sessions), bool)
    for session in range(sessions):
        nats = np.maximum(nats, 0) + np.log1p(STAKE * (FLOOR - scores[:, session]))
        over[:, session] = nats >= WATCH_ALARM
    return first(over)


def first(happened: npt.NDArray[np.bool_]) -> Ends:
    """Return the place of the first True of each row, from 1 on; inf: none."""
    return np.where(happened.any(axis=1), happened.argmax(axis=1) + 1.0, np.inf)


def _median(ends: Ends) -> str:
    # A median over all: half of them have ended by then.
    middle = float(np.median(ends))
    return f"{middle:,.0f}" if np.isfinite(middle) else "-"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=600, help="simulated versions a row")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lines = ["| live | new | pairs at most | promoted | rejected | pairs, median |", "|--:|--:|--:|--:|--:|--:|"]
    for live, new, pairs in COMPARED:
        promoted, rejected = comparisons(live, new, pairs, arguments.versions, arguments.seed)
        shares = " | ".join(f"{np.isfinite(ends).mean():.1%}" for ends in (promoted, rejected))
        lines.append(f"| {live} | {new} | {pairs:,} | {shares} | {_median(np.minimum(promoted, rejected))} |")
    lines += ["", f"Watch with a floor of {FLOOR}, 10,000 sessions:", ""]
    lines += ["| mean | sent back | sessions, median |", "|--:|--:|--:|"]
    for mean in WATCHED:
        ends = alarms(mean, 10_000, arguments.versions, arguments.seed)
        lines.append(f"| {mean} | {np.isfinite(ends).mean():.1%} | {_median(ends)} |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
