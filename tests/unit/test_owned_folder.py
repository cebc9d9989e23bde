"""Folders go with their owners, also with one that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from palestra.owned_folder import OwnedFolder

OWNER = """
import signal, sys, subprocess
from pathlib import Path
from palestra.owned_folder import OwnedFolder
owned = OwnedFolder("owned-", Path(sys.argv[1]))
(owned.path / "weights").write_text("many")
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(owned.path, started.pid, flush=True)
signal.pause()
"""


def test_a_folder_stays_while_its_owner_lives_and_is_removed_after_a_kill(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE, text=True)
    path, started = owner.stdout.readline().split()
    try:
        OwnedFolder("owned-", tmp_path).remove()
        assert os.listdir(path) == ["weights"]
        owner.kill()
        owner.wait()
        owned = OwnedFolder("owned-", tmp_path)  # although a program that the owner has started lives on
        assert [owned.path] == list(tmp_path.iterdir())
        owned.remove()
        assert not list(tmp_path.iterdir())
    finally:
        owner.stdout.close()
        os.kill(int(started), signal.SIGKILL)


def test_other_folders_stay(tmp_path):
    (tmp_path / "another").mkdir()
    first, second = (OwnedFolder("owned-", tmp_path) for _ in range(2))
    assert first.path.stat().st_mode & 0o077 == 0
    second.remove()
    second.remove()
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "another", first.path])
    first.remove()
