"""`palestra environments`: lists the values of `environment.name`, shows their observations, and checks them."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from palestra.cli.options import ENVIRONMENT, add_command, environment_settings, load_environment
from palestra.errors import ConfigError, PalestraError, place_of
from palestra.terminal import NO_WIDTH, say
from palestra_inspect.paragraphs import say_paragraph

if TYPE_CHECKING:
    from palestra.envs import ConcurrentEnvironment, Environment


_ALL = 100_000  # tasks of a folder that are checked


def add_environments(commands: Any) -> None:
    """Add the command `environments`, which lists them all or shows one."""
    parser = add_command(
        commands,
        "environments",
        _run,
        "list the environments that ship, show one (its settings, a task, what an agent sees first), or check one",
        "  palestra environments\n  palestra environments gomoku\n  palestra environments kuhn-poker --protocol\n"
        """  palestra environments nim.py:Nim --task '{"pile": 5}'\n"""
        "  palestra environments check harbor/tasks/   # each task by its solution, and by nothing\n\n"
        "exit code of check: 0 all tasks are right, 1 one is not",
    )
    parser.add_argument("name", nargs="?", help=f"show this one: {ENVIRONMENT}; without it, all that ship are listed")
    parser.add_argument("checked", metavar="NAME", nargs="?", help="after `check`: the environment to check")
    parser.add_argument("--settings", metavar="JSON", default="{}", help="settings of an environment that is checked")
    parser.add_argument(
        "--protocol", action="store_true", help="draw who may act when, of an environment of several agents"
    )
    parser.add_argument(
        "--task",
        metavar="JSON",
        help="show an episode of this task; without it, of one of the environment's own, or {}",
    )


def _run(arguments: argparse.Namespace) -> int:
    """Print the list, or one environment with a task and its agents' first observation; or check one."""
    if arguments.name == "check":
        return _check(arguments)
    if arguments.checked is not None:
        raise ConfigError(f"{arguments.checked!r} is one argument too many; to check it: environments check NAME")
    _list_or_show(arguments)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Check an environment with some of its tasks, or with all if these are a folder's; return the exit code."""
    from functools import partial

    from palestra.envs.catalog import catalog_entry, catalog_maker
    from palestra.errors import InvalidEnvironment
    from palestra_inspect.environment_check import check_environment

    if arguments.checked is None:
        raise ConfigError("name the environment to check: palestra environments check NAME")
    named, task = load_environment(arguments.checked), _task(arguments.task)
    settings = environment_settings(arguments.settings)
    check: Callable[[Callable[[], Any], Sequence[Mapping[str, Any]]], None] = check_environment
    tasks: list[dict[str, Any]] = [task or {}]
    if isinstance(named, str):
        entry, count = catalog_entry(named), 2
        entry.check_installed()
        made = catalog_maker(named, settings)  # a wrong setting is refused now
        if entry.check is not None:
            check, count = entry.check, _ALL
        if task is None:
            tasks = [*entry.generate("train", count, 0), *entry.generate("validation", count, 0)]
    else:
        made = partial(named, **settings)
    wrong = 0
    for each in tasks:
        try:
            check(made, [each])
            said = "right"
        except InvalidEnvironment as error:
            wrong, said = wrong + 1, f"wrong: {error}"
        say(f"{str(each.get('id', 'task'))[:60]}: {said}")
    say(f"{len(tasks) - wrong} of {len(tasks)} tasks are right")
    return 1 if wrong else 0


def _list_or_show(arguments: argparse.Namespace) -> None:
    import asyncio

    from palestra.envs import ConcurrentEnvironment, SerialEnvironment
    from palestra.envs.catalog import CATALOG, adapted, catalog_entry

    if arguments.name is None:
        if arguments.protocol:
            raise ConfigError("--protocol draws the protocol of one environment: palestra environments NAME --protocol")
        width = max(map(len, CATALOG))
        for name, entry in CATALOG.items():
            say_paragraph(f"{name:<{width}}  ", entry.summary, NO_WIDTH)
            if (missing := entry.missing) is not None:
                say_paragraph(f"{'':<{width}}  missing: ", missing, NO_WIDTH)
        say('\nto train on one:  palestra run job.toml, with  [environment] name = "…"  in it')
        return
    task = _task(arguments.task)
    make = load_environment(arguments.name)
    if isinstance(make, str):
        entry = catalog_entry(make)
        task = entry.generate("train", 1, 0)[0] if task is None else task
        make, summary = entry.make, entry.summary
        settings = _settings(make)
    else:
        summary, settings = (make.__doc__ or "an environment of your own").strip().partition("\n")[0], []
    with _own_errors(arguments):
        made = adapted(make)()
        if arguments.protocol:
            asyncio.run(_draw(arguments.name, made, task or {}))
            return
        environment = made if isinstance(made, ConcurrentEnvironment) else SerialEnvironment(made)
        say(f"{arguments.name}: {summary}\n\ntask:      {json.dumps(task or {})}")
        if ":" not in arguments.name:
            say(f"settings:  {', '.join(settings) or 'none'}")
        if environment.roles:
            say(f"roles:     {', '.join(environment.roles[:8])}{', …' if len(environment.roles) > 8 else ''}")
        asyncio.run(_show(environment, task or {}))


def _settings(make: Any) -> list[str]:
    """Return `name = default` for each setting that an environment has."""
    return [f"{name} = {json.dumps(p.default)}" for name, p in inspect.signature(make).parameters.items()]


def _task(given: str | None) -> dict[str, Any] | None:
    """Return the task of `--task`, or None."""
    if given is None:
        return None
    try:
        task = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"--task {given}: {error}") from None
    if not isinstance(task, dict):
        raise ConfigError(f"--task {given}: a task is a JSON object, such as {{}}")
    return task


@contextlib.contextmanager
def _own_errors(arguments: argparse.Namespace) -> Iterator[None]:
    """Report errors of a user's environment in one line."""
    try:
        yield
    except PalestraError:
        raise
    except Exception as error:
        if ":" not in arguments.name:
            raise
        hint = "" if arguments.task else """; the task was {}: give one that it can play, as in --task '{"n": 1}'"""
        raise ConfigError(f"{arguments.name}: {type(error).__name__}: {error}{place_of(error)}{hint}") from error


async def _show(environment: ConcurrentEnvironment, task: dict[str, Any]) -> None:
    """Print the messages and the tools of the first observation of an episode."""
    await environment.setup()
    try:
        await environment.reset(task)
        seen = await environment.observe()
        for message in seen.content:
            say(f"\n[{message.role}]\n{message.text}")
        if seen.choices:
            say(f"\nchoices:   {', '.join(seen.choices)}")
        if seen.tools:
            say(f"\ntools:     {', '.join(tool['function']['name'] for tool in seen.tools)}")
    finally:
        await environment.close()


async def _draw(name: str, made: Environment | ConcurrentEnvironment, task: dict[str, Any]) -> None:
    """Print the roles of an environment, and the picture of its protocol."""
    from palestra.envs import MultiAgentEnvironment
    from palestra_inspect.protocol_drawing import draw_protocol

    if not isinstance(made, MultiAgentEnvironment):
        say(f"{name} has no protocol: its agents act whenever they are shown something")
        return
    try:
        await made.setup()
        await made.reset(task)  # what a protocol is may depend on the task
        total = f"; rewards add up to {made.total:g}" if made.zero_sum else ""
        say(f"{name}: {', '.join(made.roles[:8])}{', …' if len(made.roles) > 8 else ''}{total}\n")
        say(draw_protocol(made.roles, made.protocol(task)))
    finally:
        await made.close()
