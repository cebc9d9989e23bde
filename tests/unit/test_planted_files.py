"""Another local user has made a folder or a file before: nothing of it is trusted, followed or emptied."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from palestra.config import RolloutConfig
from palestra.disk import check_folder, open_own, private_folder, read_own, write_whole
from palestra.errors import ConfigError
from palestra.runtime.run_dir import starting_in
from palestra.store.key_files import read_secret
from palestra.store.run_store import open_run_store
from palestra.tracking.process import alone
from palestra_bases.tenant_keys import Tenants
from palestra_bases.tinker.tables import open_journal
from palestra_lab.comparison.execution import locked
from palestra_live.command import check_own
from palestra_service.store.control_store import ControlStore

SECRET = "0" * 64


@pytest.fixture
def victim(tmp_path):
    """A file of the operator, which has to stay as it is."""
    path = tmp_path / "victim"
    path.write_text("precious")
    path.chmod(0o600)
    yield path
    assert path.read_text() == "precious"


@pytest.fixture
def someone_else(monkeypatch):
    """Call it, and what exists is another user's."""
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)


def not_roots(path):
    """Return the file, given to a user who is not root, whose files are everybody's to trust."""
    if os.getuid() == 0:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    return path


OPENERS = {
    "run": lambda folder: starting_in(folder).__enter__(),
    "run store": lambda folder: open_run_store(folder / "run.db", RolloutConfig()),
    "journal": lambda folder: open_journal(folder / "tinker.db"),
    "tenants": lambda folder: Tenants(folder, ["default"], "k-"),
    "control store": lambda folder: ControlStore(f"sqlite:///{folder / 'control.db'}"),
    "comparison": lambda folder: locked(folder).__enter__(),
    "live run": check_own,
}
FILES = {
    "run": ".lock",
    "run store": "run.db",
    "journal": "tinker.db",
    "tenants": "default",
    "control store": "control.db",
    "comparison": ".lock",
    "live run": "live.db",
}


@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, name, mode):
    folder = tmp_path / "planted"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError):
        OPENERS[name](folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", OPENERS)
def test_a_folder_of_another_user_is_refused(tmp_path, name, someone_else):
    folder = tmp_path / "planted"
    folder.mkdir(mode=0o700)
    not_roots(folder)
    someone_else()
    with pytest.raises(ConfigError):
        OPENERS[name](folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_not_followed(tmp_path, victim, name, link):
    folder = tmp_path / "planted"
    folder.mkdir(mode=0o700)
    link(victim, folder / FILES[name])
    with pytest.raises(ConfigError):
        OPENERS[name](folder)


@pytest.mark.parametrize("name", ["run store", "control store"])
@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_nor_is_one_in_the_place_of_a_file_beside_a_database(tmp_path, victim, name, suffix):
    folder = tmp_path / "planted"
    folder.mkdir(mode=0o700)
    (folder / (FILES[name] + suffix)).symlink_to(victim)
    with pytest.raises(ConfigError):
        OPENERS[name](folder)


def test_the_locks_of_a_control_store_and_of_a_tracker(tmp_path, victim):
    (tmp_path / "control.db.lock").symlink_to(victim)
    with pytest.raises(ConfigError):
        ControlStore(f"sqlite:///{tmp_path / 'control.db'}")
    with alone(tmp_path, "a"):
        (lock,) = tmp_path.rglob("a.lock")
    lock.unlink()
    lock.symlink_to(victim)
    with pytest.raises(ConfigError), alone(tmp_path, "a"):
        pass


def test_a_secret_of_another_user_is_refused(tmp_path, someone_else):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o622)
    with pytest.raises(ConfigError):
        read_secret(tmp_path)
    path.chmod(0o644)
    assert read_secret(tmp_path) == bytes(32)
    not_roots(path)
    someone_else()
    with pytest.raises(ConfigError):
        read_secret(tmp_path)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "secret")
    with pytest.raises(ConfigError):
        read_own(tmp_path / "secret")


def test_a_link_that_the_operator_has_named_is_followed(tmp_path, victim):
    (tmp_path / "key").symlink_to(victim)
    assert read_own(tmp_path / "key", follow=True) == b"precious"
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "runs").symlink_to(tmp_path / "mine")
    private_folder(tmp_path / "runs")


def test_a_temporary_name_that_can_be_guessed_leads_nowhere(tmp_path, victim, monkeypatch):
    made = []
    monkeypatch.setattr("palestra.disk.os.fsync", lambda _: made.extend(tmp_path.glob(".file.*")))
    write_whole(tmp_path / "file", b"one")
    (temporary,) = made
    temporary.symlink_to(victim)
    write_whole(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert not temporary.is_symlink()


def test_a_sticky_folder_is_good_for_a_database_alone(tmp_path):
    folder = tmp_path / "everybodys"
    folder.mkdir()
    folder.chmod(0o1777)
    check_folder(folder, may_be_sticky=True)
    ControlStore(f"sqlite:///{folder / 'control.db'}").close()
    assert stat.S_IMODE((folder / "control.db").stat().st_mode) == 0o600
    with pytest.raises(ConfigError):
        private_folder(folder)


def test_new_files_and_folders_are_private(tmp_path):
    private_folder(tmp_path / "new" / "run")
    assert stat.S_IMODE((tmp_path / "new" / "run").stat().st_mode) == 0o700
    os.close(open_own(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


@pytest.mark.slow
def test_the_command_says_it_in_a_line(tmp_path, victim):
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o777)
    (run / "secret").write_text(SECRET)
    (run / ".lock").symlink_to(victim)
    (tmp_path / "job.toml").write_text(
        f'name = "m"\nkind = "inference"\nrun_dir = "{run}"\n[policies.policy]\nmodel = "tiny-random"\n'
    )
    command = [sys.executable, "-m", "palestra.cli.main", "run", str(tmp_path / "job.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert str(run) in ended.stderr
    assert sorted(path.name for path in run.iterdir()) == [".lock", "secret"]
