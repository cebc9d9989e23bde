"""Programs beside a job: what they are started with, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palestra.process.child import MALLOC_VARIABLE, computing, kept_command, kept_ending, malloc_without_caches, popen
from palestra.process.keeper import members_of, remove_tree

PROGRAM = """
import os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as connection:
    connection.sendall(os.environ.get("GLIBC_TUNABLES", "").encode() + b"|" + os.environ["MARK"].encode())
"""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", "glibc.malloc.tcache_count=0"),
        ("glibc.malloc.mxfast=64", "glibc.malloc.mxfast=64:glibc.malloc.tcache_count=0"),
        ("glibc.malloc.tcache_count=3:glibc.malloc.mxfast=64", "glibc.malloc.tcache_count=3:glibc.malloc.mxfast=64"),
    ],
)
def test_settings_of_malloc_are_added_and_none_is_overruled(monkeypatch, given, wanted):
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert malloc_without_caches(given) == wanted


def test_where_there_is_a_gpu_the_caches_stay(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert malloc_without_caches("") == ""
    assert malloc_without_caches("glibc.malloc.mxfast=64") == "glibc.malloc.mxfast=64"


@pytest.mark.parametrize(("computes", "settings"), [(True, "glibc.malloc.tcache_count=0"), (False, "")])
def test_a_program_gets_its_variables_and_the_settings_if_it_computes(tmp_path, computes, settings):
    (tmp_path / "says_its_variables.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if name != MALLOC_VARIABLE}
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            variables = kept | {"PYTHONPATH": str(tmp_path), "MARK": "ä b"}
            given = computing(variables) if computes else variables
            process = popen(("-m", "says_its_variables"), theirs, given)
        ours.settimeout(60)
        said = ours.makefile("rb").read().decode()
    assert process.wait(60) == 0
    assert said == f"{settings}|ä b"


LEAVES = """
import os, subprocess, sys
inner = "import os, signal, time; os.setpgid(0, 0); signal.signal(15, signal.SIG_IGN); "
inner += "print('up', flush=True); time.sleep(600)"
with subprocess.Popen([sys.executable, "-S", "-c", inner], stdout=subprocess.PIPE) as left:
    left.stdout.readline()
    os.kill(os.getpid(), int(sys.argv[1])) if sys.argv[1] != "0" else os._exit(3)
"""


@pytest.mark.parametrize(("number", "words"), [(0, "ended with code 3"), (9, "was killed by SIGKILL")])
def test_a_keeper_ends_all_that_a_program_has_left_and_says_how_that_ended(number, words):
    theirs, ours = os.pipe()
    command = [sys.executable, "-S", "-c", LEAVES, str(number)]
    kept = subprocess.Popen(
        kept_command(theirs, 0.2, command), pass_fds=(theirs,), stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.close(theirs)
    assert kept_ending(kept.wait(30)) == words
    assert not members_of(kept.pid)
    os.close(ours)


def test_a_folder_is_removed_with_all_in_it_and_what_links_lead_to_stays(tmp_path):
    other, top = tmp_path / "other", tmp_path / "top"
    (other / "below").mkdir(parents=True)
    (top / "a" / "b" / "c").mkdir(parents=True)
    (top / "a" / "b" / "closed").mkdir(mode=0)
    (top / "a" / "b" / "link").symlink_to(other)
    (top / "a" / "dangling").symlink_to("nowhere")
    os.mkfifo(top / "a" / "b" / "pipe")
    (tmp_path / "link").symlink_to(other)
    assert remove_tree(str(top))
    assert remove_tree(str(tmp_path / "link"))
    assert remove_tree(str(tmp_path / "none"))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert [path.name for path in other.iterdir()] == ["below"]


DAEMON = """
import os, sys, time
ended, left = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(left, str(os.getpid()).encode())
        time.sleep(600)
    os._exit(0)
os.wait()
print(os.read(ended, 20).decode(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted by prctl(2)")
def test_a_keeper_ends_what_has_left_the_session():
    theirs, ours = os.pipe()
    with subprocess.Popen(
        kept_command(theirs, 0.2, [sys.executable, "-S", "-c", DAEMON]),
        pass_fds=(theirs,),
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as kept:
        os.close(theirs)
        daemon = int(kept.stdout.readline())
        assert kept_ending(kept.wait(30)) == "ended with code 0"
    assert not Path(f"/proc/{daemon}").exists() or Path(f"/proc/{daemon}/stat").read_text().split()[2] == "Z"
    os.close(ours)


@pytest.mark.parametrize(
    ("number", "words"),
    [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGQUIT", "SIGKILL")],
)
def test_a_keeper_that_is_asked_to_end_ends_its_program(number, words):
    theirs, ours = os.pipe()
    ignores = "import signal; signal.signal(15, signal.SIG_IGN); " if number == "SIGQUIT" else ""
    command = [sys.executable, "-S", "-c", f"{ignores}print('up', flush=True); import time; time.sleep(600)"]
    seconds = 600.0  # which SIGQUIT does not wait
    with subprocess.Popen(
        kept_command(theirs, seconds, command),
        pass_fds=(theirs,),
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(getattr(signal, number), signal.SIG_DFL),  # nohup and shells ignore some
    ) as kept:
        os.close(theirs)
        assert kept.stdout.readline() == b"up\n"
        kept.send_signal(getattr(signal, number))
        assert kept_ending(kept.wait(30)) == f"was killed by {words}"
    assert not members_of(kept.pid)
    os.close(ours)


@pytest.mark.parametrize("owner_dies_too", [False, True])
def test_a_keeper_that_is_killed_does_not_leave_its_program(owner_dies_too):
    theirs, ours = os.pipe()
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen(
        kept_command(theirs, 600.0, [sys.executable, "-S", "-c", ignores]),
        pass_fds=(theirs,),
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as kept:
        os.close(theirs)
        assert kept.stdout.readline() == b"up\n"
        if owner_dies_too:
            os.close(ours)
        kept.kill()
        assert kept.stdout.read() == b""  # nobody has it any more
    until = time.monotonic() + 30
    while members_of(kept.pid):
        assert time.monotonic() < until
    if not owner_dies_too:
        os.close(ours)


def test_a_code_that_is_no_signals_is_said_as_it_is():
    assert kept_ending(255) == "ended with code 255"
