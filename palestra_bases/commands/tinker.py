"""`palestra tinker`: base models, and adapters that are trained and sampled by scripts of the Tinker SDK."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from palestra.cli.options import add_command
from palestra_bases.commands.options import (
    add_server_options,
    add_tinker_options,
    model_options,
    say_tinker,
    serve_until_stopped,
    tinker_options,
)

PORT = 7412


def add_tinker(commands: Any) -> None:
    """Add the command `tinker`, which takes names of base models."""
    parser = add_command(
        commands,
        "tinker",
        _run,
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


def _run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from palestra_bases.tinker.serving import serve_tinker

    models = model_options(arguments, arguments.models)
    options = tinker_options(arguments, arguments.dir, arguments.port)
    return serve_until_stopped(partial(serve_tinker, models, options), say_tinker)
