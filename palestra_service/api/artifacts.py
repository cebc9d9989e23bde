"""Files of a job's run, and no other files of the server."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from palestra.errors import NotFound
from palestra.types.control_wire import ArtifactView

HIDDEN = ("secret", "api_key", ".lock")  # run.db is hidden, too: clients read it by the route for events


async def read_key(run: Path) -> str:
    """Return the key of a run's data plane."""
    try:
        return (await asyncio.to_thread((run / "api_key").read_text)).strip()
    except FileNotFoundError:
        raise NotFound("the job's data plane has no key yet") from None


async def listed(run: Path) -> list[ArtifactView]:
    """Return all downloadable files of a run, by path."""
    return await asyncio.to_thread(_listed, run)


def _listed(run: Path) -> list[ArtifactView]:
    """Return the files by walking through the folder; see `listed`."""
    found = []
    for folder, _, names in os.walk(run):
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(run)
            try:
                status = path.lstat()
            except FileNotFoundError:  # the job has replaced it meanwhile
                continue
            if stat.S_ISREG(status.st_mode) and _shown(name):
                found.append(ArtifactView(path=name.as_posix(), bytes=status.st_size, modified_at=status.st_mtime))
    return sorted(found, key=lambda artifact: artifact.path)


async def checked(run: Path, name: str) -> Path:
    """Return the path of a downloadable file."""
    return await asyncio.to_thread(_checked, run, name)


def _checked(run: Path, name: str) -> Path:
    """Resolve a name, and refuse paths that lead out of the run; see `checked`."""
    missing = NotFound(f"the run has no file {name!r}")
    if "\0" in name or "\\" in name:
        raise missing
    root = run.resolve()
    try:
        path = (run / name).resolve()
        if path.is_relative_to(root) and _shown(path.relative_to(root)) and path.is_file():
            return path
    except OSError:  # no file can have this name
        pass
    raise missing


def _shown(name: Path) -> bool:
    """Return whether a file may be downloaded: not keys, hidden files or the database."""
    return not any(part in HIDDEN or part.startswith((".", "run.db")) for part in name.parts)
