"""`palestra env serve`: an environment for jobs on other machines."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import ENVIRONMENT, add_command, environment_settings, load_environment
from palestra.cli.own_process import end_soon
from palestra.disk import read_own
from palestra.errors import ConfigError
from palestra.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from palestra.envs import ConcurrentEnvironment, Environment
    from palestra_remote import SessionLimits

PORT = 7500
_TIME = {"metavar": "SECONDS", "type": float}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dialect": (
        {"choices": ("palestra", "openenv"), "default": "palestra"},
        "protocol of the clients: this project's own, or OpenEnv's, for trainers that speak it",
    ),
    "settings": ({"metavar": "JSON", "default": "{}"}, "settings of the environment, by name"),
    "host": ({"default": "127.0.0.1"}, "address to listen on; TLS is a proxy's work"),
    "port": ({"type": int, "default": PORT}, "port to listen on; 0: any free one"),
    "key-file": (
        {"metavar": "FILE", "type": Path},
        "file with the server's key; without it, the variable PALESTRA_ENVIRONMENT_KEY, or a new key is printed",
    ),
    "sessions": (
        {"metavar": "SESSIONS", "type": int, "default": 64},
        "sessions at the same time; more clients wait",
    ),
    "idle-seconds": (_TIME | {"default": 3600.0}, "a session ends after so long without an action or a new episode"),
    "hang-seconds": (
        _TIME | {"default": 600.0},
        "an episode fails if the environment, and no agent, is silent for so long",
    ),
    "drain-seconds": (
        _TIME | {"default": 4.0},
        "how long episodes may still take after SIGTERM, while no session is made; a second SIGTERM ends them",
    ),
}


def add_env(commands: Any) -> None:
    """Add the command `env` with its subcommands."""
    parser = add_command(
        commands,
        "env",
        _run,
        "serve an environment to jobs on other machines",
        "  palestra env serve nim.py:Nim --key-file env_key\n"
        "  palestra env serve frozen-lake --host 0.0.0.0 --sessions 256\n"
        "  palestra env serve gomoku --dialect openenv\n\n"
        "then, in the job:\n"
        """  train(environment=RemoteEnvironment("http://10.0.0.7:7500", key), …)""",
    )
    parser.add_argument("action", choices=("serve",), help="what to do: serve until Ctrl-C")
    parser.add_argument("environment", help=f"the environment: {ENVIRONMENT}, or a function that makes one")
    for name, (settings, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", help=what, **settings)


def _run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C; after SIGTERM, until running episodes are over."""
    import asyncio

    try:
        import uvloop
    except ModuleNotFoundError:
        raise ConfigError("palestra env serve needs uvloop; run: pip install 'palestra[env-server]'") from None

    from palestra.client.plain_values import checked_amount, checked_count
    from palestra_remote import SessionLimits

    checked_count("--sessions", arguments.sessions)
    checked_amount("--drain-seconds", arguments.drain_seconds, endless=True)
    for name in ("idle_seconds", "hang_seconds"):
        if not checked_amount(f"--{name.replace('_', '-')}", getattr(arguments, name)):
            raise ConfigError(f"--{name.replace('_', '-')} is 0, and has to be above")
    limits = SessionLimits(
        sessions=arguments.sessions,
        idle_seconds=arguments.idle_seconds,
        hang_seconds=arguments.hang_seconds,
    )
    make = _maker(arguments.environment, arguments.settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(make, limits, arguments))
    return 0


def _maker(reference: str, settings: str) -> Callable[[], Environment | ConcurrentEnvironment]:
    from palestra.envs import catalog_entry

    given = environment_settings(settings)
    make = load_environment(reference)
    return partial(catalog_entry(make).make if isinstance(make, str) else make, **given)


def _key(file: Path | None) -> tuple[str, bool]:
    """Return the server's key, and whether it is new and has to be shown."""
    from palestra_remote.link import KEY_VARIABLE

    if file is None:
        found = os.environ.get(KEY_VARIABLE, "").strip()
        return (found, False) if found else (f"env-{secrets.token_hex(20)}", True)
    try:
        found = read_own(file, follow=True).decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    if not found:
        raise ConfigError(f"{file} is empty; it has to hold the server's key")
    return found, False


async def _serve(
    make: Callable[[], Environment | ConcurrentEnvironment], limits: SessionLimits, arguments: argparse.Namespace
) -> None:
    import asyncio

    from palestra.envs import CATALOG
    from palestra.http.server import listen, url_of
    from palestra.waiting import race
    from palestra_remote import SessionTable
    from palestra_remote.app import served_environment
    from palestra_remote.openenv import OpenEnvServer, seeded_tasks

    key, is_new = _key(arguments.key_file)
    listener, table = listen(arguments.host, arguments.port), None
    if arguments.dialect == "palestra":
        table = SessionTable(make, limits)
        name, said, serving = (
            table.facts.name,
            "whose page shows the sessions",
            served_environment(table, key, listener),
        )
    else:
        entry = CATALOG.get(arguments.environment)
        tasks = None if entry is None else seeded_tasks(entry.generate)
        server = OpenEnvServer(make, limits, tasks=tasks, description="" if entry is None else entry.summary)
        name, said, serving = server.name, "in OpenEnv's protocol", server.served(key, listener)
    loop, draining, stop = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: (stop if draining.is_set() else draining).set())
    async with serving:
        say(f"{name} at {url_of(listener)}, {said}; Ctrl-C ends")
        if is_new:
            say(f"the server's key, shown this once:  {key}")
        await race(stop.wait(), draining.wait())
        if table is not None and not stop.is_set():
            say(f"draining: no new sessions; {len(table)} open")
            drained = await race(stop.wait(), table.drain(arguments.drain_seconds))
            if not drained.result or drained.index == 0:
                say(f"{len(table)} sessions were ended in the middle of an episode, which is played again elsewhere")
        end_soon()
