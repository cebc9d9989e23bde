"""`evaluate` and `palestra eval`: a model is scored once on each task, greedily, as validation does during training."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from palestra.agents import ModelAgent, RandomAgent
from palestra.client.arguments import checked_count
from palestra.client.player import Rollout
from palestra.config import JobConfig, Roles, TasksConfig
from palestra.envs.adapters import adapted
from palestra.envs.catalog import catalog_entry
from palestra.errors import ConfigError, RolloutFailed
from palestra.rollout import RolloutSpec
from palestra.runtime.arguments import (
    EnvironmentMaker,
    Play,
    RewardFunction,
    Tasks,
    check_prompts,
    resolve_config,
    resolve_rollout,
    resolve_tasks,
)
from palestra.runtime.console import Console, models_of
from palestra.runtime.environments import environment_of
from palestra.runtime.job_thread import Interrupts, JobThread, run
from palestra.runtime.scores import Evaluation, TaskOutcome
from palestra.runtime.starting_points import config_of_run
from palestra.runtime.tasks import task_of
from palestra.runtime.terms import JobTerms
from palestra.runtime.training import Rollouts, play_until_over
from palestra.store.browsing import EpisodeSummary, browse, list_episodes, read_episode
from palestra.terminal import say
from palestra.types.records import Trajectory

if TYPE_CHECKING:
    from palestra.runtime.local_job import LocalJob


def evaluate(
    rollout: Rollout | RolloutSpec | None = None,
    tasks: Tasks = (),
    config: JobConfig | None = None,
    *,
    model: str | Mapping[str, str] | None = None,
    environment: EnvironmentMaker | str | None = None,
    reward: RewardFunction | None = None,
    random: Collection[str] = (),
    trajectories: bool = False,
    concurrency: int = 64,
    quiet: bool = False,
) -> Evaluation:
    """Score a model once on each task, greedily; nothing is trained.

    Where several policies of the job are not frozen, each is scored by its own rewards: `Evaluation.of`.

    Args:
        rollout: a function `(task, endpoint)`, or a `RolloutSpec`; see `train`.
        tasks: JSON objects: a list, an iterator that ends, a data set of `datasets`, or the path of a JSONL file;
            see `train`. If it is empty, those of `config.tasks.validation`, or validation tasks that an environment
            which ships with Palestra makes.
        config: the job, whose settings about training are not used; None for those of the run where `model` is a run
            or one of its checkpoints, so that prompt, limits and sampling are those of its own validation, and else for
            the defaults. If it has a `run_dir`, episodes are kept there, for `palestra episodes`.
        model: name of a model, or folder of a model, of a checkpoint, or of a run, whose weights that validated best
            (`checkpoints/best`), or else its newest checkpoint, are scored; or models by the policy's name, of
            opponents as well. Of a run that has trained several policies each takes the checkpoint of its own name, and
            `RUN/checkpoints/NAME` is that of one. None: the configuration's.
        environment: class of an environment, a function without arguments that makes one, or the name of one that ships
            with Palestra (`palestra environments`). Or a class, an instance or an id of Gymnasium, which
            `GymnasiumEnvironment` plays: actions are read from the reply's text.
        reward: scores one answer to each task's `prompt`: `(task, answer) -> float`, or a function in TRL's form.
            Either may ask by name for `finish_reason`, `messages`, `calls`, `prompt_tokens`, `completion_tokens` and
            `completion_ids`.
        random: names of agents that draw one of their legal moves (`Observation.choices`) in place of their policy,
            whose rewards are not counted; only in an environment.
        trajectories: whether each outcome has its trajectory: messages, tokens, logprobs, steps.
        concurrency: number of episodes that are played at the same time.
        quiet: whether to print nothing.

    Returns:
        The outcome of each task, in order, with the mean reward and its confidence interval.

    Raises:
        ConfigError: none of the arguments says what is played, or more than one does, or there is no task, or
            `concurrency` is below 1, or it is not clear whose model `model` is, or the environment has no agent of a
            name in `random`.
        NotFound: `model` is the folder of a run that has no checkpoint yet.
        PalestraError: the model can't be loaded, or many episodes in a row have failed.
        KeyboardInterrupt, SystemExit: after SIGINT, or SIGTERM (exit code 143); episodes are kept in `run_dir`.
    """
    environment = adapted(environment)
    found, interrupts = evaluate_until_stopped(
        Play(rollout=rollout, environment=environment, reward=reward),
        tasks,
        config_to_score(config, model, environment),
        random=random,
        trajectories=trajectories,
        concurrency=concurrency,
        quiet=quiet,
    )
    interrupts.raise_received(f"{found.scored} of {len(found.outcomes)} tasks were scored")
    return found


def play_episode(
    environment: EnvironmentMaker | RolloutSpec | str,
    task: Mapping[str, Any] | None = None,
    config: JobConfig | None = None,
    *,
    model: str | Mapping[str, str] | None = None,
) -> Trajectory:
    """Play one episode greedily, without training, and return its trajectory, with token ids and log-probabilities.

    The model is loaded for this episode alone; for several, use `evaluate(trajectories=True)`.

    Args:
        environment: what `evaluate` takes as `environment`; or a `RolloutSpec`, for agents of your own.
        task: JSON object, which the environment gets at its reset; None: `{}`.
        config: see `evaluate`.
        model: see `evaluate`.

    Returns:
        The episode with its rewards, its TimeSteps, and in each its model calls (`Trajectory.chats` has all).

    Raises:
        RolloutFailed: each attempt has failed, so that there is no reward.
        ConfigError, NotFound, PalestraError, KeyboardInterrupt: see `evaluate`.
    """
    spec = environment if isinstance(environment, RolloutSpec) else None
    made = None if isinstance(environment, RolloutSpec) else environment
    found = evaluate(spec, [task or {}], config, model=model, environment=made, trajectories=True, quiet=True)
    (outcome,) = found.outcomes
    if outcome.reason is not None or outcome.trajectory is None:
        reason = outcome.reason or "the episode was not played"
        raise RolloutFailed(reason.partition(":")[0], reason)
    return outcome.trajectory


def config_to_score(
    config: JobConfig | None, model: str | Mapping[str, str] | None, environment: EnvironmentMaker | str | None
) -> JobConfig:
    """Return the job whose policies are scored; the arguments and errors are those of `evaluate`."""
    if config is None and isinstance(model, str):
        config = config_of_run(model, environment if isinstance(environment, str) else None)
    return resolve_config(config, model, environment)


def evaluate_until_stopped(
    play: Play,
    tasks: Tasks,
    config: JobConfig,
    *,
    random: Collection[str] = (),
    trajectories: bool = False,
    concurrency: int = 64,
    quiet: bool = False,
) -> tuple[Evaluation, Interrupts]:
    """Evaluate as `evaluate` does, and also return the received signals, so that a caller may end as it likes.

    The arguments are those of `evaluate`.
    """
    concurrency = checked_count("concurrency", concurrency)
    if config.run_dir is not None and (config.run_dir / "run.db").exists():
        raise ConfigError(
            f"{config.run_dir} has a run already; choose another folder for the episodes of an evaluation"
        )
    played = resolve_rollout(config, play) or _shipped(config)
    if random:
        played = _with_random(played, random)
    given = _tasks(tasks, config)
    if play.reward is not None:
        check_prompts("tasks", given, play.reward)
    scored = [task_of(task) for task in given]
    if not scored:
        raise ConfigError(
            "there is nothing to score: give `tasks`, a list of JSON objects or a JSONL file that has some"
        )
    with TemporaryDirectory(prefix="palestra-") as folder:
        run_dir = Path(folder) / "run" if config.run_dir is None else config.run_dir
        limits = config.environment.model_copy(update={"max_concurrency": concurrency, "name": None, "url": None})
        server = config.server.model_copy(update={"port": 0})
        job = config.model_copy(
            update={
                "kind": "training",
                "server": server,
                "run_dir": run_dir,
                "environment": limits,
                "tasks": TasksConfig(),
            }
        )
        console = _Console(job, quiet=quiet)
        spec = played if isinstance(played, RolloutSpec) else None
        function = None if isinstance(played, RolloutSpec) else played
        thread = JobThread(job, console, spec, JobTerms(scored=scored))
        # After a signal, the outcomes so far are returned and marked as incomplete.
        with console, Interrupts(thread.stop) as interrupts:
            run(play_until_over(thread, Rollouts(function, (), (), concurrency)))
            result = thread.result()
        roles = config.players
        with browse(run_dir / "run.db") as connection:
            outcomes = tuple(
                _outcome(
                    row,
                    roles,
                    random,
                    read_episode(connection, row.episode_id).trajectory if trajectories else None,
                )
                for row in list_episodes(connection, "validation", None, len(scored))
            )
        complete, note = result.state == "completed", _note(outcomes, roles, random)
        if note is not None and not quiet:
            say(f"note: {note}", file=sys.stderr)
        return Evaluation(outcomes=outcomes, complete=complete, policies=roles.rivals, note=note), interrupts


def _outcome(row: EpisodeSummary, roles: Roles, random: Collection[str], trajectory: Trajectory | None) -> TaskOutcome:
    """Return the outcome of a task, without what frozen policies, past versions and random agents have earned."""
    names = roles.rivals or (roles.default,)
    policies = roles.of_episode(row.players)
    rewards = {name: reward for name, reward in (row.rewards or {}).items() if not _is_of(name, random)}
    own = {name: policies.rewards_of(name, rewards) for name in names}
    # A random agent may have been all that a policy plays; without one, no reward of its own is a reward of 0.
    sums = {name: float(sum(found.values())) for name, found in own.items() if found or not (random or roles.rivals)}
    return TaskOutcome(
        task_id=row.task_id,
        episode_id=row.episode_id,
        reward=None if roles.rivals or row.rewards is None else sums.get(roles.default),
        reason=row.reason,
        trajectory=trajectory,
        by_policy=sums if roles.rivals else {},
        by_agent=dict(row.rewards or {}),
        replays=max(row.attempts - 1, 0),
    )


def _note(outcomes: Sequence[TaskOutcome], roles: Roles, random: Collection[str]) -> str | None:
    """Return that one policy has played several agents, whose rewards add up to 0 in a game; None: it has not."""
    if roles.rivals:
        return None
    rewarded = dict.fromkeys(agent for outcome in outcomes for agent in outcome.by_agent if not _is_of(agent, random))
    learned = roles.rewards_of(roles.default, dict.fromkeys(rewarded, 0.0))
    own = sorted(agent for agent in learned if "/" not in agent and agent not in roles.pools)
    if len(own) < 2:
        return None
    return (
        f"{roles.default!r} has played {' and '.join(map(repr, own))}, and a reward is the sum of what they earned; to "
        f"score it as {own[0]!r} alone, let another policy play {own[1]!r} (roles), or let it draw its moves "
        f"(random=[{own[1]!r}], --random {own[1]})"
    )


def _is_of(agent: str, names: Collection[str]) -> bool:
    """Return whether an agent has one of the names, or is a subagent of one that has."""
    return any(agent == name or agent.startswith(f"{name}/") for name in names)


def _with_random(played: Rollout | RolloutSpec, names: Collection[str]) -> RolloutSpec:
    """Return what is played with agents that draw their moves."""
    if not isinstance(played, RolloutSpec):
        raise ConfigError("only an environment says which moves are legal; a rollout function draws its own")
    roles = tuple(getattr(played.environment(), "roles", ()))
    for name in names:
        if roles and name not in roles:
            raise ConfigError(f"there is no agent {name!r} to draw its moves; there are {', '.join(map(repr, roles))}")
    agents = played.agents or {"": ModelAgent(max_tokens=played.max_tokens)}
    return replace(played, agents={**agents, **{name: RandomAgent() for name in names}})


def _shipped(config: JobConfig) -> RolloutSpec:
    """Return the environment that the configuration names."""
    maker = environment_of(config)
    assert maker is not None, "resolve_rollout returns None for nothing else"
    return RolloutSpec(environment=maker, system=config.environment.system)


def _tasks(tasks: Tasks, config: JobConfig) -> list[dict[str, Any]]:
    found = resolve_tasks("tasks", tasks)
    if not found and config.tasks.validation is not None:
        return resolve_tasks("tasks", config.tasks.validation)
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
