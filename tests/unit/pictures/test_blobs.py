"""A folder of pictures keeps each of them once, whole, and within its quota."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from palestra.errors import NotFound, PayloadTooLarge, StoreError
from palestra.pictures.blobs import Blobs


def test_equal_bytes_are_kept_once(tmp_path):
    blobs = Blobs(tmp_path / "pictures")
    with ThreadPoolExecutor(8) as pool:
        digests = set(pool.map(lambda _: blobs.put(b"same"), range(1000)))
    assert digests == {hashlib.sha256(b"same").hexdigest()}
    assert [path for path in (tmp_path / "pictures").rglob("*") if path.is_file()] == [
        tmp_path / "pictures" / next(iter(digests))[:2] / next(iter(digests))
    ]
    assert blobs.get(next(iter(digests))) == b"same"
    assert list(blobs) == list(digests)
    assert next(iter(digests)) in blobs


def test_a_digest_that_is_not_there_and_a_text_that_is_none(tmp_path):
    blobs = Blobs(tmp_path)
    with pytest.raises(NotFound, match="no picture"):
        blobs.get("0" * 64)
    for text in ("../../secret", "", "0" * 63, "G" * 64, "0" * 64 + "\n"):
        with pytest.raises(NotFound, match=r"64.*hexadecimal"):
            blobs.get(text)
        assert text not in blobs
    assert list(Blobs(tmp_path / "none")) == []


def test_a_damaged_file_is_reported_and_can_be_sent_again(tmp_path):
    blobs = Blobs(tmp_path)
    digest = blobs.put(b"content")
    (tmp_path / digest[:2] / digest).write_bytes(b"cont")
    with pytest.raises(StoreError, match="not hold"):
        blobs.get(digest)
    assert blobs.put(b"content") == digest
    assert blobs.get(digest) == b"content"


def test_the_quota_counts_each_picture_once_and_those_of_before(tmp_path):
    Blobs(tmp_path).put(b"0123456789")
    blobs = Blobs(tmp_path, max_bytes=25)
    blobs.put(b"abcdefghij")
    blobs.put(b"abcdefghij")
    with pytest.raises(PayloadTooLarge, match=r"20 of.*25"):
        blobs.put(b"another one")
    assert len(list(blobs)) == 2
    blobs.put(b"5more")


class Account:
    """Counts bytes, and gives back what could not be written."""

    def __init__(self):
        self.bytes = 0

    @contextmanager
    def charge(self, size):
        self.bytes += size
        try:
            yield
        except BaseException:
            self.bytes -= size
            raise


def test_a_picture_that_can_not_be_written_costs_nothing(tmp_path):
    account, blobs = Account(), Blobs(tmp_path / "pictures")
    in_the_way = blobs.path(hashlib.sha256(b"0123456789").hexdigest())
    in_the_way.mkdir(parents=True)  # a folder where the file has to be
    with pytest.raises(StoreError, match="be written"):
        blobs.put(b"0123456789", account.charge)
    assert account.bytes == 0
    in_the_way.rmdir()
    for _ in range(2):  # the second time it is there already
        assert blobs.get(blobs.put(b"0123456789", account.charge)) == b"0123456789"
        assert account.bytes == 10


def test_a_picture_whose_name_is_not_on_disk_is_not_there(tmp_path, monkeypatch):
    account, blobs = Account(), Blobs(tmp_path / "pictures", max_bytes=10)
    really = os.fsync

    def broken(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")
        really(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(StoreError, match="Input/output error"):
            blobs.put(b"0123456789", account.charge)
    assert (account.bytes, list(blobs)) == (0, [])
    blobs.put(b"0123456789", account.charge)
    assert (account.bytes, len(list(blobs))) == (10, 1)
