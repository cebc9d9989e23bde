"""`palestra worker`: processes that play a job's episodes, restarted until the job is over."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import (
    ENVIRONMENT,
    add_command,
    add_control,
    environment_settings,
    load_environment,
    load_task_source,
)
from palestra.cli.own_process import end_soon
from palestra.errors import ConfigError, JobOver
from palestra.extensions import load_function, sole_extension
from palestra.terminal import say

if TYPE_CHECKING:
    import asyncio

    from palestra.client import AsyncClient
    from palestra.client.async_client import Find
    from palestra.client.worker import EpisodePlayer, Rollout
    from palestra.rollout import RolloutSpec
    from palestra.types.wire import RolloutFacts

PLAYED = (
    "a rollout function, an environment, an agent or a RolloutSpec: module:name, or path/to/file.py:name; or an "
    "environment that ships (palestra environments); without it, the environment that the job names"
)
Played = Callable[["RolloutFacts"], "Rollout | RolloutSpec"]
"""Returns what is played, when it is known what the job says of itself. Raises ConfigError where they do not fit."""


def load_played(reference: str | None, environment: str | None, settings: str) -> Played:
    """Import what a worker plays. If `reference` names an agent, it acts in `environment`; None: the job's. `settings`
    are a JSON object.
    """
    given = environment_settings(settings)
    if reference is None or ":" not in reference:
        if environment is not None:
            raise ConfigError("--environment is for an agent; name one of yours, or leave it out")
        return _environment(reference, given)
    found = load_function(reference)
    if environment is None and inspect.isroutine(found) and _takes(found, 2):
        return lambda facts: found  # which the light client plays, without what environments and agents need
    from palestra.agents import Agent
    from palestra.rollout import RolloutSpec

    made = found if isinstance(found, type) else type(found)
    if issubclass(made, Agent):
        try:
            agent = found() if isinstance(found, type) else found
        except TypeError as error:
            raise ConfigError(f"{reference} can't be made without arguments ({error}); name one that is made") from None
        spec = _environment(environment, given)
        return lambda facts: RolloutSpec(environment=spec(facts).environment, agents={"": agent})
    if environment is not None:
        raise ConfigError(f"--environment is for an agent, and {reference} is none; leave it out")
    if isinstance(found, RolloutSpec):
        return lambda facts: found
    if not isinstance(found, type) and callable(found) and _takes(found, 2):
        return lambda facts: found
    return _own(reference, found, given)


def load_harness(name: str, score: str | None, settings: str) -> Played:
    """Return the rollout function of a harness.

    Args:
        score: file of the score function.
        settings: other keys of `HarnessConfig`, as a JSON object.
    """
    from palestra.client.harness import harness_rollout
    from palestra.config.parts import HarnessConfig

    if score is None:
        raise ConfigError("--harness needs --score FILE.py, whose function `score(task, result)` returns the reward")
    given = {**environment_settings(settings), "name": name, "score": Path(score)}
    rollout = harness_rollout(HarnessConfig(**given))
    return lambda facts: rollout


def _own(reference: str, found: Any, settings: Mapping[str, Any]) -> Callable[[RolloutFacts], RolloutSpec]:
    """Return the environment of a user's own class, or of a function that makes one."""
    from palestra.envs import ConcurrentEnvironment, Environment
    from palestra.rollout import RolloutSpec

    known = Environment | ConcurrentEnvironment
    if isinstance(found, known) and not callable(found):
        name = type(found).__name__
        raise ConfigError(f"{reference} is one {name}, and each episode needs its own; name the class {name}")
    if not (issubclass(found, known) if isinstance(found, type) else callable(found) and _takes(found, 0)):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise ConfigError(
            f"{reference} is a {kind}, and none that can be played: name a rollout function (task, endpoint), an "
            "environment's class, an agent, or a RolloutSpec"
        )
    make = partial(found, **settings)
    return lambda facts: RolloutSpec(environment=make)


def _environment(reference: str | None, settings: Mapping[str, Any]) -> Callable[[RolloutFacts], RolloutSpec]:
    """Return the environment of a name of the catalogue, or of a class, or the one that the job names."""
    from palestra.agents import named_agents
    from palestra.envs.catalog import catalog_maker
    from palestra.rollout import RolloutSpec

    if reference is None:

        def named(facts: RolloutFacts) -> RolloutSpec:
            if facts.environment is None:
                raise ConfigError("the job names no environment (environment.name); say what is played: " + PLAYED)
            return RolloutSpec(
                environment=catalog_maker(facts.environment, {**facts.settings, **settings}, facts.system),
                agents=named_agents(facts.agent, facts.agent_settings),
            )

        return named
    if not isinstance(made := load_environment(reference), str):
        return _own(reference, made, settings)
    catalog_maker(reference, settings)  # what is wrong is said before the job is asked
    return lambda facts: RolloutSpec(environment=catalog_maker(reference, settings, facts.system))


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a function in C that does not say what it takes
        return True
    return True


KEY_VARIABLE = "PALESTRA_API_KEY"


def add_worker(commands: Any) -> None:
    """Add the command `worker`, which takes a function and the job's address."""
    parser = add_command(
        commands,
        "worker",
        _run,
        "play a job's episodes on this machine, with a function, an environment or an agent of yours",
        "  palestra worker recipes/addition.py:rollout --url http://server:7411 --key-file api_key --concurrency 32\n"
        "  palestra worker nim.py:Nim --url http://server:7411 --key-file api_key --processes 8\n"
        "  palestra worker --harness pi --score score.py --tasks tasks.jsonl --key-file api_key --concurrency 4",
    )
    parser.add_argument("played", nargs="?", help=PLAYED)
    parser.add_argument(
        "--environment",
        help=f"the environment that an agent acts in: {ENVIRONMENT}; without it, the one that the job names",
    )
    parser.add_argument(
        "--harness",
        metavar="NAME",
        help="play with a program, such as a coding agent: a name of `palestra harness list`; without it, `played`",
    )
    parser.add_argument(
        "--score",
        metavar="FILE.PY",
        help="a file whose function `score(task, result)` returns the reward, or FILE.PY:NAME; without --harness, none",
    )
    parser.add_argument(
        "--settings",
        metavar="JSON",
        default="{}",
        help="settings of the environment, by name; or of the harness: folder, timeout_seconds, max_calls, max_tokens",
    )
    parser.add_argument("--url", default="http://127.0.0.1:7411", help="URL of the job's data plane")
    parser.add_argument("--job", help="id of a job of a control plane; without it, --url and a key")
    add_control(parser)
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        type=Path,
        help=f"file with the job's key; without it, the variable {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--tasks",
        help="push these to the job first: a JSONL file, or module:function that returns (training, validation) tasks; "
        "without it, none",
    )
    parser.add_argument(
        "--validation", metavar="FILE", type=Path, help="JSONL file of held-out tasks, with --tasks; without it, none"
    )
    parser.add_argument(
        "--concurrency", metavar="EPISODES", type=int, default=64, help="episodes at the same time in each process"
    )
    parser.add_argument("--processes", metavar="PROCESSES", type=int, default=1, help="worker processes")
    parser.add_argument("--name", default=os.uname().nodename, help="name that is recorded with each episode")
    parser.add_argument(
        "--drain-seconds",
        metavar="SECONDS",
        type=float,
        default=5.0,
        help="how long episodes may still take after SIGTERM",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace) -> int:
    """Keep worker processes running; in such a process, play."""
    import asyncio

    from palestra.client import Client
    from palestra.client.fleet import Fleet
    from palestra.client.plain_values import checked_amount, checked_count

    checked_count("--concurrency", arguments.concurrency)
    checked_count("--processes", arguments.processes)
    checked_amount("--drain-seconds", arguments.drain_seconds, endless=True)
    if arguments.key_file is not None:
        try:
            key = arguments.key_file.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{arguments.key_file} can't be read: {error}") from error
        os.environ[KEY_VARIABLE] = key  # not where a process list shows it
    if arguments.child:
        asyncio.run(_play(arguments))
        return 0
    played = _played(arguments)
    if arguments.job is not None:
        arguments.url, os.environ[KEY_VARIABLE] = _finder(arguments)()
    asyncio.run(_check(arguments.url, played))  # what is wrong is said once, and not by every process
    words = [sys.executable, "-m", "palestra.cli.main", "worker", "--child"]
    words += [] if arguments.played is None else [arguments.played]
    for option in ("url", "job", "control", "concurrency", "name", "environment", "harness", "score", "settings"):
        if getattr(arguments, option) is not None:
            words += [f"--{option}", str(getattr(arguments, option))]
    if arguments.tasks is not None:
        train, validation = load_task_source(arguments.tasks, arguments.validation)
        with Client(arguments.url) as client:
            client.push_tasks(train, validation)
    fleet = Fleet(words, arguments.processes, arguments.drain_seconds)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: fleet.drain())
    return fleet.run()


def _played(arguments: argparse.Namespace) -> Played:
    """Return what this worker plays."""
    if arguments.harness is None:
        if arguments.score is not None:
            raise ConfigError("--score is for --harness; name one, or leave it out")
        return load_played(arguments.played, arguments.environment, arguments.settings)
    if arguments.played is not None or arguments.environment is not None:
        raise ConfigError("--harness says what is played; leave the function, environment or agent out")
    return load_harness(arguments.harness, arguments.score, arguments.settings)


def _finder(arguments: argparse.Namespace) -> Find:
    """Return a function that asks the control plane for URL and key of the job's data plane, once the job has one."""
    missing = "--job names a job of a service, and no package that asks services is installed"
    find: Find = sole_extension("palestra.services", missing)(arguments.job, arguments.control)
    return find


async def _check(url: str, played: Played) -> None:
    """Ask the job for the facts needed to play, which also detects a wrong key."""
    from palestra.client import AsyncClient

    async with AsyncClient(url) as client:
        played(await client.facts())


def _player(client: AsyncClient, found: Rollout | RolloutSpec, facts: RolloutFacts) -> Rollout | EpisodePlayer:
    """Return what plays the episodes: a function as it is, for the light client without the collector."""
    if inspect.isroutine(found):
        return found
    from palestra.rollout import EnvironmentPlayer, RolloutSpec

    return EnvironmentPlayer(client, found, facts) if isinstance(found, RolloutSpec) else found


def _wait_for_parent(loop: asyncio.AbstractEventLoop, drain: Callable[[], None]) -> None:
    """Drain a child whose parent ended abruptly: by SIGKILL, or out of memory."""
    os.read(0, 1)  # not by `sys.stdin`, whose lock a thread that waits would hold at the end of the process
    with contextlib.suppress(RuntimeError):  # the child has ended as well
        loop.call_soon_threadsafe(drain)


async def _play(arguments: argparse.Namespace) -> None:
    """Play episodes in this process until the job is over, or after SIGTERM until running ones are."""
    import asyncio

    from palestra.client import AsyncClient, Worker
    from palestra.threads import in_thread

    played = _played(arguments)
    name = f"{arguments.name}-{os.getpid()}"
    find = _finder(arguments) if arguments.job is not None else None
    if find is not None:  # a child that was started again may find its server somewhere else
        try:
            arguments.url, os.environ[KEY_VARIABLE] = await in_thread(find)
        except JobOver:
            return
    async with AsyncClient(arguments.url, worker_id=name, find=find) as client:
        loop = asyncio.get_running_loop()
        facts = await client.facts()
        found = played(facts)
        worker = Worker(client, _player(client, found, facts), arguments.concurrency)
        loop.add_signal_handler(signal.SIGTERM, worker.drain)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # the terminal sends it to all; the parent says what to do
        watch = threading.Thread(target=_wait_for_parent, args=(loop, worker.drain), daemon=True)
        watch.start()
        await worker.run()
    end_soon()
    say(f"{name}: {worker.counts['played']} episodes played, {worker.counts['failed']} failed")
