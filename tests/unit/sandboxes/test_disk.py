"""What a box has written: its own files, and none of the machine's."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from palestra_sandboxes.container.disk import written_bytes

MANY = 2**40
NO_PROCESS = 2**30


def test_all_files_below_a_folder_count_and_no_link_is_followed(tmp_path):
    layer, outside = tmp_path / "layer", tmp_path / "outside"
    outside.mkdir()
    (outside / "large").write_bytes(b"x" * 2_000_000)
    (layer / "a" / "b").mkdir(parents=True)
    (layer / "a" / "b" / "file").write_bytes(b"x" * 500_000)
    for link in (layer / "folder", layer / "a" / "folder"):
        link.symlink_to(outside)
    (layer / "file").symlink_to(outside / "large")
    expected = sum((path.lstat().st_blocks + 1) * 512 for path in layer.rglob("*"))
    assert 500_000 < written_bytes(str(layer), NO_PROCESS, MANY) == expected < 700_000
    assert written_bytes(str(layer), NO_PROCESS, 10) < expected


@pytest.mark.parametrize("swapped", ["a", "a/b"])
def test_a_link_that_takes_the_place_of_a_folder_during_the_count_leads_nowhere(tmp_path, monkeypatch, swapped):
    layer, outside = tmp_path / "layer", tmp_path / "outside"
    (outside / "b").mkdir(parents=True)
    for folder in (outside, outside / "b"):
        (folder / "large").write_bytes(b"x" * 2_000_000)
    (layer / "a" / "b").mkdir(parents=True)

    def swapping(call):
        def opened(path, *arguments, **settings):
            if path == str(layer / "a" / "b") and not (layer / swapped).is_symlink():
                (layer / swapped).rename(tmp_path / "taken")
                (layer / swapped).symlink_to(outside)
            return call(path, *arguments, **settings)

        return opened

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, swapping(getattr(os, name)))
    assert written_bytes(str(layer), NO_PROCESS, MANY) < 100_000
    assert Path(layer / swapped).is_symlink()


def test_a_mapped_file_without_a_name_and_a_descriptor_counts(tmp_path, monkeypatch):
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [str(os.getpid())] if path == "/proc" else listed(path))
    (tmp_path / "layer").mkdir()
    before = written_bytes(str(tmp_path / "layer"), os.getpid(), MANY)
    path = Path.cwd() / f"mapped-{os.getpid()}"  # on the disk of the root folder
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, 2**25)
        mapped = mmap.mmap(file.fileno(), 4096)
        path.unlink()
    with mapped:
        assert written_bytes(str(tmp_path / "layer"), os.getpid(), MANY) >= before + 2**25
    assert written_bytes(str(tmp_path / "layer"), os.getpid(), MANY) < before + 2**25
