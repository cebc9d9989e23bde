"""Files of a box as tar archives, which go in and come out in one stream."""

from __future__ import annotations

import io
import os
import posixpath
import tarfile
from collections.abc import Mapping
from pathlib import Path

from palestra.errors import EpisodeForfeited, InvalidRequest, PayloadTooLarge

MAX_FILES = 20_000
OVERHEAD_BYTES = 8 << 20  # of an archive beside the files' content: names, empty files, folders
Owner = tuple[int, int]  # numbers of user and group


def archive_of(files: Mapping[str, bytes], below: str = "", owner: Owner = (0, 0)) -> bytes:
    """Return an archive with executable files.

    Args:
        files: content by path.
        below: folder in the archive, without an entry: who unpacks it makes the folder, or leaves it as it is.

    Raises:
        InvalidRequest: a path leads out of the folder.
    """
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        folders: dict[str, None] = {}
        for path in files:
            if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
                raise InvalidRequest(f"the file {path[:200]!r} would be outside of its folder", "files")
            folders |= dict.fromkeys(_folders(posixpath.dirname(path)))
        for folder in folders:
            archive.addfile(_entry(posixpath.join(below, folder), owner, tarfile.DIRTYPE))
        for path, data in files.items():
            entry = _entry(posixpath.join(below, path), owner, tarfile.REGTYPE)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return written.getvalue()


def archive_of_folder(folder: Path, below: str = "", owner: Owner = (0, 0)) -> bytes:
    """Return an archive of a folder of this machine; links stay links. `below`: its folder in the archive."""

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid, entry.gid = owner
        entry.uname = entry.gname = ""
        return None if entry.isdev() else entry  # which pipes are, too

    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", dereference=False) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, posixpath.join(below, path.name), filter=owned)
    return written.getvalue()


def unpacked_files(archive: bytes, most_bytes: int) -> dict[str, bytes]:
    """Return the regular files of an archive by their path below its first entry; {}: this is no folder, or none.

    Raises:
        PayloadTooLarge: there are more bytes, or too many files.
        EpisodeForfeited: it is no whole archive, as of files that change meanwhile.
    """
    found: dict[str, bytes] = {}
    left = most_bytes
    try:
        with _opened(archive) as opened:
            if (top := opened.next()) is None or not top.isdir():
                return {}
            for entry in opened:
                data = found.get(_below(entry.linkname, top.name)) if entry.islnk() else None  # another name of a file
                if data is None and not entry.isreg():
                    continue
                left -= entry.size if data is None else len(data)
                if left < 0 or len(found) >= MAX_FILES:
                    raise folder_too_large(most_bytes)
                if data is None:
                    file = opened.extractfile(entry)
                    assert file is not None
                    data = file.read()
                found[_below(entry.name, top.name)] = data
    except (tarfile.TarError, ValueError) as error:
        raise EpisodeForfeited(f"the files of a sandbox can't be read: {error}") from error
    return found


def unpack_into(archive: bytes, folder: Path) -> None:
    """Write what is below the first entry of an archive into a new folder, but for devices, pipes and links out of it.

    All files are there before the first link, so that nothing is written through one.

    Raises:
        ValueError, tarfile.TarError, OSError: it is no archive of a folder, or can't be written.
    """
    links: list[tuple[Path, str]] = []
    folder.mkdir()
    with _opened(archive) as opened:
        if (top := opened.next()) is None or not top.isdir():
            raise ValueError("there is no folder")
        for entry in opened:
            path, other = (folder / _below(name, top.name) for name in (entry.name, entry.linkname))
            if ".." in path.relative_to(folder).parts:
                raise ValueError(f"{entry.name[:200]!r} is outside of its folder")
            if entry.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif entry.issym():
                links.append((path, entry.linkname))
            elif entry.islnk() and ".." not in other.relative_to(folder).parts and other.is_file():
                os.link(other, path)
            elif (file := opened.extractfile(entry) if entry.isreg() else None) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
                path.chmod(0o755 if entry.mode & 0o100 else 0o644)
    for path, target in links:
        path.symlink_to(target)
    top_path = folder.resolve()
    for path, _ in links:
        if not _leads_into(path, top_path):
            path.unlink()


def _opened(archive: bytes) -> tarfile.TarFile:
    """Open an archive that is not packed: a packed one may be much larger than its bytes."""
    return tarfile.open(fileobj=io.BytesIO(archive or bytes(1024)), mode="r:")


def _leads_into(link: Path, folder: Path) -> bool:
    """Return whether a link leads into a folder, perhaps to a file that is missing."""
    try:
        found = os.path.realpath(link, strict=True)
    except FileNotFoundError:
        found = os.path.realpath(link)
    except OSError:  # a circle, or a path so long that it can't be followed
        return False
    return Path(found).is_relative_to(folder)


def folder_too_large(most_bytes: int) -> PayloadTooLarge:
    """Return the error for a folder that is too large."""
    return PayloadTooLarge(f"a folder of the sandbox has more than {most_bytes:,} bytes, or {MAX_FILES:,} files")


def _below(path: str, top: str) -> str:
    return posixpath.relpath("/" + path.lstrip("/"), "/" + top.lstrip("/"))


def _folders(path: str) -> list[str]:
    """Return a relative path and all above it, the top one first."""
    parts = [part for part in path.strip("/").split("/") if part not in ("", ".")]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]


def _entry(path: str, owner: Owner, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.type, entry.mode = kind, 0o755
    entry.uid, entry.gid = owner
    return entry
