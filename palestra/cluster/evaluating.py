"""`palestra eval`: a model, or a checkpoint, scored once on each task, greedily, as validation does while training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from palestra.client.worker import Rollout
from palestra.cluster.console import Console
from palestra.cluster.foreground import Interrupts, run
from palestra.cluster.job_thread import JobThread
from palestra.cluster.tasks import task_of
from palestra.cluster.training import Rollouts, play_until_over
from palestra.config import JobConfig
from palestra.ledger.browsing import browse, list_episodes
from palestra.rollout import Play

if TYPE_CHECKING:
    from palestra.cluster.local import LocalJob

NORMAL_95 = 1.959964  # of the normal distribution: 95 % lie within so many standard deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOutcome:
    """What became of one task."""

    task_id: str
    episode_id: str
    reward: float | None  # the sum over agents; None: every attempt failed
    reason: str | None  # why the last attempt failed; None where there is a reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The outcomes of all tasks, in their order."""

    outcomes: tuple[TaskOutcome, ...]
    complete: bool  # False: it was stopped before the end

    @property
    def rewards(self) -> list[float]:
        """Of the tasks that were scored."""
        return [outcome.reward for outcome in self.outcomes if outcome.reward is not None]

    @property
    def mean(self) -> float | None:
        """Mean reward of the tasks that were scored; None without one."""
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean over tasks; None with fewer than two.

        For rewards of 0 and 1 Wilson's score interval (1927), else the mean plus and minus 1.96 standard errors.
        """
        rewards, mean = self.rewards, self.mean
        count = len(rewards)
        if count < 2 or mean is None:
            return None
        if set(rewards) <= {0.0, 1.0}:
            square = NORMAL_95**2
            middle = (mean + square / (2 * count)) / (1 + square / count)
            root = math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
            half = NORMAL_95 * root / (1 + square / count)
            return max(0.0, middle - half), min(1.0, middle + half)
        variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1)
        half = NORMAL_95 * math.sqrt(variance / count)
        return mean - half, mean + half


def evaluate_model(
    what: Rollout | Play,
    tasks: Sequence[Mapping[str, Any]],
    config: JobConfig,
    *,
    concurrency: int = 64,
    quiet: bool = False,
) -> Evaluation:
    """Score a model once on each task, greedily; nothing is trained.

    Args:
        what: a rollout function `(task, policy)`, or an environment to be played.
        tasks: JSON objects; a key `id` names a task.
        config: the job; `policies` names the model, which may be a checkpoint's folder. Episodes are kept where it has
            a `run_dir`.
        concurrency: episodes that are played at the same time.
        quiet: print nothing.

    Raises:
        PalestraError: the model can't be loaded, or nothing but failures came.
    """
    scored = [task_of(dict(task)) for task in tasks]
    with TemporaryDirectory(prefix="palestra-") as folder:
        run_dir = Path(folder) / "run" if config.run_dir is None else config.run_dir
        environment = config.environment.model_copy(update={"max_concurrency": concurrency, "name": None})
        server = config.server.model_copy(update={"port": 0})
        config = config.model_copy(
            update={"kind": "training", "server": server, "run_dir": run_dir, "environment": environment}
        )
        console = _Console(config, quiet=quiet)
        play = what if isinstance(what, Play) else None
        thread = JobThread(config, console, play, scored=scored)
        with console, Interrupts(thread.stop):  # what was scored until then is returned, and said to be incomplete
            run(play_until_over(thread, Rollouts(None if isinstance(what, Play) else what, (), (), concurrency)))
            result = thread.result()
        with browse(run_dir / "run.db") as connection:
            rows = list_episodes(connection, "validation", None, len(scored))
        outcomes = tuple(
            TaskOutcome(task_id=row.task_id, episode_id=row.episode_id, reward=row.reward, reason=row.reason)
            for row in rows
        )
        return Evaluation(outcomes=outcomes, complete=result.state == "completed")


class _Console(Console):
    """Shows how far an evaluation is."""

    def ready(self, job: LocalJob) -> None:
        self._job = job

    def report(self, kind: str, data: dict[str, Any]) -> None: ...

    def finished(self, state: str, checkpoint: Path | None) -> None: ...

    def _headline(self) -> str:
        return f"evaluating {self._config.policy.model}"

    def _target(self) -> str:
        return ""

    def _now(self, job: LocalJob | None) -> Sequence[RenderableType]:
        return (Text(self._situation(job)[1], style="dim", no_wrap=False, overflow="fold"),)
