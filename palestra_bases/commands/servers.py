"""`palestra base` serves one base model to many jobs and the Tinker API; `palestra tinker` serves that API alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command
from palestra.errors import ConfigError
from palestra.terminal import say
from palestra_bases.commands.options import (
    add_server_options,
    add_tinker_options,
    check_positive,
    given_tinker_option,
    model_options,
    say_keys,
    say_tinker,
    serve_until_stopped,
    tinker_options,
)

if TYPE_CHECKING:
    from palestra_bases.serving import BaseServer

TINKER = "tinker"  # folder of the Tinker API in that of the server


def add_base(commands: Any) -> None:
    """Add the command `base`, which takes the name of a model."""
    parser = add_command(
        commands,
        "base",
        _run,
        "have a base model in memory once, for many jobs that train adapters of it",
        "  palestra base SmolLM2-135M-Instruct\n"
        "  palestra base ./my-model --tenant ada --tenant ben --port 7414\n"
        "  palestra base SmolLM2-135M-Instruct --tinker-port 7412     # scripts of the Tinker SDK as well\n\n"
        "then, in another terminal, with `base` and `adapter` in the job's policy:\n"
        "  PALESTRA_BASE_KEY_FILE=runs/base/keys/default palestra run job.toml",
    )
    parser.set_defaults(trains=True)
    parser.add_argument("model", metavar="MODEL", help="the base, as `model` of a job has it")
    add_server_options(
        parser,
        "runs/base",
        "the keys and of the socket",
        "address to listen on with --port and --tinker-port; TLS is a proxy's work",
    )
    parser.add_argument(
        "--runs",
        metavar="DIR",
        type=Path,
        default=Path("runs"),
        help="folder below which all jobs have theirs, those of several tenants in DIR/NAME; no file elsewhere is "
        "read or written for them",
    )
    parser.add_argument(
        "--port", type=int, help="listen on this port, 0: any free one; without it, on the Unix socket DIR/socket"
    )
    parser.add_argument(
        "--max-policies", metavar="POLICIES", type=int, default=16, help="policies of a job, past versions included"
    )
    group = parser.add_argument_group("Tinker API")
    group.add_argument(
        "--tinker-port",
        metavar="PORT",
        type=int,
        help="serve the Tinker API on this port, 0: any free one, with its keys in DIR/tinker/keys; without it, not",
    )
    add_tinker_options(group)


def _run(arguments: argparse.Namespace) -> int:
    from palestra_bases.serving import BaseOptions, base_server

    check_positive(arguments, "max_policies")
    shared, tinker = model_options(arguments, [arguments.model]), None
    if arguments.tinker_port is not None:
        tinker = tinker_options(arguments, arguments.dir / TINKER, arguments.tinker_port)
    elif (given := given_tinker_option(arguments)) is not None:
        raise ConfigError(f"{given} is of the Tinker API, which is served with --tinker-port")
    options = BaseOptions(
        shared=shared,
        folder=arguments.dir,
        port=arguments.port,
        host=arguments.host,
        runs=arguments.runs,
        tenants=arguments.tenant or ["default"],
        most_policies=arguments.max_policies,
        tinker=tinker,
    )

    def ready(server: BaseServer) -> None:
        if server.tinker is not None:
            say_tinker(server.tinker)
        say(f"base {options.model} at {server.address}")
        say_keys(server.tenants)

    return serve_until_stopped(base_server(options), ready)


PORT = 7412


def add_tinker(commands: Any) -> None:
    """Add the command `tinker`, which takes names of base models."""
    parser = add_command(
        commands,
        "tinker",
        _tinker,
        "serve base models to scripts of the Tinker SDK, which train LoRA adapters",
        "  palestra tinker SmolLM2-135M-Instruct\n"
        "  palestra tinker ./my-model --tenant ada --tenant ben\n"
        "  palestra tinker SmolLM2-135M-Instruct --adapter sums=runs/addition/checkpoints/step-000020\n\n"
        "then, in another terminal:\n"
        "  TINKER_BASE_URL=http://127.0.0.1:7412 TINKER_API_KEY=$(cat runs/tinker/keys/default) python my_loop.py",
    )
    parser.set_defaults(trains=True)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a base model, as `model` of a job has it")
    add_server_options(
        parser, "runs/tinker", "keys, journal and checkpoints", "address to listen on; TLS is a proxy's work"
    )
    parser.add_argument("--port", type=int, default=PORT, help="port to listen on; 0: any free one")
    add_tinker_options(parser)


def _tinker(arguments: argparse.Namespace) -> int:
    from palestra_bases.models import shared_models
    from palestra_bases.tinker.serving import tinker_server

    models = model_options(arguments, arguments.models)
    options = tinker_options(arguments, arguments.dir, arguments.port)
    return serve_until_stopped(tinker_server(options, shared_models(models)), say_tinker)
