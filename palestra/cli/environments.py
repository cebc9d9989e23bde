"""`palestra environments`: what a job can name in `environment.name`, and what its agent sees."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import TYPE_CHECKING, Any

from palestra.cli.options import command
from palestra.errors import ConfigError
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.envs import ConcurrentEnvironment, Environment


def add(commands: Any) -> None:
    """Add the command `environments`, which lists them all or shows one."""
    parser = command(
        commands,
        "environments",
        run,
        "list the environments that ship, or show one: its settings, a task, and what an agent sees first",
        "  palestra environments\n  palestra environments gomoku\n  palestra environments kuhn-poker --protocol",
    )
    parser.add_argument("name", nargs="?", help="show this one; without it, all are listed")
    parser.add_argument(
        "--protocol", action="store_true", help="draw who may act when, of an environment of several agents"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the list, or one environment with a task and the first observation of its agents."""
    import asyncio

    from palestra.envs import ConcurrentEnvironment, SerialEnvironment
    from palestra.envs.catalog import CATALOG, catalog_entry

    if arguments.name is None:
        if arguments.protocol:
            raise ConfigError("--protocol draws the protocol of one environment: palestra environments NAME --protocol")
        width = max(map(len, CATALOG))
        for name, entry in CATALOG.items():
            say(f"{name:<{width}}  {entry.summary}")
        say('\nto train on one:  palestra run job.toml, with  [environment] name = "…"  in it')
        return
    entry = catalog_entry(arguments.name)
    task = entry.generate("train", 1, 0)[0]
    made = entry.make()
    if arguments.protocol:
        asyncio.run(_draw(arguments.name, made, task))
        return
    say(f"{arguments.name}: {entry.summary}\n\ntask:      {json.dumps(task)}")
    say(f"settings:  {', '.join(_settings(entry.make)) or 'none'}")
    environment = made if isinstance(made, ConcurrentEnvironment) else SerialEnvironment(made)
    asyncio.run(_show(environment, task))


def _settings(make: Any) -> list[str]:
    """Return `name = default` for each setting that an environment has."""
    return [f"{name} = {json.dumps(p.default)}" for name, p in inspect.signature(make).parameters.items()]


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
    from palestra.envs.protocol_drawing import draw_protocol

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
