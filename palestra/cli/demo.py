"""`palestra demo`: the first thing to run; a real model learns to add on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import add_command
from palestra.errors import NotFound
from palestra.extensions import load_function


def add_demo(commands: Any) -> None:
    """Add the command `demo`, with some options of `recipes/addition.py`."""
    parser = add_command(
        commands,
        "demo",
        _run,
        "train SmolLM2-135M to add, on this machine, in three to twelve minutes",
        "  palestra demo --steps 10",
    )
    parser.set_defaults(trains=True)
    parser.add_argument("--steps", metavar="STEPS", type=int, default=30, help="training steps")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="number from which all sampling and all orders follow"
    )
    parser.add_argument("--resume", action="store_true", help="continue the newest run of the demo")


def _run(arguments: argparse.Namespace) -> None:
    """Run `recipes/addition.py` of the checkout or the installed package."""
    from palestra.runtime import training  # noqa: F401 - where the client alone is installed, says what to install

    here = Path(__file__).parent
    for folder in (here.parents[1] / "recipes", here / "recipes"):  # a checkout; an installed package
        if (folder / "addition.py").is_file():
            demonstrate = load_function(f"{folder / 'addition.py'}:demonstrate")
            demonstrate(arguments.steps, arguments.seed, arguments.resume)
            return
    raise NotFound("recipes/addition.py is not there; install Palestra again")
