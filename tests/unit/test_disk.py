"""Folders that are needed for a while."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from palestra.disk import in_new_folder


class Ended(BaseException):
    """What the handler of a signal raises."""


@pytest.fixture(autouse=True)
def a_handler_that_raises():
    def leave(number, frame):
        raise Ended

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_folder_is_there_for_the_work_and_gone_after_it(tmp_path):
    def work(folder):
        (folder / "a").mkdir()
        assert [path.name[:5] for path in tmp_path.iterdir()] == [".try-"]
        assert folder.stat().st_mode & 0o777 == 0o700
        return 3

    assert in_new_folder(tmp_path, ".try-", work) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_signal_in_the_moment_in_which_the_folder_is_made_leaves_nothing(tmp_path, monkeypatch):
    make = os.mkdir

    def made(*arguments, **more):
        make(*arguments, **more)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(os, "mkdir", made)
    with pytest.raises(Ended):
        in_new_folder(tmp_path, ".try-", lambda folder: pytest.fail("there is work"))
    assert list(tmp_path.iterdir()) == []


def test_a_signal_during_the_removal_leaves_nothing(tmp_path, monkeypatch):
    remove, calls = shutil.rmtree, []

    def removed(path, **more):
        calls.append(path)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        remove(path, **more)

    monkeypatch.setattr(shutil, "rmtree", removed)
    with pytest.raises(Ended):
        in_new_folder(tmp_path, ".try-", lambda folder: (folder / "file").write_text("x"))
    assert list(tmp_path.iterdir()) == []
