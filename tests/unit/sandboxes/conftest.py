"""A tiny image, made without a network of two static programs."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from machine import require

APPLETS = (
    *("cat", "chmod", "dd", "du", "echo", "env", "false", "find", "grep", "head", "id", "kill", "ln", "ls", "mkdir"),
    *("printenv", "ps", "rm", "sh", "sleep", "setsid", "stat", "tar", "touch", "true", "wc", "wget", "yes"),
)
USERS = b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n"


@pytest.fixture(scope="session")
def tiny_image(tmp_path_factory) -> str:
    """An archive of a root folder, which a box takes as its image."""
    require("podman", "runc", "busybox", "bash-static")
    path = tmp_path_factory.mktemp("image") / "tiny.tar"
    with tarfile.open(path, "w") as archive:
        for folder, mode in (("bin", 0o755), ("tmp", 0o1777), ("root", 0o700), ("etc", 0o755), ("home", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for name, source in (("busybox", "/bin/busybox"), ("bash", "/bin/bash-static")):
            entry = tarfile.TarInfo(f"bin/{name}")
            content = Path(source).read_bytes()
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
        for name in APPLETS:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
        entry = tarfile.TarInfo("etc/passwd")
        entry.size = len(USERS)
        archive.addfile(entry, io.BytesIO(USERS))
    return str(path)
