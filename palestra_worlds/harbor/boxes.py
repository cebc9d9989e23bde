"""The boxes of a task: the agent's, the verifier's own, and what the second gets of the first."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from palestra.errors import ConfigError, EnvironmentFailed, InvalidRequest, PayloadTooLarge
from palestra.sandbox import Finished, Sandbox, SandboxLimits, SandboxSpec, sandbox
from palestra_worlds.harbor.format import AgentTable, Artifact, BoxTable, Network, VerifierTable
from palestra_worlds.harbor.task import MAX_BYTES, HarborTask, resolved

LOGS = "/logs/verifier"
_COPIES = "/logs/copies"
_SETUP_SECONDS = 180.0  # to open a box, or for a command of our own: many may start at the same time
_MAX_OUTPUT = 2**20  # bytes of one command
_SCRIPT_USER = "0"


class Spoiled(EnvironmentFailed):
    """A box or a verifier does not do what it should. What an agent has left there may be the reason."""


@dataclass(frozen=True, kw_only=True)
class BoxRules:
    """What a job allows its tasks.

    Attributes:
        network: whether boxes of tasks that ask for the network get it.
        variables: names of this machine's variables that tasks may read.
        limit_disk: whether `storage_mb` is kept, for which a container engine needs root.
        provider: name of the sandbox provider; None: chosen by what a box needs.
    """

    network: bool = False
    variables: Collection[str] = ()
    limit_disk: bool = True
    provider: str | None = None


def agent_spec(task: HarborTask, rules: BoxRules) -> SandboxSpec:
    """Return the agent's box. Raises ConfigError: the job does not allow what the task asks for."""
    box, build = task.agent_box
    return _spec(task, box, build, rules, task.table.agent.network_mode or box.network_mode, "environment")


def verifier_spec(task: HarborTask, rules: BoxRules) -> SandboxSpec | None:
    """Return the verifier's own box; None: it runs in the agent's. Raises ConfigError as `agent_spec`."""
    if (found := task.verifier_box) is None:
        return None
    box, build, _ = found
    return _spec(task, box, build, rules, task.table.verifier.network_mode or box.network_mode, "verifier.environment")


def _spec(
    task: HarborTask, box: BoxTable, build: Path | None, rules: BoxRules, network: Network, where: str
) -> SandboxSpec:
    if network == "public" and not rules.network:
        raise ConfigError(
            f"task {task.name!r}: {where} has network_mode 'public', which is the format's default; allow it with "
            'settings.network = true, or write network_mode = "no-network" in task.toml'
        )
    return SandboxSpec(
        image=box.docker_image,
        build=build,
        environment=resolved(box.env, rules.variables, f"task {task.name!r}: {where}.env"),
        workdir=box.workdir,
        network="open" if network == "public" else "none",
        limits=SandboxLimits(
            cpus=box.cpus,
            memory_mib=box.memory_mb or 2048,
            processes=256,
            disk_mib=box.storage_mb if rules.limit_disk else None,
            output_bytes=_MAX_OUTPUT,
        ),
    )


@asynccontextmanager
async def opened(task: HarborTask, spec: SandboxSpec, rules: BoxRules, build_seconds: float) -> AsyncIterator[Sandbox]:
    """Open a box with Harbor's folders; its image is built first, within `build_seconds`.

    Raises:
        EnvironmentFailed: the image can't be had or built, or the box does not start.
    """
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(build_seconds + _SETUP_SECONDS):
                box = await stack.enter_async_context(sandbox(spec, rules.provider))
        except ConfigError as error:
            said = " ".join(str(error).split())  # the last lines of a build
            hint = "" if spec.limits.disk_mib is None else " (settings.limit_disk = false plays without storage_mb)"
            raise EnvironmentFailed(f"task {task.name!r}: {_shortened(said)}{hint}") from error
        except TimeoutError as error:
            raise EnvironmentFailed(f"task {task.name!r}: its image was not built in {build_seconds:g} s") from error
        try:
            await script(box, "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs /logs/*")
        except Spoiled as error:  # it is fresh
            raise EnvironmentFailed(str(error)) from None
        yield box


def user_of(table: AgentTable | VerifierTable) -> str | None:
    """Return the user that runs commands; None: that of the image."""
    return None if table.user is None else str(table.user)


def _shortened(text: str) -> str:
    return text if len(text) <= 600 else f"{text[:200]} … {text[-400:]}"


async def script(box: Sandbox, text: str) -> None:
    """Run a shell script of our own as root. Raises Spoiled: it fails."""
    done = await box.run(["sh", "-c", text], user=_SCRIPT_USER, folder="/", seconds=_SETUP_SECONDS)
    if done.code:
        raise Spoiled(f"a box could not be prepared ({text[:60]} …): {shown(done)[-300:]}")


async def upload_files(box: Sandbox, files: Mapping[str, bytes], folder: str) -> None:
    """Write files. Raises Spoiled: what is there does not let it, such as a folder in the place of a file."""
    try:
        await box.put(files, folder)
    except InvalidRequest as error:
        raise Spoiled(f"files can't be written to {folder}: {error}") from error


async def copy_artifacts(task: HarborTask, source: Sandbox, target: Sandbox) -> None:
    """Copy what a task declares as artifacts, and /logs/artifacts, from the agent's box to the verifier's."""
    usual = Artifact(source="/logs/artifacts")
    for artifact in (usual, *(one for one in task.table.artifacts if one.source != usual.source)):
        path = PurePosixPath(source.workdir, artifact.source)
        try:
            files = await source.get(str(path), MAX_BYTES)
            if not files and artifact is not usual:
                files, path = await _file(source, path), path.parent
        except PayloadTooLarge:
            raise Spoiled(
                f"task {task.name!r}: the artifact {path} has more than {MAX_BYTES >> 20} MiB, or too many files"
            ) from None
        if kept := {name: data for name, data in files.items() if not _excluded(name, artifact.exclude)}:
            await upload_files(target, kept, str(path))


async def _file(box: Sandbox, path: PurePosixPath) -> dict[str, bytes]:
    """Return one file by its name, out of a folder with a copy of it alone; empty: there is none."""
    copy = f'rm -rf {_COPIES} && mkdir {_COPIES} && cp -L "$0" {_COPIES}'
    await box.run(["sh", "-c", copy, str(path)], user=_SCRIPT_USER, folder="/", seconds=_SETUP_SECONDS)
    found = await box.get(_COPIES, MAX_BYTES)
    return {name: data for name, data in found.items() if name == path.name}


def _excluded(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern fits a file, or a folder that it is in, as `tar --exclude` has it."""
    path = PurePosixPath(name)
    return any(each.match(pattern) for pattern in patterns for each in (path, *path.parents))


def in_shell(command: str) -> list[str]:
    """Return a shell that runs a command, bash where the box has it, with both outputs in one."""
    choose = 'exec 2>&1; if command -v bash > /dev/null; then exec bash -c "$0"; fi; exec sh -c "$0"'
    return ["sh", "-c", choose, command]


def run_script(path: str) -> list[str]:
    """Return what runs a script of a task by its first line, with both outputs in one."""
    return ["sh", "-c", f"exec 2>&1; exec {shlex.quote(path)}"]


def shown(done: Finished) -> str:
    """Return the output of a command as text."""
    return (done.output + done.errors).decode(errors="replace").strip()
