"""`play_matrix`: several models, or versions of one, play each other in a game of two, without training."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Connection

from palestra.agents import Agent, ModelAgent
from palestra.agents.agent import Moves, RandomAgent
from palestra.client.plain_values import checked_count, plain_task
from palestra.config import SAVED_CONFIG, JobConfig, PolicyConfig, Roles, load_config, past_name, past_of
from palestra.errors import ConfigError, NotFound, RolloutFailed
from palestra.http.server import run_on_uvloop
from palestra.learner.reporting import checkpoints_of
from palestra.rollout import RolloutSpec
from palestra.runners import Runner
from palestra.runtime.arguments import EnvironmentMaker, Tasks, resolve_tasks
from palestra.runtime.job_thread import run
from palestra.runtime.parts import build_parts, pooled_parts
from palestra.runtime.run_dir import weights_of_run
from palestra.session import PolicySet, SessionContext, Sessions
from palestra.store import RunStore, open_run_store
from palestra.store.casting import Casting
from palestra.threads import in_thread
from palestra.trainer import checkpoint
from palestra.types.clock import Clock
from palestra.types.messages import Observation
from palestra.types.records import EpisodeRecord, Task
from palestra_lab.matrix.result import Game, Matrix

RANDOM = "random"  # name of the player that draws its moves
Report = Callable[[int, int], None]


def versions_of(run_dir: Path | str, policy: str | None = None) -> dict[str, str]:
    """Return the folders of a run's kept versions of policies, by names such as `white@5`.

    These are those of its pools, and its checkpoints: each policy's oldest first, in the order of the policies.

    Args:
        run_dir: folder of the run.
        policy: None: every trained policy of the run.

    Raises:
        NotFound: the folder is not a run, or has no version.
    """
    folder = Path(run_dir)
    if not (folder / "run.db").is_file():
        raise NotFound(f"{folder} is not the folder of a run (it has no run.db)")
    config = load_config(folder / SAVED_CONFIG)
    names = config.trained_policies if policy is None else (policy,)
    versions: dict[str, str] = {}
    for name in names:
        found = {checkpoint.step_of(path): path for path in checkpoint.found(checkpoints_of(folder, name, config))}
        for path in (folder / "pool").glob(f"{name}@*"):
            found[int(path.name.rpartition("@")[2])] = path
        versions |= {past_name(name, step): str(found[step]) for step in sorted(found)}
    if not versions:
        of = " and ".join(map(repr, names))
        raise NotFound(f"{folder} has no version of {of} yet, neither in its pool nor a checkpoint")
    return versions


def legal_choices(observation: Observation) -> Sequence[str]:
    """Return the legal moves of an observation; empty if the environment gives none."""
    return observation.choices


def play_matrix(
    players: Mapping[str, str] | Path | str,
    environment: EnvironmentMaker | str | None = None,
    config: JobConfig | None = None,
    *,
    agent: Agent | None = None,
    moves: Moves | None = None,
    tasks: Tasks = (),
    games: int = 20,
    greedy: bool = False,
    seed: int | None = None,
    concurrency: int = 64,
    report: Report | None = None,
) -> Matrix:
    """Let every player play every other one, in both roles, and return mean rewards and Elo ratings.

    The same arguments give the same games, bit by bit if `config.deterministic` is true.

    Args:
        players: by name: names of models, or folders of models, checkpoints or runs. Or the folder of a run, whose
            versions of all trained policies play; see `versions_of`.
        environment: a game of two agents: a class, a factory without arguments, or a name (`palestra environments`).
            None: the run's.
        config: settings of engine and sampling, and the two roles if `[roles]` names them; None: the run's, or the
            defaults.
        agent: answers the observations of both roles with a model; None: a `ModelAgent`.
        moves: returns the legal moves of an observation; then a player `random` also plays, which draws one.
        tasks: played in a cycle, the same ones by every pair. If empty, a shipped environment's validation tasks.
        games: number for each pair in each assignment of roles.
        greedy: whether replies are the most probable ones; False: sampled with the policy's temperature.
        seed: of all sampling; None: the configuration's.
        concurrency: number of concurrent games.
        report: called with (finished games, all games); None: not called.

    Returns:
        The games, with mean rewards, intervals and ratings.

    Raises:
        ConfigError: fewer than two players, no environment or no task, or an environment without exactly two roles.
        NotFound: a folder is not a run, or has no version.
        PalestraError: a model cannot be loaded, or no game could be finished.
    """
    config = _config(players, config, seed)
    models = {name: weights_of_run(model) for name, model in _models(players).items()}
    if RANDOM in models:
        raise ConfigError(f"{RANDOM!r} is the name of the player that draws its moves; give the model another name")
    names = (*models, *([RANDOM] if moves is not None else []))
    if len(names) < 2:
        raise ConfigError(f"a matrix has at least two players, and there is {', '.join(names) or 'none'}")
    make, played = _environment(environment, config, _given(tasks))
    plan = _Plan(
        models=models,
        names=names,
        make=make,
        agent=_Seats(agent or ModelAgent(), None if moves is None else RandomAgent(moves)),
        tasks=played,
        games=checked_count("games", games),
        greedy=greedy,
        concurrency=checked_count("concurrency", concurrency),
        attempts=config.rollout.max_attempts,
        report=report,
    )
    return run(_played_elsewhere(config, plan))


def _given(tasks: Tasks) -> list[dict[str, Any]]:
    return [plain_task(task, number, "tasks") for number, task in enumerate(resolve_tasks("tasks", tasks))]


async def _played_elsewhere(config: JobConfig, plan: _Plan) -> Matrix:
    """Play on an event loop in a new thread, so that a caller with a loop of its own (a notebook) can wait."""
    return await in_thread(lambda: run_on_uvloop(_played(config, plan)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The games to play, their number, and their players."""

    models: Mapping[str, str]
    names: tuple[str, ...]
    make: EnvironmentMaker
    agent: Agent
    tasks: Sequence[Mapping[str, Any]]
    games: int
    greedy: bool
    concurrency: int
    attempts: int
    report: Report | None


class _Seats(Agent):
    """Answers for a role with its model, or with a random move where the random player has the role."""

    def __init__(self, model: Agent, draws: RandomAgent | None) -> None:
        self._model, self._draws = model, draws

    async def step(self, observation: Observation, policy: Any) -> Any:
        """Let the player of the role answer."""
        plays = self._draws if policy.name == RANDOM and self._draws is not None else self._model
        return await plays.step(observation, policy)


class _Seating(Casting):
    """Assigns players to roles in each game, by the game's number."""

    def __init__(self, roles: Roles, seats: Sequence[Mapping[str, str]]) -> None:
        super().__init__(roles, 0, 0)
        self._seats = seats

    def players(self, connection: Connection, episode: EpisodeRecord) -> dict[str, str]:
        """Return the player of each role."""
        return dict(self._seats[int(episode.task.task_id)])


def _models(players: Mapping[str, str] | Path | str) -> dict[str, str]:
    return dict(players) if isinstance(players, Mapping) else versions_of(players)


def _config(players: Mapping[str, str] | Path | str, config: JobConfig | None, seed: int | None) -> JobConfig:
    """Return the settings to play with: given ones, or those of the run whose versions play."""
    if config is None:
        config = JobConfig() if isinstance(players, Mapping) else load_config(Path(players) / SAVED_CONFIG)
    return config if seed is None else config.model_copy(update={"seed": seed})


def _environment(
    environment: EnvironmentMaker | str | None, config: JobConfig, tasks: list[dict[str, Any]]
) -> tuple[EnvironmentMaker, list[dict[str, Any]]]:
    """Return the environment's factory, and the tasks."""
    from palestra.envs.catalog import catalog_entry

    chosen = config.environment.full_name if environment is None else environment
    if chosen is None:
        raise ConfigError(
            "name the environment that is played, which the configuration does not: a class, a function that makes "
            "one, or the name of one that ships (on the command line: --environment NAME, or module:Class)"
        )
    if not isinstance(chosen, str):
        if not tasks:
            raise ConfigError(
                "there is nothing to play: give `tasks`, a list of JSON objects or a JSONL file (--tasks)"
            )
        return chosen, tasks
    entry, settings = catalog_entry(chosen), config.environment.settings
    generated = tasks or entry.generate("validation", config.environment.validation_tasks, config.seed)
    return partial(entry.make, **settings), generated


async def _played(config: JobConfig, plan: _Plan) -> Matrix:
    """Load the models, play all games, and return the matrix."""
    policies = {name: _as_player(config, name, model) for name, model in plan.models.items()}
    # The checks of a job are not for this one: it may have more policies than a job, with names of past versions.
    config = config.model_copy(update={"policies": policies, "kind": "inference", "roles": {}})
    if all(not table.in_process for table in config.engine.tables):
        parts = await pooled_parts(config, {})
    else:  # a few games need no inference workers, also where the job had some
        parts = await in_thread(lambda: build_parts(config))
    try:
        with TemporaryDirectory(prefix="palestra-") as folder, ExitStack() as stack:
            store = stack.enter_context(open_run_store(Path(folder) / "run.db", config.rollout))
            roles = await _roles(plan, store.clock)
            seats = [dict(zip(roles, pair, strict=True)) for pair in _pairs(plan)]
            cast = Roles(default=next(iter(policies)))
            store.episodes.casting = _Seating(cast, seats)
            policy_set = PolicySet(runtimes=parts.policies.runtimes, roles=cast)
            context = SessionContext(store=store, policies=policy_set, seed=config.seed)
            stack.callback(context.pool.close)
            stack.callback(context.picture_pool.close)
            spec = RolloutSpec(environment=plan.make, agents={"": plan.agent}, temperature=0.0 if plan.greedy else None)
            runner = Runner(Sessions(context, len(seats) + 1), spec)
            await parts.engine.resume()
            async with runner:
                games = await _all_games(runner, store, plan, seats, roles)
    finally:
        await parts.engine.close()
        for runtime in parts.policies.runtimes.values():
            runtime.grammars.close()
    return Matrix(players=plan.names, roles=roles, games=tuple(games))


def _as_player(config: JobConfig, name: str, model: str) -> PolicyConfig:
    """Return a player's settings: those of its policy, if it is a version of one, else of the first trained one."""
    policy, _ = past_of(name) or (name, 0)
    template = config.policies.get(policy, config.policies[config.players.default])
    return template.model_copy(update={"model": model, "frozen": True})


def _pairs(plan: _Plan) -> list[tuple[str, str]]:
    """Return the players of the first and the second role of each game, in order."""
    both = [pair for one, other in itertools.combinations(plan.names, 2) for pair in ((one, other), (other, one))]
    return [pair for pair in both for _ in range(plan.games)]


async def _roles(plan: _Plan, clock: Clock) -> tuple[str, str]:
    """Return the names of the environment's two roles."""
    made = plan.make()
    roles = tuple(getattr(made, "roles", ()))
    if len(roles) != 2:
        said = f"has the roles {', '.join(map(repr, roles))}" if roles else "does not say which roles it has (`roles`)"
        raise ConfigError(f"a matrix is of a game of two roles, and {type(made).__name__} {said}")
    return str(roles[0]), str(roles[1])


async def _all_games(
    runner: Runner, store: RunStore, plan: _Plan, seats: Sequence[Mapping[str, str]], roles: tuple[str, str]
) -> list[Game]:
    """Play every game, some at the same time, and return them in order."""
    free, over = asyncio.Semaphore(plan.concurrency), itertools.count(1)

    async def play(number: int) -> Game:
        async with free:
            # Every pair and seating plays the same tasks, each in the same order.
            task = Task(task_id=str(number), data=dict(plan.tasks[number % plan.games % len(plan.tasks)]))
            rewards, replays = await _game(runner, store, task, number, plan.attempts)
            done = next(over)
            if plan.report is not None:
                plan.report(done, len(seats))
            first, second = (seats[number][role] for role in roles)
            whole = rewards is not None and all(role in rewards for role in roles)
            earned = (rewards[roles[0]], rewards[roles[1]]) if rewards is not None and whole else None
            return Game(first, second, earned, replays)

    found = await asyncio.gather(*(play(number) for number in range(len(seats))))
    if all(game.rewards is None for game in found):
        raise ConfigError("none of the games could be finished; play one with `palestra eval` to see why")
    return list(found)


async def _game(
    runner: Runner, store: RunStore, task: Task, number: int, attempts: int
) -> tuple[dict[str, float] | None, int]:
    """Play one game; return its rewards by role, or None if every attempt failed, and the number of retries."""
    name = await store.episodes.register_adhoc(task, f"game-{number}")
    for replays in range(attempts):
        episode = await store.episodes.claim(runner.worker_id, uuid.uuid4().hex, None, name)
        if episode is None:
            return None, max(replays - 1, 0)
        try:
            return dict((await runner.play_claim(episode)).rewards), replays
        except RolloutFailed:
            continue
    return None, attempts - 1
