"""Run code with the optional libraries, in a process of its own: they stand behind Palestra's packages on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# dill pickles a module by its name only where its path says that it is installed; it cannot pickle what pyarrow has.
FOLDER = ROOT / ".venv-peers" / "libraries" / "site-packages"


def missing() -> bool:
    """Return whether the libraries are not installed."""
    return not FOLDER.is_dir()


def run(code: str, folder: Path, **variables: str) -> str:
    """Run a script with the libraries, and return what it printed.

    Args:
        code: of the script.
        folder: in which it runs.
        variables: of its environment.
    """
    path = f"import sys; sys.path.append({str(FOLDER)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", path + code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
