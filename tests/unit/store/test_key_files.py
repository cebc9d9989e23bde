from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from palestra.errors import ConfigError, Conflict, NotFound
from palestra.store import key_files
from palestra.store.key_files import SecretFile, job_key, publish_key, read_secret, rotate_keys, write_private

GOOD = "ab" * 32


@pytest.mark.parametrize("text", ["", "\n", "abcd", GOOD[:-1], GOOD + "0", "z" * 64, "AB" * 32, "\x00" * 64, "é" * 32])
def test_what_is_no_secret_is_refused_in_words(tmp_path, text):
    (tmp_path / "secret").write_text(text)
    with pytest.raises(ConfigError, match=r"64.*hexadecimal"):
        SecretFile(tmp_path)


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    secret = SecretFile(tmp_path).current()
    assert secret == SecretFile(tmp_path).current() == read_secret(tmp_path)
    assert len(secret) == 32
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_file_that_is_gone_or_damaged_while_the_job_runs_leaves_the_keys_as_they_were(tmp_path, caplog):
    file = SecretFile(tmp_path)
    secret = file.current()
    (tmp_path / "secret").write_text("")
    assert file.current() == file.current() == secret
    assert caplog.text.count("the keys of before stay good") == 1
    (tmp_path / "secret").unlink()
    assert file.current() == secret
    write_private(tmp_path / "secret", GOOD + "\n")
    assert file.current() == bytes.fromhex(GOOD)


def test_keys_that_were_given_can_not_be_rotated_and_those_that_are_not_there_neither(tmp_path):
    with pytest.raises(NotFound, match="key yet"):
        rotate_keys(tmp_path, "job")
    secret = SecretFile(tmp_path).current()
    write_private(tmp_path / "api_key", "chosen by somebody\n")
    with pytest.raises(Conflict, match="PALESTRA_API_KEY"):
        rotate_keys(tmp_path, "job")
    assert read_secret(tmp_path) == secret
    write_private(tmp_path / "api_key", job_key(secret, "job") + "\n")
    assert rotate_keys(tmp_path, "job") == job_key(read_secret(tmp_path), "job") != job_key(secret, "job")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("writes", range(4))
def test_a_rotation_that_was_killed_anywhere_can_be_made_again(tmp_path, monkeypatch, writes):
    old = SecretFile(tmp_path).current()
    publish_key(tmp_path, lambda: job_key(old, "job"))
    left = [key_files.write_private] * writes

    def write(path, text):
        if not left:
            raise Killed
        left.pop()(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(key_files, "write_private", write)
        with suppress(Killed):
            rotate_keys(tmp_path, "job")
    present = (tmp_path / "api_key").read_text().strip()
    assert (present == job_key(read_secret(tmp_path), "job")) == (writes != 2)
    key = rotate_keys(tmp_path, "job")
    assert key == job_key(read_secret(tmp_path), "job") == (tmp_path / "api_key").read_text().strip()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".keys", "api_key", "secret"]


def test_a_start_with_a_given_key_after_a_killed_rotation_can_not_be_rotated(tmp_path):
    SecretFile(tmp_path)
    write_private(tmp_path / ".rotating", "")
    publish_key(tmp_path, lambda: "chosen by somebody")
    with pytest.raises(Conflict, match="PALESTRA_API_KEY"):
        rotate_keys(tmp_path, "job")


def test_rotations_at_the_same_time_leave_a_pair_that_fits(tmp_path):
    secret = SecretFile(tmp_path).current()
    publish_key(tmp_path, lambda: job_key(secret, "job"))
    with ThreadPoolExecutor(8) as threads:
        keys = list(threads.map(lambda _: rotate_keys(tmp_path, "job"), range(40)))
    present = (tmp_path / "api_key").read_text().strip()
    assert present == job_key(read_secret(tmp_path), "job")
    assert present in keys
    assert len(set(keys)) == 40


def test_every_request_after_a_rotation_is_checked_with_the_new_secret(tmp_path):
    file = SecretFile(tmp_path)
    publish_key(tmp_path, lambda: job_key(file.current(), "job"))
    for _ in range(20):
        before = file.recent()  # a look just before the rotation, which is good for a moment
        rotate_keys(tmp_path, "job")
        assert file.recent() == read_secret(tmp_path) != before


def test_requests_look_at_the_file_of_the_secret_seldom(tmp_path, monkeypatch):
    file = SecretFile(tmp_path)
    looks = []
    monkeypatch.setattr(SecretFile, "current", lambda self: looks.append(self) or self._secret)
    now = [100.0]
    monkeypatch.setattr(key_files.time, "monotonic", lambda: now[0])
    for _ in range(50):
        file.recent()
        now[0] += key_files.LOOK_SECONDS / 10
    assert len(looks) == 5
