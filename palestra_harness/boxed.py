"""Runs a harness once in a sandbox: its workspace goes in, and comes out after all processes have ended."""

from __future__ import annotations

import asyncio
import posixpath
import tarfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from palestra.client import ModelEndpoint
from palestra.errors import EpisodeForfeited, PayloadTooLarge, RolloutFailed
from palestra.process.child import kept_code
from palestra.process.keeper import remove_tree
from palestra.sandbox import Finished, Sandbox, SandboxSpec, sandbox
from palestra.threads import in_thread
from palestra_harness.folders import temporary_folder
from palestra_harness.harness import PASSED_ON, TEMPORARY, Harness, HarnessResult
from palestra_harness.running import (
    KEPT_BYTES,
    LOOK_SECONDS,
    MAX_DIFF,
    RunLimits,
    changes_since,
    take_snapshot,
    values_of,
    without_key,
)
from palestra_sandboxes.archives import unpack_into

WORKSPACE, HOME = "/tmp/workspace", "/tmp/home"


async def run_in_box(
    harness: Harness, endpoint: ModelEndpoint, task: str, workspace: Path, box: SandboxSpec, limits: RunLimits
) -> HarnessResult:
    """Run a harness once in a box, until its program ends. It reaches the episode's server, and nothing else.

    Args:
        task: text that the program gets as `{task}`.
        workspace: copied into the box, and replaced by what is left there.
        box: its image and limits.
        limits: what ends the program.

    Raises:
        ConfigError: the box can't be had.
        RolloutFailed: the program ran longer, wrote more, or filled the box's disk.
        EpisodeForfeited: the box has broken, and the program may be the reason.
    """
    spec = replace(
        box,
        folder=workspace,
        workdir=WORKSPACE,
        network="endpoint",
        endpoint=endpoint.base_url,
        endpoint_key=endpoint.api_key,
        limits=replace(box.limits, seconds=limits.seconds, output_bytes=limits.output_bytes),
    )
    async with temporary_folder("snapshot-") as folder:
        await take_snapshot(folder / "snapshot", workspace)
        begun = time.monotonic()
        try:
            async with sandbox(spec) as opened:
                inside = replace(endpoint, base_url=opened.endpoint or "", api_key=opened.endpoint_key or "")
                done, truncated = await _played(harness, inside, task, opened, limits)
                seconds = time.monotonic() - begun
                _check(harness, done, limits)
                left = await opened.archive(WORKSPACE, limits.output_bytes)
        except EpisodeForfeited as error:
            raise EpisodeForfeited(f"{harness.name}: {error}") from error
        except PayloadTooLarge:
            raise RolloutFailed("workspace", f"the workspace has more than {limits.output_bytes:,} bytes") from None
        await in_thread(partial(_replace, workspace, left))
        diff = await changes_since(folder / "snapshot", workspace)
    output = (done.output + done.errors).decode(errors="replace")
    return HarnessResult(
        exit_code=kept_code(done.code),
        output=without_key(output, inside.api_key)[-KEPT_BYTES:],
        workspace=workspace,
        diff=without_key(diff, inside.api_key)[:MAX_DIFF],
        seconds=seconds,
        truncated=truncated,
    )


async def _played(
    harness: Harness, endpoint: ModelEndpoint, task: str, box: Sandbox, limits: RunLimits
) -> tuple[Finished, bool]:
    """Run the program to its end, and end all others; return also whether a limit has ended it."""
    home = Path(HOME)
    values = values_of(endpoint, task, Path(WORKSPACE), home)
    made = await box.run(["mkdir", "-p", posixpath.join(HOME, TEMPORARY)], folder="/")
    if made.code:
        reason = made.errors.decode(errors="replace").strip()[-500:]
        raise RolloutFailed("agent_failed", f"{harness.name}: its home can't be made: {reason}")
    if harness.files:
        files = {name: harness.filled(text, values).encode() for name, text in harness.files.items()}
        await box.put(files, HOME)
    own = harness.environment(home, values).items()
    variables = {name: text for name, text in own if name not in PASSED_ON or name in harness.variables}
    command = [harness.filled(part, values) for part in harness.command]
    running = asyncio.ensure_future(box.run(command, environment=variables, seconds=limits.seconds))
    truncated = False
    try:
        while not (running.done() or truncated):
            await asyncio.wait((running,), timeout=None if limits.reached is None else LOOK_SECONDS)
            truncated = not running.done() and limits.reached is not None and await limits.reached()
        await box.stop_processes()
        return await running, truncated
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait((running,))


def _check(harness: Harness, done: Finished, limits: RunLimits) -> None:
    """Raise RolloutFailed for a program that ran too long or wrote too much."""
    if done.timed_out:
        raise RolloutFailed("timeout", f"{harness.name} ran longer than {limits.seconds:g} s")
    if done.cut:
        raise RolloutFailed("output", f"{harness.name} wrote more than {limits.output_bytes:,} bytes")


def _replace(workspace: Path, archive: bytes) -> None:
    """Put what is in an archive in the place of a workspace, but for links that lead out of it, devices and pipes."""
    remove_tree(str(workspace))
    try:
        unpack_into(archive, workspace)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise RolloutFailed("workspace", f"the workspace can't be unpacked: {error}") from error
