"""`evaluate` and `palestra eval`: a model is scored once on each task, greedily, as validation does during training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from palestra.client.arguments import checked_count
from palestra.client.worker import Rollout
from palestra.config import JobConfig, Roles
from palestra.envs.catalog import catalog_entry
from palestra.errors import ConfigError
from palestra.rollout import RolloutSpec
from palestra.runtime.arguments import (
    EnvironmentMaker,
    RewardFunction,
    Tasks,
    check_prompts,
    resolve_config,
    resolve_rollout,
    resolve_tasks,
)
from palestra.runtime.console import Console, models_of
from palestra.runtime.job_thread import Interrupts, JobThread, run
from palestra.runtime.run_dir import newest_of_run
from palestra.runtime.tasks import task_of
from palestra.runtime.training import Rollouts, play_until_over
from palestra.store.browsing import EpisodeSummary, browse, list_episodes, read_episode
from palestra.types.records import Trajectory

if TYPE_CHECKING:
    from palestra.runtime.local import LocalJob

NORMAL_95 = 1.959964  # 95 % of a normal distribution lie within so many standard deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOutcome:
    """The outcome of one task of an evaluation: its reward, or why there is none."""

    task_id: str
    episode_id: str
    reward: float | None  # sum of the rewards of agents that no frozen policy plays; None: every attempt failed
    reason: str | None  # why the last attempt failed; None if there is a reward
    trajectory: Trajectory | None = None  # messages, tokens, logprobs and steps; None unless they were asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The outcomes of all tasks, in their order, with their mean and its confidence interval."""

    outcomes: tuple[TaskOutcome, ...]
    complete: bool  # False: the evaluation was stopped before its end

    def __repr__(self) -> str:
        """Return the mean in a line, with the number of outcomes and not the outcomes."""
        between = "" if self.interval is None else ", interval=({:.4g}, {:.4g})".format(*self.interval)
        mean = "None" if self.mean is None else f"{self.mean:.4g}"
        scored = f"{len(self.rewards)} of {len(self.outcomes)} tasks scored"
        return f"Evaluation(mean={mean}{between}, {scored}, complete={self.complete})"

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the tasks that were scored."""
        return [outcome.reward for outcome in self.outcomes if outcome.reward is not None]

    @property
    def mean(self) -> float | None:
        """Return the mean reward of the tasks that were scored, or None if there is none."""
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of the mean over tasks, or None with fewer than two rewards.

        For rewards of 0 and 1 this is Wilson's score interval (1927), otherwise the mean plus and minus 1.96 standard
        errors.
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


def evaluate(
    rollout: Rollout | RolloutSpec | None = None,
    tasks: Tasks = (),
    config: JobConfig | None = None,
    *,
    model: str | None = None,
    environment: EnvironmentMaker | str | None = None,
    reward: RewardFunction | None = None,
    trajectories: bool = False,
    concurrency: int = 64,
    quiet: bool = False,
) -> Evaluation:
    """Score a model once on each task, greedily; nothing is trained.

    Args:
        rollout: a function `(task, endpoint)`, or a `RolloutSpec`; see `train`.
        tasks: JSON objects: a list, an iterator that ends, a data set of `datasets`, or the path of a JSONL file; a key
            `id` names a task. If it is empty, an environment that ships with Palestra makes its validation tasks.
        config: the job, whose settings about training are not used; None for the defaults. If it has a `run_dir`,
            episodes are kept there, for `palestra episodes`.
        model: name of a model, or folder of a model, of a checkpoint, or of a run, whose newest checkpoint is scored;
            None: the configuration's.
        environment: class of an environment, a function without arguments that makes one, or the name of one that ships
            with Palestra (`palestra environments`).
        reward: scores one answer to each task's `prompt`: `(task, answer) -> float`, or a function in TRL's
            form, which gets texts.
        trajectories: whether each outcome has its trajectory: messages, tokens, logprobs, steps.
        concurrency: number of episodes that are played at the same time.
        quiet: whether to print nothing.

    Returns:
        The outcome of each task, in order, with the mean reward and its confidence interval.

    Raises:
        ConfigError: none of the arguments says what is played, or more than one does, or there is no task, or
            `concurrency` is below 1.
        NotFound: `model` is the folder of a run that has no checkpoint yet.
        PalestraError: the model can't be loaded, or many episodes in a row have failed.
        KeyboardInterrupt, SystemExit: after SIGINT, or SIGTERM (exit code 143); episodes are kept in `run_dir`.
    """
    found, interrupts = evaluate_until_stopped(
        rollout,
        tasks,
        resolve_config(config, newest_of_run(model) if isinstance(model, str) else model, environment),
        environment=environment,
        reward=reward,
        trajectories=trajectories,
        concurrency=concurrency,
        quiet=quiet,
    )
    interrupts.raise_received(f"{len(found.rewards)} of {len(found.outcomes)} tasks were scored")
    return found


def evaluate_until_stopped(
    rollout: Rollout | RolloutSpec | None,
    tasks: Tasks,
    config: JobConfig,
    *,
    environment: EnvironmentMaker | str | None = None,
    reward: RewardFunction | None = None,
    trajectories: bool = False,
    concurrency: int = 64,
    quiet: bool = False,
) -> tuple[Evaluation, Interrupts]:
    """Evaluate as `evaluate` does, and also return the received signals, so that a caller may end as it likes.

    `rollout`, `tasks`, `config`, `environment`, `reward`, `trajectories`, `concurrency` and `quiet` are those of
    `evaluate`.
    """
    concurrency = checked_count("concurrency", concurrency)
    if config.run_dir is not None and (config.run_dir / "run.db").exists():
        raise ConfigError(
            f"{config.run_dir} has a run already; choose another folder for the episodes of an evaluation"
        )
    played = resolve_rollout(config, rollout, environment, reward) or _shipped(config)
    given = _tasks(tasks, config)
    if reward is not None:
        check_prompts("tasks", given)
    scored = [task_of(task) for task in given]
    if not scored:
        raise ConfigError(
            "there is nothing to score: give `tasks`, a list of JSON objects or a JSONL file that has some"
        )
    with TemporaryDirectory(prefix="palestra-") as folder:
        run_dir = Path(folder) / "run" if config.run_dir is None else config.run_dir
        limits = config.environment.model_copy(update={"max_concurrency": concurrency, "name": None})
        server = config.server.model_copy(update={"port": 0})
        job = config.model_copy(
            update={"kind": "training", "server": server, "run_dir": run_dir, "environment": limits}
        )
        console = _Console(job, quiet=quiet)
        spec = played if isinstance(played, RolloutSpec) else None
        function = None if isinstance(played, RolloutSpec) else played
        thread = JobThread(job, console, spec, scored=scored)
        # After a signal, the outcomes so far are returned and marked as incomplete.
        with console, Interrupts(thread.stop) as interrupts:
            run(play_until_over(thread, Rollouts(function, (), (), concurrency)))
            result = thread.result()
        roles = config.players
        with browse(run_dir / "run.db") as connection:
            outcomes = tuple(
                TaskOutcome(
                    task_id=row.task_id,
                    episode_id=row.episode_id,
                    reward=None if row.rewards is None else _learned(roles, row),
                    reason=row.reason,
                    trajectory=read_episode(connection, row.episode_id).trajectory if trajectories else None,
                )
                for row in list_episodes(connection, "validation", None, len(scored))
            )
        return Evaluation(outcomes=outcomes, complete=result.state == "completed"), interrupts


def _learned(roles: Roles, row: EpisodeSummary) -> float:
    """Return the reward of a completed episode, without what frozen policies and past versions have earned."""
    return float(sum(roles.of_episode(row.players).trained_rewards(row.rewards or {}).values()))


def _shipped(config: JobConfig) -> RolloutSpec:
    """Return the environment that `environment.name` names."""
    name = config.environment.name
    assert name is not None, "resolve_rollout returns None for nothing else"
    maker = partial(catalog_entry(name).make, **config.environment.settings)
    return RolloutSpec(environment=maker, system=config.environment.system)


def _tasks(tasks: Tasks, config: JobConfig) -> list[dict[str, Any]]:
    found = resolve_tasks("tasks", tasks)
    if found or config.environment.name is None:
        return found
    environment = config.environment
    return catalog_entry(config.environment.name).generate("validation", environment.validation_tasks, config.seed)


class _Console(Console):
    """Shows the progress of an evaluation."""

    def ready(self, job: LocalJob) -> None:
        self._job = job

    def report(self, kind: str, data: dict[str, Any]) -> None: ...

    def finished(self, state: str, checkpoints: Mapping[str, Path]) -> None: ...

    def _headline(self) -> str:
        return f"evaluating {models_of(self._config)}"

    def _target(self) -> str:
        return ""

    def _now(self, job: LocalJob | None) -> Sequence[RenderableType]:
        return (Text(self._situation(job)[1], style="dim", no_wrap=False, overflow="fold"),)
