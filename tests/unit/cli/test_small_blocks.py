"""Commands that train are started again without glibc's caches, in the same process, and hand nothing of it on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from palestra.cli import own_process
from palestra.cli.main import command, main, parser
from palestra.cli.options import commands_of

SCRIPT = """
import json, os, sys
from palestra.cli.own_process import start_without_caches
start_without_caches()
own = open("/proc/self/environ", "rb").read().split(b"\\0")
own = [part for one in own for part in one.removeprefix(b"GLIBC_TUNABLES=").split(b":")]  # glibc may have parted them
at_start = [one.decode() for one in own if one.startswith(b"glibc.")]
handed_on = {name: os.environ.get(name) for name in ("GLIBC_TUNABLES", "PALESTRA_STARTED_AGAIN")}
print(json.dumps([os.getpid(), sys.argv[1:], at_start, handed_on]))
"""
pytestmark = [pytest.mark.ci, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")]


def started(
    *arguments: str, script: str = SCRIPT, **environment: str
) -> tuple[int, list[str], list[str], dict[str, str | None]]:
    """What the process says of itself, behind its number as its parent knows it."""
    kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], env=kept | environment, stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    number, given, at_start, handed_on = json.loads(out)
    assert number == process.pid
    return number, given, at_start, handed_on


def test_it_has_no_caches_and_the_same_number_and_arguments():
    _, given, at_start, handed_on = started("a b", "ä", "")
    assert given == ["a b", "ä", ""]
    assert at_start == ["glibc.malloc.tcache_count=0"]
    assert handed_on == {"GLIBC_TUNABLES": None, "PALESTRA_STARTED_AGAIN": None}


def test_other_tunables_are_kept_and_handed_on():
    _, _, at_start, handed_on = started("run", GLIBC_TUNABLES="glibc.malloc.mxfast=64")
    assert at_start == ["glibc.malloc.mxfast=64", "glibc.malloc.tcache_count=0"]
    assert handed_on["GLIBC_TUNABLES"] == "glibc.malloc.mxfast=64"


def test_who_has_set_the_caches_is_not_overruled():
    _, _, at_start, handed_on = started("run", GLIBC_TUNABLES="glibc.malloc.tcache_count=7")
    assert at_start == ["glibc.malloc.tcache_count=7"]
    assert handed_on["GLIBC_TUNABLES"] == "glibc.malloc.tcache_count=7"


def test_the_mark_of_another_process_does_not_count():
    _, _, at_start, _ = started("run", PALESTRA_STARTED_AGAIN="1")
    assert at_start == ["glibc.malloc.tcache_count=0"]


def test_a_process_that_is_traced_stays():
    traced = SCRIPT.replace("\nstart_", "\nsys.settrace(lambda *_: None)\nstart_")
    assert started("run", script=traced)[2] == []


def test_where_no_program_may_be_started_the_command_runs_and_says_so(monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "execve", refuse)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr("palestra.process.child.malloc_without_caches", lambda given: "glibc.malloc.tcache_count=0")
    before = dict(os.environ)
    own_process.start_without_caches()
    assert "need more memory: [Errno 1] Operation not permitted" in capsys.readouterr().err
    assert os.environ == before


COMMAND = """
import sys
from palestra.cli import own_process
own_process.start_without_caches = lambda: print("again")
from palestra.cli.main import command, main
{call}
"""


@pytest.mark.parametrize(
    ("call", "words", "printed"),
    [
        ("command()", ["run", "none.toml"], "again\n"),
        ("command()", ["algorithms", "none"], ""),
        ("main()", ["run", "none.toml"], ""),
        ("main(sys.argv[1:])", ["run", "none.toml"], ""),
    ],
)
def test_only_the_command_of_a_process_is_started_again(call, words, printed):
    """A fork, a test or a script that calls `main` would otherwise become what its process was started for."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(call=call), *words], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == printed
    assert done.stderr


def test_the_console_script_is_the_command():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="palestra")
    assert script.load() is command


def test_a_call_within_a_process_does_not_replace_it(tmp_path, capsys):
    assert main(["run", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_the_commands_whose_own_process_trains():
    trains = {name for name, one in commands_of(parser()).items() if one.get_default("trains")}
    assert trains == {"base", "demo", "run", "tinker", "train"}


@pytest.mark.parametrize("words", [["run", "none.toml"], ["train", "--tasks", "none.jsonl"]])
def test_a_command_says_what_it_says_otherwise(tmp_path, words):
    done = subprocess.run(
        [sys.executable, "-m", "palestra.cli.main", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    inner = "import sys; from palestra.cli.main import main; sys.exit(main(sys.argv[1:]))"
    without = subprocess.run(
        [sys.executable, "-c", inner, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (without.returncode, without.stdout, without.stderr)
    assert done.returncode == 2
