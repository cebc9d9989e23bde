"""How much a box has written: where the file system keeps no limit for a folder, it is looked at."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

_BLOCK = 512  # bytes of `st_blocks`; each file counts as one more, so that empty ones count


class TooDeep(Exception):
    """Folders are nested so deeply that what is in them can't be counted."""


def written_bytes(layer: str, process: int, most: int) -> int:
    """Return what a box occupies on the disk; the count ends soon after `most` bytes.

    What runs in the box may put a link in the place of a folder at any time: it leads nowhere.

    Args:
        layer: folder of all that the box has changed.
        process: its first one, on this machine.

    Raises:
        TooDeep: see there.
    """
    total = 0
    for state in _open_and_removed(process):
        total += state.st_blocks * _BLOCK
    inside, below = f"{os.path.realpath(layer)}/", [layer]
    while below and total <= most:
        folder = below.pop()
        try:
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if f"{os.readlink(f'/proc/self/fd/{opened}')}/".startswith(inside):
                    total += _counted(opened, folder, below)
            finally:
                os.close(opened)
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            continue
        except OSError as error:
            raise TooDeep(str(error)) from error
    return total


def _counted(opened: int, folder: str, below: list[str]) -> int:
    """Return what the entries of an open folder occupy, and add its folders to `below`."""
    total = 0
    with os.scandir(opened) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += (entry.stat(follow_symlinks=False).st_blocks + 1) * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    below.append(os.path.join(folder, entry.name))
    return total


def _open_and_removed(process: int) -> Iterator[os.stat_result]:
    """Yield the files of a box that have no name any more and occupy the disk until they are closed."""
    seen = set[int]()
    try:
        box = os.stat(f"/proc/{process}/ns/pid").st_ino
        disk = os.stat(f"/proc/{process}/root").st_dev
    except OSError:  # it has ended
        return
    for one in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{one}/ns/pid").st_ino != box:
                continue
            for held in ("fd", "map_files"):  # a mapped file needs no descriptor
                for name in os.listdir(f"/proc/{one}/{held}"):
                    with contextlib.suppress(OSError):  # closed meanwhile
                        state = os.stat(f"/proc/{one}/{held}/{name}")
                        if not state.st_nlink and stat.S_ISREG(state.st_mode) and state.st_dev == disk:
                            if state.st_ino not in seen:
                                yield state
                            seen.add(state.st_ino)
