"""The process of a command ends without an examination of all objects."""

from __future__ import annotations

import subprocess
import sys

ENDS = """
import atexit, gc
from palestra.cli.own_process import own_process
kept = [[] for _ in range(1000)]
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
{}
"""


def test_objects_are_left_alone_at_its_end() -> None:
    said = [
        subprocess.run([sys.executable, "-c", ENDS.format(line)], capture_output=True, text=True, check=True).stdout
        for line in ("own_process()", "")
    ]
    assert said == ["True\n", "False\n"]
