"""Boxes of podman or docker: an image of their own, and limits that the kernel keeps for all processes together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited, InvalidRequest
from palestra.sandbox import Finished, SandboxSpec
from palestra.threads import in_thread
from palestra_sandboxes.archives import (
    OVERHEAD_BYTES,
    Owner,
    archive_of,
    archive_of_folder,
    folder_too_large,
    unpacked_files,
)
from palestra_sandboxes.child import CommandOutput, Descriptors, Program, filled_file, last_words_of
from palestra_sandboxes.container.calls import call_profile
from palestra_sandboxes.container.disk import TooDeep, written_bytes
from palestra_sandboxes.container.engine import ContainerEngine, check_answer, end, find_engine
from palestra_sandboxes.container.images import Image, forget_image, image_of
from palestra_sandboxes.container.network import listen_in
from palestra_sandboxes.forwarding import Forwarder, address_of

_MIB = 1 << 20
_DISK_SECONDS = 1.0  # between two looks at what a box has written, or ten times as long as a look takes
_KILL_SECONDS = 10.0
_PID_BYTES = 32  # of the line with a command's number
_USERS = 65_536  # of a box, which have no rights on the machine
_ROOT = (None, "", "0", "root", "0:0", "root:root")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
# The first process of a box reaps the orphans. The machine's own /etc/hosts stays outside.
_FIRST = """[ -s /etc/hosts ] || printf '127.0.0.1\\tlocalhost\\n::1\\tlocalhost\\n' > /etc/hosts
while :; do sleep 3600 & wait $!; done"""
# Says its number before it becomes the command: killing the engine's client would leave the command running.
_RUN = 'echo $$ >&2; cd "$1" || exit 126; shift; exec "$@"'
# Podman loses the output of a command that ends before it has read its input.
_RUN_WITH_INPUT = 'echo $$ >&2; if cd "$1"; then shift; "$@"; code=$?; else code=126; fi; cat > /dev/null; exit $code'
_MAKE_FOLDER = '[ -d "$0" ] || { mkdir -p "$0" && chown "$1" "$0"; }'
_KILL = 'kill -KILL -"$0" || kill -KILL "$0"'


class _Running(NamedTuple):
    """State of a container: whether it runs, its first process, and the folder of what it has changed."""

    status: str
    out_of_memory: bool
    process: int
    layer: str


class ContainerProvider:
    """Makes boxes with podman or docker."""

    name = "container"

    def check(self, spec: SandboxSpec) -> None:
        """Raise ConfigError for what the engine of this machine can't keep."""
        engine = find_engine()
        if spec.image is None and spec.build is None:
            raise ConfigError("a box of a container engine needs an image, or a folder to build one from")
        if spec.build is not None and not spec.build.is_dir():
            raise ConfigError(f"{spec.build}: there is no such folder to build an image from")
        if spec.limits.disk_mib is not None and not engine.is_local:
            raise ConfigError(
                "what a container writes can be limited for root only, with an engine on this machine: without a limit "
                "of the disk, say `disk_mib = None`"
            )
        if os.geteuid() != 0 and engine.is_podman and not Path("/sys/fs/cgroup/cgroup.controllers").exists():
            raise ConfigError("podman can't limit memory and processes here without root: the machine has cgroups v1")
        if spec.endpoint is not None:
            address_of(spec.endpoint)
            if not engine.is_local and not engine.is_podman:
                raise ConfigError("docker's containers reach an endpoint only where this process is root")

    async def open(self, spec: SandboxSpec) -> ContainerBox:
        """Start a box; its image is made before, unless it is here."""
        engine = find_engine()
        image = await image_of(engine, spec)
        box = ContainerBox(engine, spec, image, await engine.new_name())
        try:
            await box.start()
        except BaseException as error:
            await asyncio.shield(box.close())
            if isinstance(error, EpisodeForfeited):  # no agent has been in it
                raise EnvironmentFailed(str(error)) from error
            raise
        return box


class ContainerBox:
    """A container, and the commands that the engine runs in it."""

    def __init__(self, engine: ContainerEngine, spec: SandboxSpec, image: Image, name: str) -> None:
        """Describe a box; `start` starts it."""
        self.workdir = spec.workdir or image.workdir or "/"
        self.name = name
        self._engine, self._spec, self._image = engine, spec, image
        self._user = spec.user or image.user
        self._owner: Owner = (0, 0)
        self._forwarder = None if spec.endpoint is None else Forwarder(spec.endpoint, spec.endpoint_key)
        self.endpoint = None if self._forwarder is None else self._forwarder.url
        self.endpoint_key = None if self._forwarder is None else self._forwarder.stand_in
        self._watching: asyncio.Task[None] | None = None
        self._ended_for: str | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the container, its limits, its way to the endpoint, and copy its folder."""
        done = await self._create()
        if done.code:
            forget_image(self._engine, self._image)
        check_answer(done, "a box was not started")
        await self._connect()
        if self._user not in _ROOT:
            ids = await self.run(["sh", "-c", "id -u && id -g"], folder="/")
            if ids.code:
                raise ConfigError(f"the image {self._image.reference} has no user {self._user!r}: {last_words_of(ids)}")
            user, group = map(int, ids.output.split())
            self._owner = user, group
        if self.workdir not in ("/", self._image.workdir):
            owner = f"{self._owner[0]}:{self._owner[1]}"
            made = await self.run(["sh", "-c", _MAKE_FOLDER, self.workdir, owner], folder="/", user="0")
            if made.code:
                raise ConfigError(f"the folder {self.workdir} can't be made in a sandbox: {last_words_of(made)}")
        if (folder := self._spec.folder) is not None:
            await self._unpack(await in_thread(lambda: archive_of_folder(folder, self.workdir, self._owner)))

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        user: str | None = None,
        seconds: float | None = None,
    ) -> Finished:
        """Run a command; see `palestra.sandbox.Sandbox`."""
        limits = self._spec.limits
        output = CommandOutput(limits.output_bytes, limits.output_bytes + _PID_BYTES)
        user = user or self._user
        with contextlib.closing(output), Descriptors() as owned:
            variables, file = _variables(environment or {}, owned)
            words = ["exec", *(("-i",) if input else ()), *(("--user", user) if user else ()), *variables, self.name]
            words += ["sh", "-c", _RUN_WITH_INPUT if input else _RUN, "sh", folder or self.workdir, *command]
            client = self._engine.start(words, input, output, file)
            try:
                why = await output.wait(client.ended, limits.seconds if seconds is None else seconds)
            except asyncio.CancelledError:
                await asyncio.shield(self._end_command(client, output))
                raise
            if why != "ended":
                await self._end_command(client, output)
            code = await client.wait()
        text, (number, errors) = bytes(output.streams[0]), _said(output)
        if number is None and why == "ended":
            return await self._not_run(code, errors)
        if self._ended_for is not None:
            raise self._ending()
        code = code if why == "ended" else 137
        return Finished(code=code, output=text, errors=errors, timed_out=why == "timeout", cut=why == "cut")

    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        """Write files; see `palestra.sandbox.Sandbox`."""
        await self._unpack(await in_thread(lambda: archive_of(files, folder, self._owner)))

    async def get(self, folder: str, most_bytes: int) -> dict[str, bytes]:
        """Return files; see `palestra.sandbox.Sandbox`."""
        found = await self.archive(folder, most_bytes)
        return await in_thread(lambda: unpacked_files(found, most_bytes))

    async def archive(self, folder: str, most_bytes: int) -> bytes:
        """Return an archive; see `palestra.sandbox.Sandbox`.

        The engine makes it, and no program of the box, which may have been replaced.
        """
        follow = () if self._engine.is_podman else ("--follow-link",)
        words = ("cp", *follow, f"{self.name}:{folder}", "-")
        done = await self._engine.ask(*words, most=most_bytes + OVERHEAD_BYTES)
        if done.cut:
            raise folder_too_large(most_bytes)
        if done.code:
            await self._check_running(done)
            if done.timed_out:
                raise EpisodeForfeited("the files of a sandbox can't be read in time")
            return b""
        return done.output

    async def stop_processes(self) -> None:
        """End all processes by a new start of the container, which keeps its files. It needs no free process."""
        if self._ended_for is not None:
            raise self._ending()
        done = await self._engine.ask("restart", "-t", "0", self.name)
        try:
            check_answer(done, "a box was not started again")
            await self._connect()
        except EnvironmentFailed as error:  # its shell was taken away, perhaps
            await self._check_running(done)
            raise EpisodeForfeited(str(error)) from error

    async def close(self) -> None:
        """End the box and remove it."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        if self._forwarder is not None:
            await self._forwarder.close()
        await asyncio.shield(self._engine.remove(self.name))

    async def _create(self) -> Finished:
        spec, limits, engine = self._spec, self._spec.limits, self._engine
        with Descriptors() as owned:
            variables, file = _variables(spec.environment, owned)
            words = ["run", "-d", "--name", self.name, "--hostname", "sandbox", "--user", "0", *variables]
            words += ["--network", "bridge" if spec.network == "open" else "none", "--workdir", "/"]
            words += ["--memory", f"{limits.memory_mib}m", "--memory-swap", f"{limits.memory_mib}m"]
            words += ["--pids-limit", str(limits.processes), "--security-opt", "no-new-privileges", *engine.limits]
            words += ["--cpus", f"{limits.cpus:g}"] if limits.cpus is not None else []
            words += ["--ulimit", f"fsize={limits.disk_mib * _MIB}"] if limits.disk_mib is not None else []
            if engine.is_podman and (profile := call_profile()) is not None:
                calls = owned.add(filled_file(profile))
                words += ["--security-opt", f"seccomp=/dev/fd/{calls}"]
                file = (*file, calls)
            if engine.is_podman:
                words += ["--http-proxy=false", "--image-volume", "ignore", "--pull", "never"]
                words += ["--no-hosts"] if spec.network != "open" else []
                words += ["--uidmap", f"0:100000:{_USERS}"] if os.geteuid() == 0 else []
            words += ["--entrypoint", "sh", self._image.reference, "-c", _FIRST]
            return await engine.ask(*words, pass_fds=file)

    async def _connect(self) -> None:
        """Watch the disk of a container that was started, and let it reach the endpoint."""
        if self._watching is not None:
            self._watching.cancel()
        if self._spec.limits.disk_mib is None and self._spec.endpoint is None:
            return
        state = await self._state()
        if state is None or state.status != "running":
            raise EnvironmentFailed("a box has ended at its start")
        if self._spec.limits.disk_mib is not None:
            if not os.access(state.layer, os.R_OK | os.X_OK):
                if await self._state() is None:
                    raise EnvironmentFailed("a box was removed from outside at its start")
                raise ConfigError("what a container writes can't be seen here: say `disk_mib = None` for no limit")
            self._watching = asyncio.ensure_future(self._watch(state, self._spec.limits.disk_mib))
        if self._forwarder is not None:
            await self._forwarder.start(await listen_in(state.process, self._forwarder.port))

    async def _watch(self, state: _Running, most_mib: int) -> None:
        """End the box when it has written more than it may."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                written = await in_thread(lambda: written_bytes(state.layer, state.process, most_mib * _MIB))
                over = f"more than {most_mib} MiB on the disk" if written > most_mib * _MIB else None
            except TooDeep as error:
                over = f"folders that can't be counted: {error}"
            if over is not None:
                self._ended_for = over
                await self._engine.ask("kill", self.name)
                return
            await asyncio.sleep(max(_DISK_SECONDS, 10 * (loop.time() - began)))

    async def _unpack(self, archive: bytes) -> None:
        if not archive.strip(b"\0"):  # no entries: podman takes it for no archive
            return
        keep = ("-a=false",) if self._engine.is_podman else ("-a",)
        done = await self._engine.ask("cp", *keep, "-", f"{self.name}:/", input=archive)
        if done.code:
            await self._check_running(done)
            raise InvalidRequest(f"files can't be written in the sandbox: {last_words_of(done)}", "files")

    async def _end_command(self, client: Program, output: CommandOutput) -> None:
        """End a command in the box with its group; if that can't be done, all processes of the box."""
        output.close()  # the engine's client may wait for it to be read
        number, _ = _said(output)
        if number is not None:
            await self._engine.ask(
                "exec", "--user", "0", self.name, "sh", "-c", _KILL, str(number), seconds=_KILL_SECONDS
            )
            await asyncio.wait((client.ended,), timeout=1.0)
        try:
            if client.returncode is None:
                await self.stop_processes()
        finally:
            await end(client)

    async def _not_run(self, code: int, errors: bytes) -> Finished:
        """Return the end of a command that the engine did not start, in a box full of processes, say."""
        failed = Finished(code=code, output=b"", errors=errors)
        await self._check_running(failed)
        if not errors:
            raise EpisodeForfeited("the shell of a sandbox was replaced, or the output of a command was lost")
        return Finished(code=126, output=b"", errors=errors)

    async def _check_running(self, failed: Finished) -> None:
        """Raise what has become of the box, unless it runs: what ran in it may have ended it, and can't remove it."""
        state = await self._state()
        if self._ended_for is None and state is None:
            words = last_words_of(failed)
            raise EnvironmentFailed(f"the sandbox was removed from outside, or its engine does not answer: {words}")
        if self._ended_for is None and state is not None and state.status != "running":
            memory = f"more than {self._spec.limits.memory_mib} MiB of memory"
            why = f": {last_words_of(failed)}" if failed.code else ""
            self._ended_for = memory if state.out_of_memory else f"its first process runs no more{why}"
        if self._ended_for is not None:
            raise self._ending()

    def _ending(self) -> EpisodeForfeited:
        return EpisodeForfeited(f"the sandbox was ended: {self._ended_for}")

    async def _state(self) -> _Running | None:
        """Return the state of the container; None: there is none."""
        form = "{{.State.Status}}|{{.State.OOMKilled}}|{{.State.Pid}}|{{.GraphDriver.Data.UpperDir}}"
        done = await self._engine.ask("inspect", "--type", "container", "--format", form, self.name)
        if done.code:
            return None
        status, killed, process, layer = done.output.decode().strip().split("|")
        return _Running(status, killed == "true", int(process), layer)


def _said(output: CommandOutput) -> tuple[int | None, bytes]:
    """Return a command's number, which stands before its standard error, and that; None: it was not started."""
    first, _, rest = bytes(output.streams[1]).partition(b"\n")
    return (int(first), rest) if first.isdigit() and len(first) < _PID_BYTES else (None, bytes(output.streams[1]))


def _variables(environment: Mapping[str, str], owned: Descriptors) -> tuple[list[str], tuple[int, ...]]:
    """Return options for environment variables, and the descriptor of a file with those that need no quotes.

    In the options, other users of this machine could read them.
    """
    for name, value in environment.items():
        if not _NAME.fullmatch(name) or "\0" in value:
            raise InvalidRequest(f"{name[:100]!r} can't be an environment variable", "environment")
    plain = {name: value for name, value in environment.items() if "\n" not in value and "\r" not in value}
    words = [f"--env={name}={value}" for name, value in environment.items() if name not in plain]
    if not plain:
        return words, ()
    file = owned.add(filled_file("".join(f"{name}={value}\n" for name, value in plain.items()).encode()))
    return [f"--env-file=/dev/fd/{file}", *words], (file,)
