"""Programs of the machine that tests need. `make machine` installs them; a CI run may not go without one."""

from __future__ import annotations

import os
import shutil

import pytest


def require(*programs: str) -> None:
    """Skip the test, or the tests of a module, if a program is not installed; where CI is set, fail instead."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"{', '.join(missing)} not installed; run: make machine")
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; run: make machine", allow_module_level=True)
