"""Common options of commands that serve base models, to jobs or to scripts of the Tinker SDK."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from palestra.errors import ConfigError
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra_bases.models import SharedModelOptions
    from palestra_bases.tenant_keys import Tenants
    from palestra_bases.tinker.serving import TinkerOptions, TinkerServer


class RunningServer(Protocol):
    """A server that listens."""

    async def failed(self) -> None:
        """Wait until the server fails, and raise the reason."""
        ...


S = TypeVar("S", bound=RunningServer)
_TINKER_DEFAULTS = {"max_models": 16, "checkpoint_steps": 16}


def add_server_options(parser: argparse.ArgumentParser, folder: str, has: str, host: str) -> None:
    """Add the options of every such server."""
    parser.add_argument("--dir", metavar="DIR", type=Path, default=Path(folder), help=f"folder of {has}")
    parser.add_argument("--host", default="127.0.0.1", help=host)
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        action="append",
        default=[],
        help="has a key of its own, in DIR/keys/NAME, and sees nothing of other tenants; may be given several times. "
        "Without it: default",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="precision of products")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of engine and trainer")
    parser.add_argument("--threads", metavar="CORES", type=int, help="CPU threads; without it, all cores")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="other work changes no bit of samples and weights; for jobs with deterministic = true",
    )
    parser.add_argument(
        "--slots",
        metavar="POLICIES",
        type=int,
        default=16,
        help="trained adapters in memory with their moments; others wait on disk",
    )
    parser.add_argument(
        "--loaded-adapters",
        metavar="POLICIES",
        type=int,
        default=16,
        help="saved adapters in memory that are sampled from; others are loaded again when they are used",
    )


def add_tinker_options(parser: Any) -> None:
    """Add the options of the Tinker API to a command or a group."""
    parser.add_argument(
        "--adapter",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="an adapter in PEFT's format, such as a checkpoint of a job, which every tenant may load as "
        "tinker://imported:train:0/weights/NAME; may be given several times",
    )
    known = _TINKER_DEFAULTS
    for name, metavar, said in (
        ("max_models", "MODELS", "models that a tenant may train"),
        (
            "checkpoint_steps",
            "STEPS",
            "steps of a model between two checkpoints; after a kill, what came after the newest is computed again",
        ),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar=metavar, type=int, help=f"{said} (default: {known[name]})")


def model_options(arguments: argparse.Namespace, models: Sequence[str]) -> SharedModelOptions:
    """Return which base models to serve, and how."""
    from palestra.config import TrainerConfig
    from palestra.engine.embedded.config import EmbeddedEngineConfig
    from palestra_bases.models import SharedModelOptions

    check_positive(arguments, "threads", "slots", "loaded_adapters")
    parts = {"dtype": arguments.dtype, "device": arguments.device, "threads": arguments.threads}
    return SharedModelOptions(
        models=models,
        engine=EmbeddedEngineConfig.model_validate(parts),
        trainer=TrainerConfig.model_validate(parts),
        deterministic=arguments.deterministic,
        slots=arguments.slots,
        loaded_adapters=arguments.loaded_adapters,
    )


def tinker_options(arguments: argparse.Namespace, folder: Path, port: int) -> TinkerOptions:
    """Return how to serve the Tinker API."""
    from palestra_bases.tinker.records import TinkerLimits
    from palestra_bases.tinker.serving import TinkerOptions

    check_positive(arguments, *_TINKER_DEFAULTS)
    given = {name: getattr(arguments, name) or default for name, default in _TINKER_DEFAULTS.items()}
    return TinkerOptions(
        folder=folder,
        host=arguments.host,
        port=port,
        tenants=arguments.tenant or ["default"],
        limits=TinkerLimits(models=given["max_models"], checkpoint_steps=given["checkpoint_steps"]),
        adapters=dict(_named(text) for text in arguments.adapter),
    )


def given_tinker_option(arguments: argparse.Namespace) -> str | None:
    """Return a given option of the Tinker API, or None."""
    for name in ("adapter", *_TINKER_DEFAULTS):
        if getattr(arguments, name):
            return f"--{name.replace('_', '-')}"
    return None


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError unless given numbers are at least 1."""
    for name in names:
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, and has to be at least 1")


def say_keys(tenants: Tenants) -> None:
    """Print where each tenant's key is."""
    for path in tenants.files:
        say(f"key of {path.name}: {path}")


def say_tinker(server: TinkerServer) -> None:
    """Print the address of the Tinker API, and where each tenant's key for it is."""
    say(f"Tinker API of {', '.join(server.bases)} at {server.url}")
    say_keys(server.tenants)


def serve_until_stopped(server: AbstractAsyncContextManager[S], say_ready: Callable[[S], None]) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit code. While models are loading, a signal ends the process."""
    import asyncio

    from palestra.http.server import run_on_uvloop
    from palestra.models.device import tune_malloc
    from palestra.waiting import race

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        async with server as listening:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            say_ready(listening)
            await race(stop.wait(), listening.failed())

    tune_malloc()
    run_on_uvloop(main())
    return 0


def _named(text: str) -> tuple[str, Path]:
    """Return name and folder of `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(f"--adapter takes NAME=FOLDER, and not {text!r}")
    return name, Path(folder).absolute()
