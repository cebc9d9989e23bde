"""One run of a program: its values, its home, its ends, and what it changed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from palestra.client import ModelEndpoint
from palestra.config import HarnessConfig
from palestra.config.loading import resolve_paths
from palestra.config.parts import SandboxConfig
from palestra.errors import ConfigError, EpisodeForfeited, InvalidRequest, RolloutFailed
from palestra.owned_folder import OwnedFolder
from palestra.process.keeper import remove_tree
from palestra.types.wire import EpisodeCalls
from palestra_harness import Harness, HarnessRollout, find_harness, known_harnesses, rollout
from palestra_harness.folders import PREFIX, process_folder, temporary_folder
from palestra_harness.harness import box_of
from palestra_harness.running import GRACE_SECONDS, run_harness

pytestmark = pytest.mark.ci

ENDPOINT = ModelEndpoint(base_url="http://127.0.0.1:9/v1", api_key="pe-key", model="policy", version="0.0")


def python(code: str, *arguments: str, **settings) -> Harness:
    return Harness(name="own", command=(sys.executable, "-c", code, *arguments), **settings)


@pytest.fixture
def counted(monkeypatch):
    """A server that says of every episode that its model was called."""
    calls = EpisodeCalls(answered=3, sampled_tokens=70, answer="done", refused={"unsupported_field top_p": 1})

    async def ask(http, endpoint):
        return calls

    monkeypatch.setattr(rollout, "_ask", ask)


def test_values_stand_for_their_names_and_are_not_searched_for_others():
    values = {"task": "print {api_key}", "api_key": "secret", "model": "m"}
    assert python("").filled('{"a": "{model}", "b": {}} {task}', values) == '{"a": "m", "b": {}} print {api_key}'


async def test_a_program_has_a_home_of_its_own_and_no_keys_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    code = (
        "import os, sys, pathlib\n"
        "print(sys.argv[1:], sorted(os.environ), pathlib.Path.home().joinpath('a/b').read_text()[::-1], os.getcwd())\n"
        "print(repr(sys.stdin.read()))\n"
    )
    harness = python(code, "{task}", "{anthropic_url}", files={"a/b": "key={api_key}"}, variables={"URL": "{base_url}"})
    found = await run_harness(harness, ENDPOINT, "do it", tmp_path)
    assert found.exit_code == 0
    assert "['do it', 'http://127.0.0.1:9']" in found.output
    assert "'URL'" in found.output
    assert "key=pe-key"[::-1] in found.output
    assert "OPENAI_API_KEY" not in found.output
    assert str(tmp_path) in found.output
    assert found.output.endswith("''\n")  # there is no input


async def test_temporary_files_go_with_the_home(tmp_path):
    code = "import os, tempfile; print(tempfile.mkdtemp()); print(os.path.expanduser('~'))"
    made, home = map(Path, (await run_harness(python(code), ENDPOINT, "x", tmp_path)).output.split())
    assert made.is_relative_to(home)
    assert not home.exists()


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
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        await asyncio.sleep(0.02)
    return False


CHILD = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session={}).pid, flush=True)"


@pytest.mark.parametrize("leaves", [False, True])
async def test_children_of_a_program_end_with_it(tmp_path, leaves):
    begun = time.monotonic()
    found = await run_harness(python(CHILD.format(leaves)), ENDPOINT, "x", tmp_path)
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


async def test_a_program_that_writes_on_after_a_signal_is_killed_at_once(tmp_path):
    code = "import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: print('x' * 10_000)"
    begun = time.monotonic()
    with pytest.raises(RolloutFailed):
        await run_harness(python(code), ENDPOINT, "x", tmp_path, max_output_bytes=100_000)
    assert time.monotonic() - begun < GRACE_SECONDS


ESCAPES = """
import os, subprocess, time
left = subprocess.Popen(["sleep", "60"], start_new_session=True)
open("half", "w").write(str(left.pid))
os.rename("half", "escaped")
os.kill(os.getppid(), 9)
time.sleep(60)
"""


async def test_a_process_that_escapes_fails_the_episode_and_does_not_hold_the_worker(tmp_path, monkeypatch):
    for name in ("GRACE_SECONDS", "LAST_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(f"palestra_harness.running.{name}", 0.1)

    async def reached() -> bool:
        return (tmp_path / "escaped").exists()

    try:
        async with asyncio.timeout(30):
            with pytest.raises(RolloutFailed) as caught:
                await run_harness(python(ESCAPES), ENDPOINT, "x", tmp_path, reached=reached)
        assert caught.value.termination == "left_process"
    finally:
        os.kill(int((tmp_path / "escaped").read_text()), 9)


STOPS = """
import os, signal, subprocess, time
left = subprocess.Popen(["sleep", "4321"], start_new_session=True)
open("half", "w").write(str(left.pid))
os.kill(os.getppid(), signal.SIGSTOP)
os.rename("half", "stopped")
time.sleep(60)
"""


async def test_a_program_that_stops_its_keeper_leaves_no_process(tmp_path, monkeypatch):
    for name in ("GRACE_SECONDS", "LAST_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(f"palestra_harness.running.{name}", 0.3)

    async def reached() -> bool:
        return (tmp_path / "stopped").exists()

    async with asyncio.timeout(30):
        await run_harness(python(STOPS), ENDPOINT, "x", tmp_path, reached=reached)
    assert await gone(int((tmp_path / "stopped").read_text()))


DEEP = """
import os
for name in ("a", "b"):
    os.mkdir(name)
    os.chdir(name)
    for _ in range(1100):
        os.mkdir("deep")
        os.chdir("deep")
    open("file", "w").close()
    os.chmod("..", 0)
    os.chdir(os.environ["HOME"] if name == "a" else "/")
"""


@pytest.mark.slow
async def test_a_tree_deeper_than_a_path_is_removed_and_the_episode_is_scored(counted):
    seen = []

    def score(task, result):
        seen.append((result.exit_code, result.workspace.parent))
        return 1.0

    assert (await HarnessRollout(python(DEEP), score)({"prompt": "x"}, ENDPOINT)).reward == 1.0
    ((code, folder),) = seen
    assert code == 0
    assert os.listdir(folder.parent) == []  # neither the workspace nor the home


@pytest.mark.slow
async def test_a_deep_repository_in_the_workspace_is_in_the_diff(tmp_path):
    code = "import os, subprocess; subprocess.run(['git', 'init', '-q', 'inner'], check=True); os.chdir('inner')\n"
    code += "for _ in range(1100): os.mkdir('a'); os.chdir('a')\nopen('file', 'w').write('deep')"
    try:
        assert "+deep" in (await run_harness(python(code), ENDPOINT, "x", tmp_path)).diff
    finally:
        remove_tree(str(tmp_path / "inner"))  # pytest could not


async def test_the_key_of_an_episode_is_in_no_result(tmp_path):
    code = "import sys; print(sys.argv[1] * 20_000, end=''); open('a.txt', 'w').write(sys.argv[1])"
    found = await run_harness(python(code, "{api_key}"), ENDPOINT, "x", tmp_path)
    assert "(key)" in found.output
    assert "(key)" in found.diff
    assert "pe-key" not in found.output + found.diff


async def test_a_task_that_begins_with_a_dash_is_no_option(tmp_path):
    harness = python("import sys; print(sys.argv[1:])", "{task}")
    assert "[' - a list']" in (await run_harness(harness, ENDPOINT, "- a list", tmp_path)).output


@pytest.mark.parametrize("task", ["a\0b", "x" * 200_000, "\ud800"])
async def test_a_task_that_is_no_argument_is_refused(tmp_path, task):
    with pytest.raises(InvalidRequest):
        await run_harness(python("", "{task}"), ENDPOINT, task, tmp_path)


STRANGE = """
import os, subprocess
subprocess.run(["git", "init", "-q", "inner"], check=True)
open("inner/new.txt", "w").write("of inner")
os.mkfifo("pipe"); os.remove("was_file.txt"); os.mkfifo("was_file.txt")
os.remove("was_other.txt"); os.mkdir("was_other.txt"); open("was_other.txt/a", "w").write("below")
os.symlink("/etc/passwd", "link"); os.symlink("/", "root")
open("large.txt", "w").write("large line\\n" * 200_000)
open("huge.bin", "w"); os.truncate("huge.bin", 2**36)
open(".gitattributes", "w").write("* -diff\\n*.txt working-tree-encoding=UTF-16\\n")
open(b"odd \\xff\\n", "w").write("odd")
"""


async def test_a_diff_is_of_files_and_links_whatever_else_is_there(tmp_path):
    for name in ("was_file.txt", "was_other.txt"):
        (tmp_path / name).write_text(f"old {name}\n")
    found = await run_harness(python(STRANGE.replace("\\\\", "\\")), ENDPOINT, "x", tmp_path)
    assert found.exit_code == 0, found.output
    for line in ("+of inner", "-old was_file.txt", "-old was_other.txt", "+below", "+/etc/passwd", "+odd"):
        assert f"\n{line}\n" in found.diff
    assert "root:" not in found.diff
    assert "large.txt differ" in found.diff
    assert "large line" not in found.diff
    assert "pipe" not in found.diff
    assert "huge" not in found.diff


async def test_a_program_that_is_not_installed_says_how_to_install_it(tmp_path):
    harness = Harness(name="x", command=("no-such-program",), install="pip install x")
    with pytest.raises(ConfigError, match="install x"):
        await run_harness(harness, ENDPOINT, "x", tmp_path)
    with pytest.raises(ConfigError, match="install x"):
        HarnessRollout(harness, lambda *_: 1.0)


@pytest.mark.parametrize(
    ("limits", "ends"),
    [({"max_calls": 3}, True), ({"max_tokens": 70}, True), ({"max_calls": 4, "max_tokens": 71}, False), ({}, False)],
)
async def test_a_program_that_has_used_up_its_calls_or_tokens_is_ended_and_scored(
    tmp_path, monkeypatch, counted, limits, ends
):
    monkeypatch.setattr("palestra_harness.running.LOOK_SECONDS", 0.05)
    begun, ask = tmp_path / "begun", rollout._ask

    async def ask_of_begun(http, endpoint):
        return await ask(http, endpoint) if begun.exists() else EpisodeCalls(answered=0, refused={})

    monkeypatch.setattr(rollout, "_ask", ask_of_begun)
    code = (
        f"import time; open('a.txt', 'w').write('half'); open({str(begun)!r}, 'w'); time.sleep({60 if ends else 0.3})"
    )
    seen = []

    def score(task, result):
        seen.append((result.workspace / "a.txt").read_text())
        return 0.5

    found = await HarnessRollout(python(code), score, **limits)({"prompt": "x"}, ENDPOINT)
    assert (found.reward, found.truncated) == (0.5, ends)
    assert seen == ["half"]


async def test_a_rollout_scores_the_workspace_and_removes_it(tmp_path, counted):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "given.txt").write_text("given")
    seen = []

    def score(task, result):
        seen.append(result.workspace)
        assert (result.answer, result.truncated) == ("done", False)
        assert result.refused == {"unsupported_field top_p": 1}
        return {"agent": float((result.workspace / "out.txt").read_text() == task["wanted"])}

    code = "open('out.txt', 'w').write(open('given.txt').read() + open('sub/own.txt').read())"
    settings = HarnessConfig(name="own", folder=tmp_path / "folder")
    rollout = python(code).rollout(score, settings)
    task = {"prompt": "x", "files": {"sub/own.txt": " own"}, "wanted": "given own"}
    found = await rollout(task, ENDPOINT)
    assert (found.reward, found.metadata["exit_code"]) == ({"agent": 1.0}, 0)
    assert not seen[0].exists()
    assert not (tmp_path / "folder" / "out.txt").exists()


@pytest.mark.parametrize("then", ["", "os.symlink('/etc', here)", "open(here, 'w')"])
async def test_a_program_that_replaces_its_workspace_fails_the_episode(tmp_path, then):
    code = f"import os, shutil; here = os.getcwd(); shutil.rmtree(here); {then}"
    (tmp_path / "workspace").mkdir()
    with pytest.raises(RolloutFailed) as caught:
        await run_harness(python(code), ENDPOINT, "x", tmp_path / "workspace")
    assert caught.value.termination == "workspace"


def packed(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as archive:
        for member in members:
            archive.addfile(member)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


async def contents(folder: Path) -> float:
    rollout = HarnessRollout(
        python(""), lambda task, result: float(len(list(result.workspace.iterdir()))), folder=folder
    )
    return (await rollout({"prompt": "x"}, ENDPOINT)).reward


async def test_an_archive_is_unpacked_and_one_that_leads_out_of_the_workspace_is_refused(tmp_path, counted):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    assert await contents(tmp_path / "a.zip") == 1
    assert await contents(packed(tmp_path / "a.tar", member("a"), member("b"))) == 2
    for bad in (member("../out"), member("a", tarfile.SYMTYPE, "../../out"), member("a", tarfile.FIFOTYPE)):
        with pytest.raises(ConfigError):
            await contents(packed(tmp_path / "bad.tar", bad))
    (tmp_path / "no.zip").write_text("no archive")
    with pytest.raises(ConfigError):
        await contents(tmp_path / "no.zip")


async def test_pipes_of_a_folder_are_not_copied(tmp_path, counted):
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    assert await contents(tmp_path) == 1


@pytest.mark.parametrize("files", [{"a": "1", "a/b": "2"}, {".": "x"}, {"x\0": "x"}, {"a": "\ud800"}, {"n" * 300: "x"}])
async def test_a_file_that_cannot_be_written_is_refused(files):
    with pytest.raises(InvalidRequest):
        await HarnessRollout(python(""), lambda *_: 1.0)({"prompt": "x", "files": files}, ENDPOINT)


@pytest.mark.parametrize("task", [{}, {"prompt": ""}, {"prompt": "x", "files": {"../out": "x"}}, {"prompt": 1}])
async def test_a_task_that_no_harness_can_play_is_refused(task):
    with pytest.raises(InvalidRequest):
        await HarnessRollout(python(""), lambda *_: 1.0)(task, ENDPOINT)


@pytest.mark.parametrize("code", [0, 2])
async def test_a_program_is_not_scored_where_its_calls_are_unknown(monkeypatch, code):
    monkeypatch.setattr(rollout, "CALLS_SECONDS", 0.0)
    with pytest.raises(RolloutFailed) as caught:
        await HarnessRollout(python(f"print('no such flag'); exit({code})"), lambda *_: 1.0)({"prompt": "x"}, ENDPOINT)
    assert caught.value.termination == "agent_failed"
    assert "no such flag" in str(caught.value)


def test_harnesses_are_found_by_name():
    known = known_harnesses()
    assert {"claude-code", "codex", "mini-swe-agent", "opencode", "pi"} <= known.keys()
    for name, harness in known.items():
        assert (harness.name, find_harness(name)) == (name, harness)
        assert harness.tried
        assert harness.tried in harness.install
    with pytest.raises(ConfigError, match="codex"):
        find_harness("codx")


WORKER = """
import asyncio, sys
from pathlib import Path
from palestra.client import ModelEndpoint
from palestra_harness import Harness
from palestra_harness.running import run_harness

endpoint = ModelEndpoint(base_url="http://127.0.0.1:9/v1", api_key="pe-key", model="policy", version="0.0")
harness = Harness(name="own", command=(sys.executable, "-c", sys.argv[2]))
asyncio.run(run_harness(harness, endpoint, "x", Path(sys.argv[1])))
"""
WAITS = """
import os, subprocess, time
left = subprocess.Popen(["sleep", "60"], start_new_session=True)
open("half", "w").write(f"{os.getpid()} {left.pid} {os.environ['HOME']}")
os.rename("half", "started")
time.sleep(60)
"""


@pytest.mark.slow
async def test_a_program_and_its_folders_end_with_a_worker_that_is_killed_and_the_next_one(tmp_path):
    top = tmp_path / "tmp"
    top.mkdir()
    variables = os.environ | {"TMPDIR": str(top)}
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), WAITS], env=variables)
    until = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < until
        await asyncio.sleep(0.02)
    worker.kill()
    worker.wait()
    *processes, home = (tmp_path / "started").read_text().split()
    for process in processes:
        assert await gone(int(process))
    while Path(home).exists():
        assert time.monotonic() < until
        await asyncio.sleep(0.02)
    assert len(list(top.iterdir())) == 1
    OwnedFolder(PREFIX, top).remove()
    assert list(top.iterdir()) == []


async def test_a_program_that_empties_the_folder_of_temporary_files_harms_no_later_episode(
    tmp_path, monkeypatch, counted
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    emptied = python(
        f"import shutil; shutil.rmtree({str(tmp_path)!r}, ignore_errors=True); import os; os.mkdir({str(tmp_path)!r})"
    )
    with pytest.raises(EpisodeForfeited):
        await HarnessRollout(emptied, lambda *_: 1.0)({"prompt": "x"}, ENDPOINT)
    assert (await HarnessRollout(python(""), lambda *_: 1.0)({"prompt": "x"}, ENDPOINT)).reward == 1.0


async def test_episodes_that_begin_together_share_the_folder_of_their_process(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with AsyncExitStack() as opened:
        made = await asyncio.gather(*(opened.enter_async_context(temporary_folder("episode-")) for _ in range(8)))
        assert len(set(made)) == 8
        assert [path.name.startswith(PREFIX) for path in tmp_path.iterdir()] == [True]


def test_folders_of_processes_that_live_and_of_others_stay(tmp_path):
    own = process_folder(tmp_path)
    (tmp_path / f"{PREFIX}deadbeef").mkdir()
    closed = tmp_path / f"{PREFIX}deadbeef" / "episode" / "closed"
    closed.mkdir(parents=True)
    (closed / "a.txt").write_text("a")
    closed.chmod(0)
    (tmp_path / "strange" / "folder").mkdir(parents=True)
    (tmp_path / f"{PREFIX}linklink").symlink_to(tmp_path / "strange")
    (tmp_path / f"{PREFIX}notes-of-somebody").mkdir()
    OwnedFolder(PREFIX, tmp_path).remove()
    assert {path.name for path in tmp_path.iterdir()} == {
        *(own.name, "strange", f"{PREFIX}linklink", f"{PREFIX}notes-of-somebody")
    }
    assert [path.name for path in (tmp_path / "strange").iterdir()] == ["folder"]


def test_an_image_may_be_a_folder_with_a_dockerfile(tmp_path):
    for given, image, build in (
        ("./box", None, tmp_path / "box"),
        ("box.tar", str(tmp_path / "box.tar"), None),
        ("python:3.12-slim", "python:3.12-slim", None),
    ):
        table = {"sandbox": {"image": given}}
        resolve_paths(table, tmp_path)
        spec = box_of(SandboxConfig.model_validate(table["sandbox"]))
        assert (spec.image, spec.build) == (image, build)
