"""What comes out of a box is written beside it: files and links, and no way out of their folder."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from palestra.errors import EpisodeForfeited
from palestra_sandboxes.archives import archive_of_folder, unpack_into, unpacked_files


def archive(*entries: tuple[str, bytes, str | bytes]) -> bytes:
    """Return an archive of names, kinds, and contents or targets, below a folder `top`."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as made:
        for name, kind, given in (("top", tarfile.DIRTYPE, b""), *entries):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o6755
            if isinstance(given, str):
                entry.linkname = given
            entry.size = 0 if isinstance(given, str) else len(given)
            made.addfile(entry, None if isinstance(given, str) else io.BytesIO(given))
    return written.getvalue()


def test_files_links_and_modes_come_out_as_they_were(tmp_path: Path):
    given, found = tmp_path / "given", tmp_path / "found"
    (given / "sub" / "empty").mkdir(parents=True)
    (given / "sub" / "file").write_bytes(b"content")
    (given / "sub" / "file").chmod(0o755)
    os.link(given / "sub" / "file", given / "again")
    (given / "inside").symlink_to("sub/../again")
    (given / "sub" / "missing").symlink_to("../not-there")
    os.mkfifo(given / "pipe")
    unpack_into(archive()[:512] + archive_of_folder(given, "top"), found)
    assert {path.relative_to(found).as_posix() for path in found.rglob("*")} == {
        *("sub", "sub/empty", "sub/file", "sub/missing", "again", "inside")
    }
    assert (found / "inside").read_bytes() == (found / "again").read_bytes() == b"content"
    assert (found / "sub" / "file").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(found / "sub" / "missing") == "../not-there"


def test_no_link_leads_out(tmp_path: Path):
    (tmp_path / "secret").write_text("of the machine")
    steps, folder = "abcdefghijklmnop", "d" * 247
    made: list[tuple[str, bytes, str | bytes]] = [
        ("top/plain", tarfile.SYMTYPE, "../secret"),
        ("top/whole", tarfile.SYMTYPE, str(tmp_path / "secret")),
        ("top/later", tarfile.SYMTYPE, "here/../secret"),  # leads out once `here` is there
        ("top/here", tarfile.SYMTYPE, "."),
        ("top/circle", tarfile.SYMTYPE, "circle"),
        ("top/hard", tarfile.LNKTYPE, "../secret"),
        ("top/device", tarfile.CHRTYPE, b""),
        ("top/file", tarfile.REGTYPE, b"x"),
    ]
    below = "top"
    for step in steps:  # short links to long names: the whole path is longer than the kernel and Python follow
        made += [(f"{below}/{folder}", tarfile.DIRTYPE, b""), (f"{below}/{step}", tarfile.SYMTYPE, folder)]
        below += f"/{folder}"
    made.append(("top/escape", tarfile.SYMTYPE, "/".join(steps) + "/.." * (len(steps) + 1) + "/secret"))
    unpack_into(archive(*made), tmp_path / "found")
    found = {path.name for path in (tmp_path / "found").iterdir()}
    assert found == {"here", "file", folder, "a"}
    assert (tmp_path / "found" / "file").stat().st_mode & 0o7777 == 0o755


def test_nothing_is_written_through_a_link(tmp_path: Path):
    entries = (("top/up", tarfile.SYMTYPE, ".."), ("top/up/written", tarfile.REGTYPE, b"x"))
    with pytest.raises(FileExistsError):
        unpack_into(archive(*entries), tmp_path / "found")
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("name", ["top/../../out", "../out", "/out/../../out"])
def test_a_name_out_of_the_folder_is_refused_or_below_it(tmp_path: Path, name: str):
    with contextlib.suppress(ValueError):
        unpack_into(archive((name, tarfile.REGTYPE, b"x")), tmp_path / "found")
    assert not (tmp_path / "out").exists()


def test_a_packed_archive_is_not_unpacked(tmp_path: Path):
    packed = gzip.compress(archive(("top/large", tarfile.REGTYPE, bytes(10**6))))
    with pytest.raises(tarfile.TarError):
        unpack_into(packed, tmp_path / "found")
    with pytest.raises(EpisodeForfeited):
        unpacked_files(packed, 10**9)
