"""Programs of the machine that tests need. `make machine` installs them; a CI run may not go without one."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import distributions

import pytest


def require(*programs: str, packages: tuple[str, ...] = ()) -> None:
    """Skip the test, or the tests of a module, if something is not installed; where CI is set, fail instead.

    Args:
        programs: names of programs.
        packages: names of Python packages.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    installed = {str(one.metadata["Name"]).lower() for one in distributions()} if packages else set()
    missing += [name for name in packages if name not in installed]
    if missing and os.environ.get("CI"):
        pytest.fail(f"{', '.join(missing)} not installed; run: make machine")
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; run: make machine", allow_module_level=True)
