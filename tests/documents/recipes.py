"""Runs a recipe for a step, as a newcomer does: a script in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from servers import environment

from documents.blocks import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py"))}


def environment_of(**more: str) -> dict[str, str]:
    """Return the variables of a script: those of the tests' servers, and the tests where Python finds them."""
    return environment() | {"PYTHONPATH": str(ROOT / "tests")} | more


def run(name: str, folder: Path, *options: str, seconds: float = 170, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe in a folder of its own, whatever its exit code is."""
    scripts = str(Path(sys.executable).parent)
    variables = environment_of(PATH=f"{scripts}{os.pathsep}{os.environ['PATH']}", **more)
    command = [sys.executable, str(RECIPES[name]), *options]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds, env=variables, check=False
    )
