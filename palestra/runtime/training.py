"""`train`: a rollout function or an environment, and tasks, go in; a trained model comes out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from itertools import islice

from palestra.client import AsyncClient, Worker
from palestra.client.harness import HarnessProgram
from palestra.client.plain_values import checked_count
from palestra.client.task_files import SpooledTasks, TaskCheck, TaskFile, read_task_files
from palestra.client.worker import Rollout
from palestra.config import JobConfig, ServerConfig
from palestra.envs.catalog import adapted
from palestra.envs.tasks import Split
from palestra.errors import ConfigError
from palestra.learner.samplers import SamplerMaker
from palestra.rollout import RolloutSpec
from palestra.runtime.arguments import (
    EnvironmentMaker,
    Play,
    RewardFunction,
    TaskData,
    Tasks,
    check_sampler_argument,
    is_function,
    resolve_config,
    resolve_rollout,
    resolve_tasks,
    task_check,
    with_harness,
    with_judge,
)
from palestra.runtime.console import Console
from palestra.runtime.job_thread import OWN_WORKER, Interrupts, JobThread, TrainResult, run
from palestra.runtime.run_dir import resolve_run_dir
from palestra.runtime.tasks import task_of
from palestra.runtime.terms import JobTerms
from palestra.store.browsing import browse
from palestra.store.tasks import are_sealed
from palestra.types.conversations import read_conversations
from palestra.waiting import race

ARGUMENTS: dict[Split, str] = {"validation": "validation_tasks", "train": "tasks"}
SAVE_SECONDS = 120.0  # limit for saving after an error of the rollout function


def train(
    rollout: Rollout | RolloutSpec | None = None,
    tasks: Tasks = (),
    config: JobConfig | None = None,
    *,
    model: str | Mapping[str, str] | None = None,
    environment: EnvironmentMaker | str | None = None,
    reward: RewardFunction | None = None,
    harness: HarnessProgram | str | None = None,
    sampler: SamplerMaker | None = None,
    validation_tasks: Tasks = (),
    concurrency: int | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a model on episodes that are played in this process, and show progress.

    Exactly one of `rollout`, `environment`, `reward`, `harness` and `config` says how an episode is played. A rollout
    function calls the model server, which listens on a loopback port, like a remote one. Environments call it in the
    same process, without HTTP: their code on the event loop must not block.

    Args:
        rollout: a function `(task, endpoint)`, sync or async. It gets a task and a `ModelEndpoint` (base_url, api_key,
            model for any OpenAI client) and returns a reward, rewards by agent, or a `RolloutResult`. After an
            exception the episode is released without a reward. Or a `RolloutSpec`: an environment, and its agents.
        tasks: JSON objects: a list, an iterator, a data set of `datasets` (streaming, too), a DataFrame, the path of a
            JSONL file, or a function that returns one of these. All are checked and stored before the first step, and
            few are in memory at a time. A rollout function, environment or reward gets each task with all of its keys;
            `id` also names it. An iterator may be endless: the job takes one task for each group. May be empty if the
            configuration names files, or an environment that generates tasks; with tasks given, such an environment
            generates none. A resumed run goes on with the tasks that it has stored: iterators, functions and files are
            not read again, and a list or data set with other tasks is refused.
        config: the job; None for the defaults. The server takes any free port, unless the job has `seats` and
            `server.port` is given: external players call it from other processes.
        model: a model's name, or the folder of a model, a checkpoint, or a run (its best validated weights in
            `checkpoints/best`, or else its newest checkpoint); or models by policy name. For a run with several trained
            policies, each policy takes the checkpoint of its own name; `RUN/checkpoints/NAME` names one. None: the
            configuration's.
        environment: an environment's class, a factory without arguments, or the name of one that ships with Palestra
            (`palestra environments`). Or a class, an instance or an id of Gymnasium, which `GymnasiumEnvironment`
            adapts: actions are read from the reply's text.
        reward: scores one answer to each task's `prompt`: `(task, answer) -> float`, or a function in TRL's form.
            Either may have parameters named `finish_reason`, `messages`, `calls`, `prompt_tokens`, `completion_tokens`
            and `completion_ids`. A result of None is not scored, and left out. Several named rewards, which the job
            weights and adds up (`algorithm.reward_weights`), are a dict of functions, or a function that returns a dict
            of numbers; None leaves out one of them. Or a judge, such as `palestra_judges.Rubric`.
        harness: a program that plays each task in a workspace, such as a coding agent: a name of `palestra harness
            list`, or a `palestra_harness.Harness`; `config.harness` has its settings. `reward` is then a function
            `(task, result)` that scores a `palestra_harness.HarnessResult`.
        sampler: chooses the training tasks of each step: a class derived from `TaskSampler`, or a function
            `(pool, seed)` that makes one; see `check_sampler`. None: `[curriculum]`, or all tasks in a new random order
            every epoch.
        validation_tasks: held-out tasks, in the same forms, instead of the environment's; scored greedily every
            `evaluation.every_steps` steps.
        concurrency: number of concurrent episodes; None: one step's episodes, at most 64.
        resume: whether to continue the run in the configured folder (or the newest of the job's name).
        quiet: whether to suppress output.

    Returns:
        The run's folder, its newest checkpoint, and the rows of its metrics.

    Raises:
        ConfigError: no argument says what to play, or several do; an argument has a wrong type; or `concurrency` is
            below 1.
        Conflict: a resumed run has other tasks.
        InvalidRequest: a task is not a JSON object.
        PalestraError: the job failed; the message says why and what to do.
        KeyboardInterrupt: after Ctrl-C. The present training step is finished, the run is saved, and `resume` continues
            it. A second Ctrl-C does not wait for that.
        SystemExit: after SIGTERM, with exit code 143; the run is saved in the same way.
    """
    environment = adapted(environment)
    result, interrupts = train_until_stopped(
        Play(
            rollout=rollout,
            environment=environment,
            reward=reward,
            harness=None if isinstance(harness, str) else harness,
            sampler=sampler,
        ),
        tasks,
        with_harness(resolve_config(config, model, environment), harness),
        validation_tasks=validation_tasks,
        concurrency=concurrency,
        resume=resume,
        quiet=quiet,
    )
    done = (
        "training was over" if result.state == "completed" else "training was stopped and saved; go on with resume=True"
    )
    interrupts.raise_received(f"{done} (the run is in {result.run_dir})")
    return result


def train_until_stopped(
    play: Play,
    tasks: Tasks,
    config: JobConfig,
    *,
    validation_tasks: Tasks = (),
    concurrency: int | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> tuple[TrainResult, Interrupts]:
    """Train like `train`, and also return the received signals, so that the caller chooses how to end."""
    if concurrency is not None:
        concurrency = checked_count("concurrency", concurrency)
    config = with_judge(config, play.reward)
    played = resolve_rollout(config, play)
    check_sampler_argument(config, play.sampler)
    if config.kind != "training":
        raise ConfigError(f"`train` is given a configuration with kind = {config.kind!r}; leave kind out")
    notes: list[str] = []
    config = resolve_run_dir(config, resume, notes.append)
    with contextlib.ExitStack() as stack:
        source = _TaskSource(config, task_check(config, play.reward), notes.append, stack)
        found = source.tasks({"validation": validation_tasks, "train": tasks})
        if not (found or source.stored or _has_tasks(config)):
            # The algorithm brings the training tasks, and there are none to validate on, for which the job would wait.
            off = config.evaluation.model_copy(update={"every_steps": 0, "every_tokens": None})
            config = config.model_copy(update={"evaluation": off})
        limits = config.environment.model_copy(update={"max_concurrency": concurrency} if concurrency else {})
        config = config.model_copy(update={"server": _listening(config), "environment": limits})
        playing = concurrency or min(64, config.rollout.group_size * config.rollout.groups_per_step)
        console = Console(config, quiet=quiet, notes=notes)
        spec = played if isinstance(played, RolloutSpec) else None
        function = None if isinstance(played, RolloutSpec) else played
        # This is the user's own process.
        terms = JobTerms(own_code=True, plays=function is None, tasks=found, sampler=play.sampler)
        server = JobThread(config, console, spec, terms)
        with console, Interrupts(server.stop) as interrupts:
            run(play_until_over(server, function, playing))
            result = server.result()
            console.finished(result.state, result.checkpoints)
    return result, interrupts


class _TaskSource:
    """Where the tasks of a job come from: the arguments of `train`, files, or an earlier start of the run.

    Attributes:
        stored: whether the run has all of its tasks on disk.
    """

    def __init__(
        self, config: JobConfig, check: TaskCheck | None, note: Callable[[str], None], stack: contextlib.ExitStack
    ) -> None:
        self._config, self._note, self._stack = config, note, stack
        self._algorithm = config.algorithm_of(config.players.default)
        self._check = check
        self.stored = False
        if (store := config.folder / "run.db").exists():
            with browse(store) as connection:
                self.stored = are_sealed(connection)

    def tasks(self, given: Mapping[Split, Tasks]) -> dict[str, TaskFile]:
        """Return the tasks by split, checked before anything is loaded; without those that the run has on disk."""
        found: dict[str, TaskFile] = {
            split: source for split, tasks in given.items() if (source := self._source(split, tasks)) is not None
        }
        config = self._config
        if found and config.tasks.train is not None:
            raise ConfigError(
                "tasks are given to `train`, and tasks.train names a file of them; leave one of the two out"
            )
        if found and config.environments:
            raise ConfigError(
                "tasks are given to `train`, and [[environments]] have their own; leave one of the two out"
            )
        if not ("train" in found or self.stored or _has_tasks(config) or config.brings_tasks):
            raise ConfigError("the job has no training tasks: give `train` some, or name a file in tasks.train")
        return found if found or self.stored else read_task_files(config, self._check)

    def _source(self, split: Split, tasks: Tasks) -> TaskFile | None:
        """Return the tasks of an argument; None: there are none, or the run has them."""
        name = ARGUMENTS[split]
        if self.stored and (isinstance(tasks, str) or not hasattr(tasks, "__len__")):
            self._note(f"the run has its tasks on disk, and goes on with those; `{name}` is not read again")
            return None
        given = tasks() if is_function(tasks) else tasks
        rows = resolve_tasks(name, given)
        check = self._conversation if split == "train" and self._algorithm.learns_conversations else self._check
        if isinstance(rows, TaskFile):
            return rows if rows.count(check) else None
        if split == "train" and not hasattr(given, "__len__"):  # it may be endless
            rows = islice(rows, self._config.steps * self._config.rollout.groups_per_step)
        folder = next(folder for folder in self._config.folder.absolute().parents if folder.is_dir())
        spooled = self._stack.enter_context(contextlib.closing(SpooledTasks(rows, name, folder, check)))
        return spooled if len(spooled) else None

    def _conversation(self, task: TaskData) -> None:
        """Check a task to learn from."""
        read_conversations(task_of(dict(task)), pairs=self._algorithm.learns_pairs)


def _listening(config: JobConfig) -> ServerConfig:
    """Return the server's settings with a free port, or the configured one, which external players must know."""
    if config.seats.roles and config.server.port_is_given:
        return config.server
    return config.server.model_copy(update={"port": 0})


def _has_tasks(config: JobConfig) -> bool:
    """Return whether the configuration names an environment that makes tasks, or files of tasks."""
    return bool(config.environments) or config.environment.name is not None or config.tasks.train is not None


async def play_until_over(server: JobThread, rollout: Rollout | None, concurrency: int) -> None:
    """Play episodes until the job, which is started here, is over or was stopped.

    Without a `rollout`, the server plays the episodes itself.
    """
    job = await server.start()
    try:
        if rollout is None:
            await server.ended.wait()
            return
        async with AsyncClient(job.url, job.api_key, worker_id=OWN_WORKER) as client:
            await race(Worker(client, rollout, concurrency).run(), server.ended.wait())
    except Exception:
        # The job saves what it has trained before the error is raised: the job's thread ends with the process.
        server.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAVE_SECONDS):
                await server.ended.wait()
        raise
    finally:
        server.stop()
