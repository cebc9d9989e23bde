"""`palestra environments`: lists the values of `environment.name`, and shows their observations."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from palestra.cli.options import ENVIRONMENT, add_command, load_environment
from palestra.errors import ConfigError, PalestraError, place_of
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.envs import ConcurrentEnvironment, Environment


def add_environments(commands: Any) -> None:
    """Add the command `environments`, which lists them all or shows one."""
    parser = add_command(
        commands,
        "environments",
        _run,
        "list the environments that ship, or show one: its settings, a task, and what an agent sees first",
        "  palestra environments\n  palestra environments gomoku\n  palestra environments kuhn-poker --protocol\n"
        """  palestra environments nim.py:Nim --task '{"pile": 5}'""",
    )
    parser.add_argument("name", nargs="?", help=f"show this one: {ENVIRONMENT}; without it, all that ship are listed")
    parser.add_argument(
        "--protocol", action="store_true", help="draw who may act when, of an environment of several agents"
    )
    parser.add_argument(
        "--task",
        metavar="JSON",
        help="show an episode of this task; without it, of one of the environment's own, or {}",
    )


def _run(arguments: argparse.Namespace) -> None:
    """Print the list, or one environment with a task and its agents' first observation."""
    import asyncio

    from palestra.envs import ConcurrentEnvironment, SerialEnvironment
    from palestra.envs.catalog import CATALOG, catalog_entry

    if arguments.name is None:
        if arguments.protocol:
            raise ConfigError("--protocol draws the protocol of one environment: palestra environments NAME --protocol")
        width = max(map(len, CATALOG))
        for name, entry in CATALOG.items():
            say(f"{name:<{width}}  {entry.summary}")
            if (missing := entry.missing) is not None:
                say(f"{'':<{width}}  missing: {missing}")
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
        made = make()
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
    from palestra.envs.coordinator import draw_protocol

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
