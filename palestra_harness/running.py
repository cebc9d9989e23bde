"""Runs a harness once: a fresh home, limits of time and output, the end of all its processes, and a diff."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from palestra.client import ModelEndpoint
from palestra.errors import ConfigError, InvalidRequest, RolloutFailed
from palestra.process.child import kept_code, kept_command
from palestra.process.keeper import LAST_SECONDS, descendants_of, kill_session
from palestra.threads import in_thread
from palestra_harness.folders import temporary_folder
from palestra_harness.harness import TEMPORARY, Harness, HarnessResult

KEPT_BYTES = 65_536  # of the output, its end
MAX_DIFF = 1_000_000  # characters
MAX_FILE = 64 * 2**20  # bytes of a file that a diff looks at
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
LOOK_SECONDS = 1.0  # between two looks at the limits of calls and tokens
MAX_TOKENS, MAX_CONTEXT = 4096, 32_768  # that a program is told where the server does not say
GIT_SECONDS = 120.0  # for each look at a workspace
_GIT = (
    *("git", "-c", "user.name=palestra", "-c", "user.email=palestra@localhost", "-c", "commit.gpgsign=false"),
    *("-c", "core.bigFileThreshold=1m"),  # larger files are binary to the diff, and never in memory as a whole
)
# Whatever a workspace's `.gitattributes` says: the bytes are compared as they are.
_ATTRIBUTES = "* -text !eol !ident !filter !diff !working-tree-encoding\n"


class RunLimits(NamedTuple):
    """What ends a program; see `run_harness`."""

    seconds: float
    output_bytes: int
    reached: Callable[[], Awaitable[bool]] | None


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts by their path below a folder.

    Raises:
        InvalidRequest: a path leads out of the folder.
    """
    for name, text in files.items():
        path = folder / name
        try:
            if not path.resolve().is_relative_to(folder.resolve()):
                raise InvalidRequest(f"the file {name!r} would be outside of its folder", "files")
            if path.exists() and not path.is_file():
                raise InvalidRequest(f"{name!r} is no file", "files")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a circle of links
            raise InvalidRequest(f"the file {name[:200]!r} can't be written: {error}", "files") from error


async def run_harness(
    harness: Harness,
    endpoint: ModelEndpoint,
    task: str,
    workspace: Path,
    *,
    timeout_seconds: float = 600.0,
    max_output_bytes: int = 64 * 2**20,
    reached: Callable[[], Awaitable[bool]] | None = None,
) -> HarnessResult:
    """Run a harness once, until its program ends.

    Whatever happens, also if this process is killed, the program ends with all processes that it has started, and its
    home is removed.

    Args:
        task: text that the program gets as `{task}`.
        workspace: the folder that it works in.
        max_output_bytes: of standard output and error together.
        reached: asked every second whether another limit ends the program, which is no failure; None: there is none.

    Raises:
        ConfigError: the program, or git, is not installed.
        InvalidRequest: the task is no argument of a program: it is too long, or has a character 0.
        RolloutFailed: it ran longer, or wrote more; or git can't read the workspace, or there is none any more.
    """
    if shutil.which("git") is None:
        raise ConfigError("git is not installed, and shows what a harness has changed")
    harness.find_program()
    async with temporary_folder("home-") as folder:
        home, snapshot = folder / "home", folder / "snapshot"
        (home / TEMPORARY).mkdir(parents=True)
        values = values_of(endpoint, task, workspace, home)
        command = [harness.filled(part, values) for part in harness.command]
        variables = harness.environment(home, values)
        write_files(home, {name: harness.filled(text, values) for name, text in harness.files.items()})
        await take_snapshot(snapshot, workspace)
        begun, real = time.monotonic(), _real_folder(workspace)
        process, lifeline = _started(command, workspace, variables, home)
        limits = RunLimits(timeout_seconds, max_output_bytes, reached)
        code, output, truncated = await _watched(harness.name, process, lifeline, limits)
        seconds = time.monotonic() - begun
        if _real_folder(workspace) != real:
            raise RolloutFailed("workspace", f"{harness.name} has put something else in the place of its workspace")
        diff = await changes_since(snapshot, workspace)
        return HarnessResult(
            exit_code=kept_code(code),
            output=without_key(output, endpoint.api_key)[-KEPT_BYTES:],
            workspace=workspace,
            diff=without_key(diff, endpoint.api_key)[:MAX_DIFF],
            seconds=seconds,
            truncated=truncated,
        )


def _real_folder(path: Path) -> Path | None:
    return path.resolve() if path.is_dir() else None


def values_of(endpoint: ModelEndpoint, task: str, workspace: Path, home: Path) -> dict[str, Any]:
    """Return the values of names in braces; see `Harness`."""
    text = f" {task}" if task.startswith("-") else task  # no option of the program
    return {"task": text, "workspace": workspace, "home": home} | {
        **{name: getattr(endpoint, name) for name in ("base_url", "anthropic_url", "api_key", "model")},
        "max_tokens": endpoint.max_tokens or MAX_TOKENS,
        "max_context": endpoint.max_context or MAX_CONTEXT,
    }


async def take_snapshot(snapshot: Path, workspace: Path) -> None:
    """Keep what is in a workspace, in a repository of its own."""
    await _git(snapshot, workspace, "init", "--quiet")
    (snapshot / "info" / "attributes").write_text(_ATTRIBUTES, encoding="utf-8")
    await _add_all(snapshot, workspace)
    await _git(snapshot, workspace, "commit", "--quiet", "--allow-empty", "--message", "before")


async def changes_since(snapshot: Path, workspace: Path) -> str:
    """Return what has changed in a workspace since its snapshot, as `git diff` shows it; perhaps only its beginning."""
    await _add_all(snapshot, workspace)
    diff = await _git(snapshot, workspace, "diff", "--cached", "HEAD", most=4 * MAX_DIFF)
    return diff.decode(errors="replace")


def without_key(text: str, key: str) -> str:
    """Return a text with `(key)` in the place of a key."""
    return text.replace(key, "(key)") if key else text


def _started(
    command: Sequence[str], workspace: Path, variables: Mapping[str, str], home: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the program below a keeper, without input; return the keeper, and the pipe whose end ends it."""
    theirs, lifeline = os.pipe()
    try:
        process = subprocess.Popen(
            kept_command(theirs, GRACE_SECONDS, command, (home,)),
            cwd=workspace,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs,),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        os.close(lifeline)
        raise InvalidRequest(f"the program can't be started with this task: {error}", "prompt") from error
    finally:
        os.close(theirs)
    return process, lifeline


async def _watched(
    name: str,
    process: subprocess.Popen[bytes],
    lifeline: int,
    limits: RunLimits,
) -> tuple[int, str, bool]:
    """Wait until all processes of a program have ended; return exit code, end of the output, and if it was cut off."""
    reading = asyncio.ensure_future(in_thread(partial(_read, process, limits.output_bytes), "palestra-harness"))
    reached = False
    try:
        async with asyncio.timeout(limits.seconds):
            while not (reached or reading.done()):
                await asyncio.wait((reading,), timeout=None if limits.reached is None else LOOK_SECONDS)
                reached = not reading.done() and limits.reached is not None and await limits.reached()
    except TimeoutError:
        raise RolloutFailed("timeout", f"{name} ran longer than {limits.seconds:g} s") from None
    finally:
        os.close(lifeline)
        # No longer: a process that has killed the keeper keeps its output open.
        _, open_still = await asyncio.wait((reading,), timeout=2 * (GRACE_SECONDS + LAST_SECONDS))
    if open_still:
        for one in descendants_of(process.pid):  # of a keeper that the program has stopped
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        kill_session(process.pid)
        await asyncio.wait((reading,), timeout=LAST_SECONDS)
        if not reading.done():  # it has left the session as well
            raise RolloutFailed("left_process", f"{name} has left a process that can't be found and ended")
    code, output, written = await reading
    if written > limits.output_bytes:
        raise RolloutFailed("output", f"{name} wrote more than {limits.output_bytes:,} bytes")
    return code, output, reached


def _read(process: subprocess.Popen[bytes], most: int) -> tuple[int, str, int]:
    """Read a program's output to its end, or end it after some bytes; return code, end of the output, and bytes."""
    kept, written = b"", 0
    assert process.stdout is not None
    with process.stdout as stream:
        while written <= most and (data := os.read(stream.fileno(), KEPT_BYTES)):
            written += len(data)
            kept = (kept + data)[-2 * KEPT_BYTES :]
        if written > most:
            process.send_signal(signal.SIGQUIT)
    return process.wait(), kept.decode(errors="replace"), written


async def _add_all(snapshot: Path, workspace: Path) -> None:
    """Put all files of the workspace into the index, but for what its `.gitignore` names.

    `git add` refuses a repository without a commit in the workspace, and does not look into one with a commit.
    """
    kinds = ("--others", "--modified", "--deleted", "--exclude-standard")
    listed = await _git(snapshot, workspace, "ls-files", "-z", *kinds)

    def sort() -> tuple[bytes, bytes]:
        names = {name for one in listed.split(b"\0") if one for name in _files_at(workspace, one)}
        there = {name for name in names if _can_be_read(os.path.join(os.fsencode(workspace), name))}
        return b"\0".join(sorted(there)), b"\0".join(sorted(names - there))

    there, gone = await in_thread(sort)
    await _git(snapshot, workspace, "update-index", "-z", "--force-remove", "--stdin", said=gone)
    await _git(snapshot, workspace, "update-index", "-z", "--add", "--stdin", said=there)


def _files_at(workspace: Path, name: bytes) -> Iterator[bytes]:
    """Yield a listed file, or what is in a repository in the workspace, which git lists as a folder."""
    if not name.endswith(b"/"):
        yield name
        return
    top = os.fsencode(workspace)
    below = [os.path.join(top, name)]
    while below:  # `os.walk` of Python 3.11 recurs, and a program may make deep folders
        with suppress(OSError):  # closed, or too long a path
            for entry in list(os.scandir(below.pop())):
                if entry.name != b".git" and entry.is_dir(follow_symlinks=False):
                    below.append(entry.path)
                elif entry.name != b".git":
                    yield os.path.relpath(entry.path, top)


def _can_be_read(path: bytes) -> bool:
    """Return whether a path is a link, or no huge file that this user may read: no folder, pipe, socket or device."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    is_file = stat.S_ISREG(found.st_mode) and found.st_size <= MAX_FILE
    return stat.S_ISLNK(found.st_mode) or (is_file and os.access(path, os.R_OK))


async def _git(snapshot: Path, workspace: Path, *arguments: str, said: bytes = b"", most: int = -1) -> bytes:
    """Run git with a repository of its own beside the workspace, which may itself be one; return what it writes.

    Args:
        said: its input.
        most: bytes that are returned; -1: all.
    """

    def run() -> bytes:
        known = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(snapshot)}
        command = [*_GIT, f"--git-dir={snapshot}", f"--work-tree={workspace}", *arguments]
        with tempfile.TemporaryFile() as written:
            try:
                done = subprocess.run(
                    command,
                    cwd=workspace,
                    env=known,
                    input=said,
                    stdout=written,
                    stderr=subprocess.PIPE,
                    timeout=GIT_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise RolloutFailed("workspace", f"git {arguments[0]} took more than {GIT_SECONDS:g} s") from None
            if done.returncode:
                cause = done.stderr.decode(errors="replace").strip()[-500:]
                raise RolloutFailed("workspace", f"git {arguments[0]} of the workspace failed: {cause}")
            written.seek(0)
            return written.read(most)

    return await in_thread(run)
