"""Terminal output of a running grid: a line for each run, and the current one with the remaining time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.live import Live
from rich.text import Text

from palestra.runtime.watchdog import PlainLines
from palestra.terminal import TerminalConsole, one_line
from palestra.types.metrics import of_policies
from palestra.types.progress import duration
from palestra_lab.comparison.one_run import FINISHED, read_record
from palestra_lab.comparison.plan import PlannedRun
from palestra_lab.comparison.results import Row, read_rows


class GridProgress:
    """Shows how far a grid is, on a terminal or in plain lines."""

    def __init__(self, runs: Sequence[PlannedRun], console: TerminalConsole) -> None:
        self._runs, self._out = runs, console
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._plain = PlainLines(time.monotonic())
        self._number, self._started = 0, time.monotonic()
        self._tokens, self._read_at = 0.0, (0.0, 0)
        self._seconds: dict[Path, tuple[PlannedRun, float]] = {}

    def begin(self, number: int, run: PlannedRun) -> None:
        """Show that a run begins, or is continued."""
        self._number, self._started, self._tokens, self._read_at = number, time.monotonic(), 0.0, (0.0, 0)
        self._seconds = seconds_by_run(self._runs)
        if self._live is not None:
            self._live.start()
        again = "  (goes on)" if (run.folder / "run.db").exists() else ""
        self._say(f"[{number + 1}/{len(self._runs)}] {run.label}{again}")

    def show(self, run: PlannedRun, stopping: bool) -> None:
        """Show the present state of a run."""
        budget = run.config.token_budget or 1
        self._tokens = self._look(run.folder)
        text = f"{run.label}: {self._tokens:,.0f} of {budget:,} tokens"
        text += ", saving; again to end without" if stopping else self._left(run)
        if self._live is not None:
            self._live.update(Text(text, style="dim"), refresh=True)
        elif self._plain.due((run.label, self._tokens, stopping), time.monotonic()):
            self._out.print(text)

    def end(self, run: PlannedRun, reason: str | None) -> None:
        """Print a run's result, or why it failed. `reason` is why it failed; None: it is finished."""
        if self._live is not None:
            self._live.stop()
        if reason is not None:
            self._say(f"    failed: {one_line(reason)}; its output is in {run.log}")
            return
        self._seconds = seconds_by_run(self._runs)
        spent = duration(time.monotonic() - self._started)
        self._say(f"    {reached(run.folder)}, {spent}{self._left(None)}")

    def stopped(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()

    def _say(self, text: str) -> None:
        self._out.print(text, soft_wrap=True)
        self._plain.wrote(time.monotonic())

    def _look(self, folder: Path) -> float:
        """Return the sampled tokens of a run, read again if its metrics have changed."""
        try:
            found = (folder / "metrics.jsonl").stat()
        except FileNotFoundError:
            return 0.0
        if (found.st_mtime, found.st_size) == self._read_at:
            return self._tokens
        self._read_at = found.st_mtime, found.st_size
        return max((row.get("rollout/sampled_tokens", 0.0) for row in read_rows(folder)), default=0.0)

    def _left(self, present: PlannedRun | None) -> str:
        """Return the time left as the end of a sentence; empty while no run has shown how long one takes."""
        left = 0.0
        for run in self._runs[self._number + (present is None) :]:
            expected = expected_seconds(run, self._seconds)
            if run is present:
                spent, share = time.monotonic() - self._started, self._tokens / (run.config.token_budget or 1)
                expected = spent / share if expected is None and share > 0.05 else expected
                left += 0.0 if expected is None else max(expected - spent, 0.0)
            elif run.record in self._seconds:
                continue
            elif expected is None:
                return ""
            else:
                left += expected
        return f", about {duration(left)} left" if left else ""


def reached(folder: Path) -> str:
    """Describe the progress of a run, from its metrics."""
    rows = read_rows(folder)
    scores: dict[str, list[float]] = {}
    for row in rows:
        for policy, reward in of_policies(row, "validation/reward_mean").items():
            scores.setdefault(policy, []).append(reward)
    tokens = max((row.get("rollout/sampled_tokens", 0.0) for row in rows), default=0.0)
    each = [f"{policy} {found[0]:.2f} → {found[-1]:.2f}".lstrip() for policy, found in scores.items()]
    gained = f"validation {', '.join(each)}" if each else "no validation"
    return f"{gained} after {tokens:,.0f} tokens"


def seconds_by_run(runs: Sequence[PlannedRun]) -> dict[Path, tuple[PlannedRun, float]]:
    """Return the finished runs and their durations, by the path of the record."""
    found = {}
    for run in runs:
        if (read_record(run.record) or {}).get("state") == FINISHED:
            found[run.record] = run, _wall(read_rows(run.folder))
    return found


def expected_seconds(run: PlannedRun, known: Mapping[Path, tuple[PlannedRun, float]]) -> float | None:
    """Estimate a run's duration in seconds, from runs of its algorithm in its scenario, or others of its scenario;
    None: none is finished.
    """
    of_scenario = [(other, seconds) for other, seconds in known.values() if other.scenario == run.scenario]
    same = [seconds for other, seconds in of_scenario if other.algorithm == run.algorithm]
    found = same or [seconds for _, seconds in of_scenario]
    return fmean(found) if found else None


def _wall(rows: Sequence[Row]) -> float:
    return max((row.get("wall_seconds", 0.0) for row in rows), default=0.0)
