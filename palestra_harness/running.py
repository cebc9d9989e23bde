"""Runs a harness once: a fresh home, its own process group, limits of time and output, and a diff of its workspace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from palestra.client import ModelEndpoint
from palestra.errors import ConfigError, InvalidRequest, RolloutFailed
from palestra.threads import in_thread
from palestra_harness.harness import Harness, HarnessResult

KEPT_BYTES = 65_536  # of the output, its end
MAX_DIFF = 1_000_000  # characters
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
_GIT = ("git", "-c", "user.name=palestra", "-c", "user.email=palestra@localhost", "-c", "commit.gpgsign=false")


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts by their path below a folder.

    Raises:
        InvalidRequest: a path leads out of the folder.
    """
    for name, text in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise InvalidRequest(f"the file {name!r} would be outside of its folder", "files")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


async def run_harness(
    harness: Harness,
    endpoint: ModelEndpoint,
    task: str,
    workspace: Path,
    *,
    timeout_seconds: float = 600.0,
    max_output_bytes: int = 64 * 2**20,
) -> HarnessResult:
    """Run a harness once, until its program ends.

    Whatever happens, the processes of its group are ended.

    Args:
        task: text that the program gets as `{task}`.
        workspace: the folder that it works in.
        max_output_bytes: of standard output and error together.

    Raises:
        ConfigError: the program, or git, is not installed.
        RolloutFailed: it ran longer, or wrote more.
    """
    if shutil.which("git") is None:
        raise ConfigError("git is not installed, and shows what a harness has changed")
    with TemporaryDirectory(prefix="palestra-harness-") as folder:
        home, snapshot = Path(folder) / "home", Path(folder) / "snapshot"
        home.mkdir()
        values = {
            "base_url": endpoint.base_url,
            "anthropic_url": endpoint.anthropic_url,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
            "task": task,
            "workspace": workspace,
            "home": home,
            "max_tokens": harness.max_tokens,
            "max_context": harness.max_context,
        }
        write_files(home, {name: harness.filled(text, values) for name, text in harness.files.items()})
        await _git(snapshot, workspace, "init", "--quiet")
        await _git(snapshot, workspace, "add", "--all")
        await _git(snapshot, workspace, "commit", "--quiet", "--allow-empty", "--message", "before")
        begun = time.monotonic()
        command = [harness.filled(part, values) for part in harness.command]
        written = Path(folder) / "output"
        process = _started(harness, command, workspace, harness.environment(home, values), written)
        try:
            while process.poll() is None:
                if time.monotonic() - begun > timeout_seconds:
                    raise RolloutFailed("timeout", f"{harness.name} ran longer than {timeout_seconds:g} s")
                if written.stat().st_size > max_output_bytes:
                    raise RolloutFailed("output", f"{harness.name} wrote more than {max_output_bytes:,} bytes")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await asyncio.shield(_end_group(process))
        seconds = time.monotonic() - begun
        await _git(snapshot, workspace, "add", "--all")
        diff = await _git(snapshot, workspace, "diff", "--cached", "HEAD")
        return HarnessResult(
            exit_code=process.returncode,
            output=_end_of(written),
            workspace=workspace,
            diff=diff[:MAX_DIFF],
            seconds=seconds,
        )


def _started(
    harness: Harness, command: Sequence[str], workspace: Path, variables: Mapping[str, str], written: Path
) -> subprocess.Popen[bytes]:
    """Start the program in a process group of its own, without input, with its output in a file."""
    with written.open("wb") as output:
        try:
            return subprocess.Popen(
                command,
                cwd=workspace,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            hint = f"; install it: {harness.install}" if harness.install else ""
            raise ConfigError(f"the program {command[0]!r} of {harness.name} is not installed{hint}") from None


def _end_of(written: Path) -> str:
    with written.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - KEPT_BYTES, 0))
        return file.read().decode(errors="replace")


async def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the program and all processes of its group, first gently."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await in_thread(lambda: process.wait(GRACE_SECONDS))
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def _git(snapshot: Path, workspace: Path, *arguments: str) -> str:
    """Run git with a repository of its own beside the workspace, which may itself be one."""

    def run() -> str:
        known = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(snapshot.parent)}
        command = [*_GIT, f"--git-dir={snapshot}", f"--work-tree={workspace}", *arguments]
        done = subprocess.run(command, cwd=workspace, env=known, capture_output=True, check=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise RolloutFailed("workspace", f"git {arguments[0]} of the workspace failed: {said}")
        return done.stdout.decode(errors="replace")

    return await in_thread(run)
