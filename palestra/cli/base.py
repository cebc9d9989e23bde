"""`palestra base`: one base model for many jobs, each of which trains adapters of it."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import command
from palestra.errors import ConfigError
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.runtime.base import BaseServer


def add(commands: Any) -> None:
    """Add the command `base`, which takes the name of a model."""
    parser = command(
        commands,
        "base",
        run,
        "have a base model in memory once, for many jobs that train adapters of it",
        "  palestra base SmolLM2-135M-Instruct\n"
        "  palestra base ./my-model --tenant ada --tenant ben --port 7413\n\n"
        "then, in another terminal, with `base` and `adapter` in the job's policy:\n"
        "  PALESTRA_BASE_KEY_FILE=runs/base/keys/default palestra run job.toml",
    )
    parser.add_argument("model", metavar="MODEL", help="the base, as `model` of a job has it")
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, default=Path("runs/base"), help="folder of the keys and of the socket"
    )
    parser.add_argument(
        "--runs",
        metavar="DIR",
        type=Path,
        default=Path("runs"),
        help="folder below which all jobs have theirs; no file elsewhere is read or written for them",
    )
    parser.add_argument(
        "--port", type=int, help="listen on this port, 0: any free one; without it, on the Unix socket DIR/socket"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on with --port; TLS is a proxy's work")
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        action="append",
        default=[],
        help="has a key of its own, in DIR/keys/NAME; may be given several times. Without it: default",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="precision of products")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of engine and trainer")
    parser.add_argument("--threads", metavar="CORES", type=int, help="CPU threads; without it, all cores")
    parser.add_argument(
        "--slots",
        metavar="POLICIES",
        type=int,
        help="adapters in memory with their moments; others wait on disk. Without it, all",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="samples and weights are the same bit by bit, whatever other jobs do; for jobs with deterministic = true",
    )
    parser.add_argument(
        "--lease-seconds",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="how long a job whose connection is lost keeps its policies",
    )
    parser.add_argument(
        "--max-policies", metavar="POLICIES", type=int, default=16, help="policies of a job, past versions included"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from palestra.config import EmbeddedEngineConfig, TrainerConfig
    from palestra.models.device import tune_malloc
    from palestra.runtime.base import BaseOptions
    from palestra.runtime.local import run_on_uvloop

    for name in ("threads", "slots", "lease_seconds", "max_policies"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, and has to be at least 1")
    tune_malloc()
    parts = {"dtype": arguments.dtype, "device": arguments.device, "threads": arguments.threads}
    options = BaseOptions(
        model=arguments.model,
        folder=arguments.dir,
        port=arguments.port,
        host=arguments.host,
        runs=arguments.runs,
        tenants=arguments.tenant or ["default"],
        engine=EmbeddedEngineConfig.model_validate(parts),
        trainer=TrainerConfig.model_validate(parts | {"adapter_slots": arguments.slots}),
        deterministic=arguments.deterministic,
        lease_seconds=arguments.lease_seconds,
        most_policies=arguments.max_policies,
    )
    run_on_uvloop(_serve(options))
    return 0


async def _serve(options: Any) -> None:
    import asyncio

    from palestra.runtime.base import serve_base

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def ready(server: BaseServer) -> None:
        say(f"base {options.model} at {server.address}")
        for path in server.tenants.files:
            say(f"key of {path.name}: {path}")

    await serve_base(options, ready, stop)
