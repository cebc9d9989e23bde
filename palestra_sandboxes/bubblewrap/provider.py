"""Boxes of bubblewrap: the machine's own `/usr`, and folders in memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import posixpath
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited, InvalidRequest
from palestra.sandbox import Finished, SandboxSpec
from palestra.threads import in_thread
from palestra_sandboxes.archives import OVERHEAD_BYTES, archive_of, archive_of_folder, folder_too_large, unpacked_files
from palestra_sandboxes.bubblewrap.program import (
    HOME,
    VARIABLES,
    ProgramLimits,
    SandboxedProgram,
    check_bubblewrap,
    rlimits,
    start_program,
)
from palestra_sandboxes.child import CommandOutput, Descriptors, filled_file, last_words_of
from palestra_sandboxes.forwarding import Forwarder, address_of

_MAX_MESSAGE = 4096
_ANSWER_SECONDS = 30.0
_COPY_SECONDS = 60.0
_WRITABLE = (HOME, "/tmp")


class BubblewrapProvider:
    """Makes boxes with bubblewrap: programs of the machine's `/usr`, one user without rights, folders in memory."""

    name = "bubblewrap"

    def check(self, spec: SandboxSpec) -> None:
        """Raise ConfigError for what bubblewrap can't keep."""
        check_bubblewrap()
        if spec.image is not None or spec.build is not None:
            raise ConfigError("bubblewrap has no images; use the sandbox provider 'container'")
        if spec.user is not None:
            raise ConfigError(f"a box of bubblewrap has one user of its own, and can't run as {spec.user!r}")
        if spec.network == "open":
            raise ConfigError("a box of bubblewrap has no open network; use the sandbox provider 'container'")
        if spec.limits.cpus is not None:
            raise ConfigError("bubblewrap can't limit processors (`cpus`); use the sandbox provider 'container'")
        if spec.limits.disk_mib is None:
            raise ConfigError("the disk of a box of bubblewrap is in memory, and needs a limit (`disk_mib`)")
        if spec.workdir is not None and not _can_write(spec.workdir):
            raise ConfigError(f"a box of bubblewrap can write below {' and '.join(_WRITABLE)}, and not {spec.workdir}")
        if spec.endpoint is not None:
            address_of(spec.endpoint)

    async def open(self, spec: SandboxSpec) -> BubblewrapBox:
        """Start a box."""
        limits = _limits_of(spec)
        with Descriptors() as theirs:
            ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            control = theirs.add(other.detach())
            null = theirs.add(os.open(os.devnull, os.O_RDWR))
            try:
                program = await start_program(
                    ("/usr/bin/python3", "-I", "-S", "-c", _inside(), str(control)),
                    {},
                    limits,
                    stdin=subprocess.DEVNULL,
                    stdout=null,
                    pass_fds=(control,),
                    privileged=True,
                )
            except BaseException:
                ours.close()
                raise
        box = BubblewrapBox(spec, limits, program, ours)
        try:
            await box.start()
        except BaseException:
            await box.close()
            raise
        return box


class BubblewrapBox:
    """A box of bubblewrap. Its first process, `inside.py`, starts the commands."""

    def __init__(
        self, spec: SandboxSpec, limits: ProgramLimits, program: SandboxedProgram, control: socket.socket
    ) -> None:
        """Take a started box; `BubblewrapProvider.open` starts one. `control`: socket to its first process."""
        self.workdir = spec.workdir or HOME
        self._spec, self._limits, self._program, self._control = spec, limits, program, control
        self._forwarder = None if spec.endpoint is None else Forwarder(spec.endpoint, spec.endpoint_key)
        self.endpoint = None if self._forwarder is None else self._forwarder.url
        self.endpoint_key = None if self._forwarder is None else self._forwarder.stand_in
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {0: asyncio.get_running_loop().create_future()}
        self._over: str | None = None  # limit for which the last processes were ended
        program.end_processes = self._end_processes
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._take)

    async def start(self) -> None:
        """Wait until the box takes commands, and copy its folder."""
        await self._answer(0)
        if self.workdir != HOME:
            made = await self.run(["mkdir", "-p", self.workdir], folder="/", seconds=_COPY_SECONDS)
            if made.code:
                raise ConfigError(f"the folder {self.workdir} can't be made in a sandbox: {last_words_of(made)}")
        if self._spec.folder is not None:
            folder, below = self._spec.folder, self.workdir
            await self._unpack(await in_thread(lambda: archive_of_folder(folder, below)))
        if self._forwarder is not None:
            found = await self._ask({"port": self._forwarder.port}, "listen")
            await self._forwarder.start(found["socket"])

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
        if user is not None:
            raise ConfigError(f"a box of bubblewrap has one user of its own, and can't run as {user!r}")
        output = CommandOutput(self._spec.limits.output_bytes)
        return await self._run(command, input, environment or {}, folder or self.workdir, output, seconds)

    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        """Write files; see `palestra.sandbox.Sandbox`."""
        if not _can_write(folder):
            raise InvalidRequest(f"a box of bubblewrap can write below {' and '.join(_WRITABLE)} only", "folder")
        await self._unpack(await in_thread(lambda: archive_of(files, folder)))

    async def get(self, folder: str, most_bytes: int) -> dict[str, bytes]:
        """Return files; see `palestra.sandbox.Sandbox`."""
        found = await self.archive(folder, most_bytes)
        return await in_thread(lambda: unpacked_files(found, most_bytes))

    async def archive(self, folder: str, most_bytes: int) -> bytes:
        """Return an archive; see `palestra.sandbox.Sandbox`."""
        output = CommandOutput(most_bytes + OVERHEAD_BYTES, 10_000)
        command = ("sh", "-c", 'test -d "$0" && exec tar -c --ignore-failed-read -C "$0" .', folder)
        done = await self._run(command, b"", {}, "/", output, _COPY_SECONDS)
        if done.cut:
            raise folder_too_large(most_bytes)
        if done.timed_out:
            raise EpisodeForfeited(f"the files of a sandbox were not read in {_COPY_SECONDS:g} s")
        return done.output

    async def stop_processes(self) -> None:
        """End all processes; the files stay."""
        await self._ask({}, "stop")

    async def close(self) -> None:
        """End the box and remove it."""
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._fail(EnvironmentFailed("the sandbox is closed"))
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._program.close()

    async def _run(
        self,
        command: Sequence[str],
        input: bytes,
        environment: Mapping[str, str],
        folder: str,
        output: CommandOutput,
        seconds: float | None,
    ) -> Finished:
        """Run a command whose output is read by `output`."""
        variables = VARIABLES | {"PWD": folder} | dict(self._spec.environment) | dict(environment)
        request = {"command": list(command), "variables": variables, "folder": folder, "limits": rlimits(self._limits)}
        number = next(self._numbers)
        with Descriptors() as owned, contextlib.closing(output):
            data, given = json.dumps(request).encode(), owned.add(filled_file(input))
            answer = self._send({"run": number}, (owned.add(filled_file(data)), given, *output.written))
            output.start()
            why, finished = "ended", asyncio.ensure_future(self._code(answer))
            try:
                why = await output.wait(finished, self._spec.limits.seconds if seconds is None else seconds)
                if why != "ended":
                    self._say({"kill": number})
                code = await finished
            except asyncio.CancelledError:
                with contextlib.suppress(EnvironmentFailed, EpisodeForfeited):
                    self._say({"kill": number})
                raise
            finally:
                finished.cancel()
                self._answers.pop(number, None)
        text, errors = map(bytes, output.streams)
        if self._over is not None:
            errors += f"(all processes were ended: {self._over})\n".encode()
            self._over = None
        return Finished(code=code, output=text, errors=errors, timed_out=why == "timeout", cut=why == "cut")

    async def _code(self, answer: asyncio.Future[dict[str, Any]]) -> int:
        return int((await answer)["code"])

    async def _unpack(self, archive: bytes) -> None:
        output = CommandOutput(10_000)
        done = await self._run(("tar", "-x", "-C", "/"), archive, {}, "/", output, _COPY_SECONDS)
        if done.code:
            raise InvalidRequest(f"files can't be written in the sandbox: {last_words_of(done)}", "files")

    async def _ask(self, message: dict[str, Any], kind: str) -> dict[str, Any]:
        number = next(self._numbers)
        self._send({kind: number} | message)
        return await self._answer(number)

    async def _answer(self, number: int) -> dict[str, Any]:
        """Wait for the first process's answer to a message."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await self._answers[number]
        except TimeoutError:
            raise EnvironmentFailed("the sandbox does not answer") from None
        finally:
            self._answers.pop(number, None)

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> asyncio.Future[dict[str, Any]]:
        """Send a message; return what becomes its answer."""
        number = next(iter(message.values()))
        self._say(message, descriptors)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        return answer

    def _say(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            raise self._ending() from error

    def _take(self) -> None:
        """Take an answer of the first process."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
            self._fail(self._ending())
            return
        found: dict[str, Any] = json.loads(data)
        answer = self._answers.get(next(iter(found.values())))
        if descriptors:
            found["socket"] = socket.socket(fileno=descriptors[0])
        if answer is not None and not answer.done():
            answer.set_result(found)
        elif descriptors:
            found["socket"].close()

    def _fail(self, error: Exception) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # it may be that no task waits for it

    def _ending(self) -> Exception:
        """Return why the box takes no commands any more."""
        if self._program.ended_for is not None:
            return EpisodeForfeited(f"the sandbox was ended: {self._program.ended_for}")
        return EnvironmentFailed("the sandbox has ended, or was killed from outside")

    def _end_processes(self, over: str) -> None:
        """End all processes, which are over a limit together."""
        self._over = over
        with contextlib.suppress(EnvironmentFailed, EpisodeForfeited):  # it has ended, or was told often
            self._say({"stop": -1})


def _limits_of(spec: SandboxSpec) -> ProgramLimits:
    limits = spec.limits
    return ProgramLimits(
        memory_mib=limits.memory_mib,
        disk_mib=limits.disk_mib or 1,
        processes=limits.processes,
        cpu_seconds=math.ceil(limits.seconds) * (os.cpu_count() or 1),
    )


def _can_write(folder: str) -> bool:
    path = posixpath.normpath(folder)
    return any(path == top or path.startswith(f"{top}/") for top in _WRITABLE)


@cache
def _inside() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
