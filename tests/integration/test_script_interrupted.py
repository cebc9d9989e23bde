"""A script in `palestra.train` or `palestra.evaluate` is left at SIGINT and SIGTERM, with the run saved before."""

from __future__ import annotations

import signal
import sqlite3
import sys
from pathlib import Path

import pytest
from servers import HERE, Process

CODES = {"SIGINT": -signal.SIGINT, "SIGTERM": 128 + signal.SIGTERM}  # Python ends by SIGINT itself


def script(folder: Path, *words: str) -> Process:
    return Process.start(
        [sys.executable, HERE / "stoppable_script.py", folder / "run", *words], folder / f"{len(words)}.log"
    )


def states(folder: Path) -> set[str]:
    with sqlite3.connect(folder / "run" / "run.db") as db:
        return {state for (state,) in db.execute("SELECT DISTINCT state FROM episodes")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("SIGINT", "plain"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("SIGINT", "loop"), ("SIGTERM", "plain"), ("SIGTERM", "loop"))
        ),
    ],
)
def test_training_is_saved_and_the_script_does_not_run_on(tmp_path, where, name):
    process = script(tmp_path, "train", where, name)
    assert process.wait() == CODES[name], process.output
    assert "RAN ON" not in process.output
    assert "stopped; go on with" in process.output
    if name == "SIGINT":
        assert "KeyboardInterrupt: training was stopped and saved; go on with resume=True" in process.output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.slow
def test_what_was_saved_goes_on_without_waiting_for_the_leases_of_before(tmp_path):
    assert script(tmp_path, "train", "plain", "SIGINT").wait() == CODES["SIGINT"]
    process = script(tmp_path, "train", "plain", "SIGTERM", "--resume")
    assert process.wait() == CODES["SIGTERM"], process.output
    assert "resumed after step 1" in process.output


@pytest.mark.slow
def test_where_python_gives_no_signals_to_the_thread_the_main_thread_gets_them(tmp_path):
    process = script(tmp_path, "train", "thread", "SIGINT")
    assert process.wait() == CODES["SIGINT"], process.output
    assert "the main thread was interrupted" in process.output
    assert "RAN ON" not in process.output


@pytest.mark.slow
@pytest.mark.parametrize("where", ["plain", "loop"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_evaluation_ends_and_gives_back_what_was_being_played(tmp_path, where, name):
    process = script(tmp_path, "evaluate", where, name)
    assert process.wait() == CODES[name], process.output
    assert "RAN ON" not in process.output
    assert "claimed" not in states(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_is_loaded_ends_the_script_without_waiting(tmp_path, number):
    code = (
        "import os, sys, threading, palestra.runtime.local as local\n"
        "def slow(*_):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    threading.Event().wait()\n"
        "local.build_parts = slow\n"
        f"sys.argv = ['script', {str(tmp_path / 'run')!r}, 'train', 'plain', 'none']\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import runpy; runpy.run_module('stoppable_script', run_name='__main__')\n"
    )
    process = Process.start([sys.executable, "-c", code], tmp_path / "log")
    assert process.wait() == CODES[number.name], process.output
    assert "RAN ON" not in process.output


@pytest.mark.slow
def test_the_command_says_how_to_go_on_and_has_the_exit_code_of_a_stop(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "job.toml").write_text(
        f'run_dir = "{tmp_path / "run"}"\nsteps = 3\n[engine]\nkind = "fake"\n[tasks]\ntrain = "tasks.jsonl"\n'
    )
    (tmp_path / "agent.py").write_text(
        "import os, signal, time\n"
        "def rollout(task, policy):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(3)\n"
        "    return 1.0\n"
    )
    words = ["train", tmp_path / "agent.py:rollout", "--config", tmp_path / "job.toml", "--concurrency", "1"]
    process = Process.start([sys.executable, "-m", "palestra.cli.main", *words], tmp_path / "log")
    assert process.wait() == 130, process.output
    assert "stopped; go on with --resume" in process.output
    assert "Traceback" not in process.output
