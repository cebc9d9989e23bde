"""Outcomes of the seeds of a recipe, and the file that keeps them, so that a later command plays only the others."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra.store.browsing import EpisodeSummary

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "bench" / "learned"
Curve = list[tuple[int, float]]  # (step, mean reward of the held-out tasks, played greedily)


@dataclass(kw_only=True)
class Outcome:
    """One seed."""

    seed: int
    rows: list[dict[str, Any]]
    wall_seconds: float
    cpu_seconds: float
    peak_mib: float
    load: float  # average of the last minute, at the end
    shares: tuple[tuple[float, float], tuple[float, float]]  # of rewards 1 and 0.5, in the first and last validation

    tree: str = ""  # an episode of the last step, as `palestra episodes` draws it
    parts: dict[str, Curve] = field(default_factory=dict)  # of the validation, by kind of task
    machine: str = ""
    day: str = ""

    def validation(self) -> Curve:
        """(step, greedy reward on the held-out tasks)."""
        return [(r["step"], r["validation/reward_mean"]) for r in self.rows if "validation/reward_mean" in r]

    def sampled(self) -> list[float]:
        """Mean reward of the sampled episodes of each step."""
        return [r["train/reward_mean"] for r in self.rows if "train/reward_mean" in r]


def curves(run: Path, steps: list[int]) -> dict[str, Curve]:
    """Return the validation by kind of task, which is the task's id without its last part.

    Args:
        run: folder of a run.
        steps: steps of its validations, in order.
    """
    from palestra.store.browsing import browse, list_episodes

    with browse(run / "run.db") as connection:
        scored = sorted(list_episodes(connection, "validation", "completed", 10**6), key=lambda e: e.episode_id)
    rounds: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in steps])
    seen: dict[str, int] = defaultdict(int)
    for episode in scored:
        task = episode.task_id
        rounds[task.rpartition("-")[0]][seen[task]].append(episode.reward)
        seen[task] += 1
    return {
        kind: [(step, fmean(rewards)) for step, rewards in zip(steps, each, strict=True)]
        for kind, each in sorted(rounds.items())
    }


def shares(run: Path) -> tuple[tuple[float, float], tuple[float, float]]:
    """How many of the first and of the last validation's rewards are 1, and 0.5."""
    from palestra.store.browsing import browse, list_episodes

    with browse(run / "run.db") as connection:
        scored = sorted(list_episodes(connection, "validation", "completed", 10**6), key=lambda e: e.episode_id)
    count = len({episode.task_id for episode in scored})

    def of(part: Sequence[EpisodeSummary]) -> tuple[float, float]:
        return fmean(e.reward == 1.0 for e in part), fmean(e.reward == 0.5 for e in part)

    return of(scored[:count]), of(scored[-count:])


def tree(run: Path) -> str:
    """The best episode of the last step, without the tables of its tokens."""
    from palestra.store.browsing import browse, list_episodes

    with browse(run / "run.db") as connection:
        newest = list_episodes(connection, "train", "completed", 8)
    best = max(newest, key=lambda episode: (episode.reward or 0.0, episode.calls))
    command = [sys.executable, "-m", "palestra.cli.main", "episodes", str(run), best.episode_id]
    wide = os.environ | {"COLUMNS": "110"}
    shown = subprocess.run(command, env=wide, stdout=subprocess.PIPE, check=True, text=True).stdout
    lines = [line.rstrip() for line in shown.partition("\nrow 1:")[0].splitlines()]
    return "\n".join([f"$ palestra episodes runs/{run.name} {best.episode_id}", *lines]).rstrip()


class Kept:
    """The outcomes of a recipe in `bench/learned/NAME.json`.

    An outcome counts as long as the recipe's code is what it was; comments and docstrings may change.
    """

    def __init__(self, name: str, script: str, steps: int) -> None:
        """Read the file.

        Args:
            name: of the part of docs/learning.md.
            script: in recipes/, without .py.
            steps: outcomes of another number of steps don't count.
        """
        self._path, self._code, self._steps = KEPT / f"{name}.json", _code(script), steps
        self._all: dict[str, Any] = json.loads(self._path.read_text()) if self._path.is_file() else {}

    def outcome(self, seed: int) -> Outcome | None:
        """Return the outcome of a seed; None: it has to be played."""
        found = self._all.get(str(seed))
        if found is None or (found["code"], found["steps"]) != (self._code, self._steps):
            return None
        fields = found["outcome"]
        fields["shares"] = tuple(tuple(each) for each in fields["shares"])
        return Outcome(**fields)

    def keep(self, outcome: Outcome) -> None:
        """Write an outcome into the file."""
        names = ("step", "validation/reward_mean", "train/reward_mean")
        rows = [{name: row[name] for name in names if name in row} for row in outcome.rows]
        kept = {"code": self._code, "steps": self._steps, "outcome": asdict(outcome) | {"rows": rows}}
        self._all = dict(sorted((self._all | {str(outcome.seed): kept}).items()))
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(self._all, indent=1) + "\n")


def _code(script: str) -> str:
    """Return a digest of a recipe without its comments and docstrings."""
    parsed = ast.parse((ROOT / "recipes" / f"{script}.py").read_text())
    for node in ast.walk(parsed):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(parsed).encode()).hexdigest()[:16]
