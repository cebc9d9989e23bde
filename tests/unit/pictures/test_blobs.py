"""A folder of pictures keeps each of them once, whole, and within its quota."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

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
        with pytest.raises(NotFound, match="64 hexadecimal digits"):
            blobs.get(text)
        assert text not in blobs
    assert list(Blobs(tmp_path / "none")) == []


def test_a_damaged_file_is_reported_and_can_be_sent_again(tmp_path):
    blobs = Blobs(tmp_path)
    digest = blobs.put(b"content")
    (tmp_path / digest[:2] / digest).write_bytes(b"cont")
    with pytest.raises(StoreError, match="does not hold"):
        blobs.get(digest)
    assert blobs.put(b"content") == digest
    assert blobs.get(digest) == b"content"


def test_the_quota_counts_each_picture_once_and_those_of_before(tmp_path):
    Blobs(tmp_path).put(b"0123456789")
    blobs = Blobs(tmp_path, max_bytes=25)
    blobs.put(b"abcdefghij")
    blobs.put(b"abcdefghij")
    with pytest.raises(PayloadTooLarge, match="20 of 25 bytes"):
        blobs.put(b"another one")
    assert len(list(blobs)) == 2
    blobs.put(b"5more")
