"""`palestra tinker`: base models, and adapters that are trained and sampled by scripts of the Tinker SDK."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import command
from palestra.errors import ConfigError
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.runtime.tinker import TinkerServer

PORT = 7412


def add(commands: Any) -> None:
    """Add the command `tinker`, which takes names of base models."""
    parser = command(
        commands,
        "tinker",
        run,
        "serve base models to scripts of the Tinker SDK, which train LoRA adapters",
        "  palestra tinker SmolLM2-135M-Instruct\n"
        "  palestra tinker ./my-model --tenant ada --tenant ben\n"
        "  palestra tinker SmolLM2-135M-Instruct --adapter sums=runs/addition/checkpoints/step-000020\n\n"
        "then, in another terminal:\n"
        "  TINKER_BASE_URL=http://127.0.0.1:7412 TINKER_API_KEY=$(cat runs/tinker/keys/default) python my_loop.py",
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a base model, as `model` of a job has it")
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, default=Path("runs/tinker"), help="folder of keys, journal and checkpoints"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; TLS is a proxy's work")
    parser.add_argument("--port", type=int, default=PORT, help="port to listen on; 0: any free one")
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        action="append",
        default=[],
        help="has a key of its own, in DIR/keys/NAME, and sees nothing of other tenants; may be given several times. "
        "Without it: default",
    )
    parser.add_argument(
        "--adapter",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="an adapter in PEFT's format, such as a checkpoint of a job, which every tenant may load as "
        "tinker://imported:train:0/weights/NAME; may be given several times",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="precision of products")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of engine and trainer")
    parser.add_argument("--threads", metavar="CORES", type=int, help="CPU threads; without it, all cores")
    parser.add_argument(
        "--deterministic", action="store_true", help="samples are the same bit by bit, whatever is sampled beside them"
    )
    parser.add_argument("--max-models", metavar="MODELS", type=int, default=16, help="models that a tenant may train")
    parser.add_argument(
        "--checkpoint-steps",
        metavar="STEPS",
        type=int,
        default=16,
        help="steps of a model between two checkpoints; after a kill, what came after the newest is computed again",
    )
    parser.add_argument(
        "--loaded-models", metavar="MODELS", type=int, default=8, help="models in memory, of all tenants"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from palestra.config import EmbeddedEngineConfig, TrainerConfig
    from palestra.models.device import tune_malloc
    from palestra.runtime.local import run_on_uvloop
    from palestra.runtime.tinker import TinkerOptions
    from palestra.tinker.limits import Limits

    for name in ("threads", "max_models", "loaded_models", "checkpoint_steps"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, and has to be at least 1")
    tune_malloc()
    parts = {"dtype": arguments.dtype, "device": arguments.device, "threads": arguments.threads}
    options = TinkerOptions(
        models=arguments.models,
        folder=arguments.dir,
        host=arguments.host,
        port=arguments.port,
        tenants=arguments.tenant or ["default"],
        engine=EmbeddedEngineConfig.model_validate(parts),
        trainer=TrainerConfig.model_validate(parts),
        deterministic=arguments.deterministic,
        limits=Limits(
            models=arguments.max_models,
            loaded_models=arguments.loaded_models,
            checkpoint_steps=arguments.checkpoint_steps,
        ),
        adapters=dict(_named(text) for text in arguments.adapter),
    )
    run_on_uvloop(_serve(options))
    return 0


def _named(text: str) -> tuple[str, Path]:
    """Return name and folder of `NAME=FOLDER`.

    Raises:
        ConfigError: one of them is missing.
    """
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(f"--adapter takes NAME=FOLDER, and not {text!r}")
    return name, Path(folder).absolute()


async def _serve(options: Any) -> None:
    import asyncio

    from palestra.runtime.tinker import serve_tinker

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def ready(server: TinkerServer) -> None:
        say(f"Tinker API of {', '.join(base.name for base in server.bases)} at {server.url}")
        for path in server.tenants.files:
            say(f"key of {path.name}: {path}")

    await serve_tinker(options, ready, stop)
