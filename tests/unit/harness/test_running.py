"""One run of a program: its values, its home, its ends, and what it changed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from palestra.client import ModelEndpoint
from palestra.errors import ConfigError, InvalidRequest, RolloutFailed
from palestra_harness import Harness, HarnessRollout, find_harness, known_harnesses
from palestra_harness.running import run_harness

ENDPOINT = ModelEndpoint(base_url="http://127.0.0.1:9/v1", api_key="pe-key", model="policy", version="0.0")


def python(code: str, *arguments: str, **settings) -> Harness:
    return Harness(name="own", command=(sys.executable, "-c", code, *arguments), **settings)


def test_values_stand_for_their_names_and_are_not_searched_for_others():
    values = {"task": "print {api_key}", "api_key": "secret", "model": "m"}
    assert python("").filled('{"a": "{model}", "b": {}} {task}', values) == '{"a": "m", "b": {}} print {api_key}'


async def test_a_program_has_a_home_of_its_own_and_no_keys_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    code = (
        "import os, sys, pathlib\n"
        "print(sys.argv[1:], sorted(os.environ), pathlib.Path.home().joinpath('a/b').read_text(), os.getcwd())\n"
        "print(repr(sys.stdin.read()))\n"
    )
    harness = python(code, "{task}", "{anthropic_url}", files={"a/b": "key={api_key}"}, variables={"URL": "{base_url}"})
    found = await run_harness(harness, ENDPOINT, "do it", tmp_path)
    assert found.exit_code == 0
    assert "['do it', 'http://127.0.0.1:9']" in found.output
    assert "'URL'" in found.output
    assert "key=pe-key" in found.output
    assert "OPENAI_API_KEY" not in found.output
    assert str(tmp_path) in found.output
    assert found.output.endswith("''\n")  # there is no input


async def test_what_it_changed_is_a_diff_also_in_a_repository(tmp_path):
    (tmp_path / "old.txt").write_text("before\n")
    (tmp_path / ".git").mkdir()
    found = await run_harness(
        python("open('old.txt', 'w').write('after\\n'); open('new.txt', 'w').write('new\\n')"), ENDPOINT, "x", tmp_path
    )
    assert "-before\n+after" in found.diff
    assert "+new" in found.diff
    assert (await run_harness(python("exit(3)"), ENDPOINT, "x", tmp_path)).diff == ""
    assert list((tmp_path / ".git").iterdir()) == []


async def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        await asyncio.sleep(0.02)
    return False


CHILD = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "


async def test_children_of_a_program_end_with_it(tmp_path):
    begun = time.monotonic()
    found = await run_harness(python(CHILD), ENDPOINT, "x", tmp_path)
    assert time.monotonic() - begun < 30
    assert await gone(int(found.output))


@pytest.mark.parametrize(
    ("code", "termination"),
    [("import time; time.sleep(60)", "timeout"), ("while True: print('x' * 10_000)", "output")],
)
async def test_a_program_that_never_ends_fails_the_episode(tmp_path, code, termination):
    limits = {"timeout_seconds": 0.5 if termination == "timeout" else 30.0, "max_output_bytes": 1_000_000}
    with pytest.raises(RolloutFailed) as caught:
        await run_harness(python(code), ENDPOINT, "x", tmp_path, **limits)
    assert caught.value.termination == termination


async def test_a_program_that_is_not_installed_says_how_to_install_it(tmp_path):
    harness = Harness(name="x", command=("no-such-program",), install="pip install x")
    with pytest.raises(ConfigError, match="pip install x"):
        await run_harness(harness, ENDPOINT, "x", tmp_path)


async def test_a_rollout_scores_the_workspace_and_removes_it(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "given.txt").write_text("given")
    seen = []

    def score(task, result):
        seen.append(result.workspace)
        return {"agent": float((result.workspace / "out.txt").read_text() == task["wanted"])}

    code = "open('out.txt', 'w').write(open('given.txt').read() + open('sub/own.txt').read())"
    rollout = HarnessRollout(python(code), score, folder=tmp_path / "folder")
    task = {"prompt": "x", "files": {"sub/own.txt": " own"}, "wanted": "given own"}
    found = await rollout(task, ENDPOINT)
    assert (found.reward, found.metadata["exit_code"]) == ({"agent": 1.0}, 0)
    assert not seen[0].exists()
    assert not (tmp_path / "folder" / "out.txt").exists()


@pytest.mark.parametrize("task", [{}, {"prompt": ""}, {"prompt": "x", "files": {"../out": "x"}}, {"prompt": 1}])
async def test_a_task_that_no_harness_can_play_is_refused(task):
    with pytest.raises(InvalidRequest):
        await HarnessRollout(python(""), lambda *_: 1.0)(task, ENDPOINT)


def test_harnesses_are_found_by_name():
    known = known_harnesses()
    assert {"claude-code", "codex", "mini-swe-agent", "opencode", "pi"} <= known.keys()
    for name, harness in known.items():
        assert (harness.name, find_harness(name)) == (name, harness)
        assert harness.tried
        assert harness.tried in harness.install
    with pytest.raises(ConfigError, match="codex"):
        find_harness("codx")
