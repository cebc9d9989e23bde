"""`ContainerEngine`: podman or docker by its command line, which leaves no box of a dead process behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from palestra.errors import ConfigError, EnvironmentFailed
from palestra.process.child import kept_command
from palestra.process.keeper import process_start, remove_tree
from palestra.sandbox import Finished
from palestra_sandboxes.child import CommandOutput, Descriptors, Program, filled_file, last_words_of

log = logging.getLogger("palestra.sandbox")
PREFIX = "palestra-box-"  # of the names of all boxes; a process's number, start and namespace follow
COMMAND_SECONDS = 120.0  # for one command of the engine: a busy machine starts fifty boxes at once
_MOST_BYTES = 1_000_000
_PAUSES = (0.2, 1.0, 3.0)
_END_SECONDS = 5.0  # from SIGTERM to SIGKILL
_USUAL = 1_048_576  # open files and processes that podman lets a box have, which takes a right of this process
_PROCESSES = 4096  # of a box's user, in place of that: podman lowers its own limit, and can't give more than it has
_RAISE_LIMITS = 1 << 24  # CAP_SYS_RESOURCE
# Waits for the end of the owner, which keeps the other end of the pipe, and removes its boxes. Some may still come: a
# client that starts a box runs on.
_WATCH = """trap '' INT HUP TERM; cat > /dev/null
for pause in 0 2 5; do sleep $pause; "$0" ps -aq --filter "name=^$1" | xargs -r "$0" rm -f -v $2; done"""


class ContainerEngine:
    """Podman or docker.

    Attributes:
        program: path of its command.
        is_podman: whether it takes the options of podman.
        limits: options of a new box, where podman's usual limits of a process can't be had, as in a container.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self.is_podman = Path(program).name == "podman"
        nested = self.is_podman and not _may_have_usual_limits()
        self.limits = _own_limits() if nested else ()
        runc = shutil.which("runc") if nested else None
        self._options = () if runc is None else ("--runtime", runc)  # crun fails there, with any limits
        self._boxes, self._looked = 0, False
        self._watching: subprocess.Popen[bytes] | None = None
        self._lifeline = -1

    @property
    def is_local(self) -> bool:
        """Return whether this process is root, and boxes run on this machine, so that it sees their files."""
        remote = "CONTAINER_HOST" if self.is_podman else "DOCKER_HOST"
        return os.geteuid() == 0 and not os.environ.get(remote)

    async def ask(
        self,
        *arguments: str,
        input: bytes = b"",
        most: int = _MOST_BYTES,
        seconds: float = COMMAND_SECONDS,
        tail: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> Finished:
        """Run one command of the engine.

        Args:
            most: bytes of its output, after which it is ended.
            tail: whether the end of the output is kept in place of its beginning, and it may write any number of bytes.
        """
        output = CommandOutput(most, ends=tail)
        with contextlib.closing(output):
            client = self.start(arguments, input, output, pass_fds)
            try:
                why = await output.wait(client.ended, seconds)
            finally:
                await end(client)
            text, errors = map(bytes, output.streams)
            return Finished(
                code=await client.wait(), output=text, errors=errors, timed_out=why == "timeout", cut=why == "cut"
            )

    def start(
        self, arguments: Sequence[str], input: bytes, output: CommandOutput, pass_fds: Sequence[int] = ()
    ) -> Program:
        """Start one command of the engine, whose output is read by `output`."""
        command, variables = [self.program, *self._options, *arguments], dict(os.environ)
        with Descriptors() as owned:
            lifeline = None
            if arguments[0] == "build":  # its steps end also if this process is killed
                theirs, lifeline = owned.pipe()
                command, pass_fds = kept_command(theirs, 1.0, command), (*pass_fds, theirs)
                lifeline = os.dup(lifeline)
            kept = None
            if input:  # podman leaves a copy of what it copies among its temporary files
                parent = variables.get("TMPDIR", "/var/tmp" if self.is_podman else None)
                variables["TMPDIR"] = kept = tempfile.mkdtemp(prefix="palestra-copy-", dir=parent)

            def clean(_: object) -> None:
                if lifeline is not None:
                    os.close(lifeline)
                if kept is not None:
                    remove_tree(kept)

            client = Program.start(
                command,
                streams=(owned.add(filled_file(input)), *output.written),
                pass_fds=pass_fds,
                variables=variables,
                folder="/proc",  # its monitor writes a file where it starts when memory ends, and can't here
            )
            client.ended.add_done_callback(clean)
            output.start()
            return client

    async def new_name(self) -> str:
        """Return the name of a new box, which `forget` gives back. Boxes of dead processes are removed before the
        first one, and this process's boxes whenever it ends.
        """
        if not self._looked:
            self._looked = True
            await self.remove_orphans()
        self._boxes += 1
        if self._watching is None:
            self._watch()
        return f"{PREFIX}{owner()}-{secrets.token_hex(6)}"

    async def remove(self, name: str) -> None:
        """Remove a box, if there is one of this name."""
        for pause in _PAUSES:
            done = await self.ask("rm", "-f", "-v", *self._at_once(), name)
            if not done.code or b"o such container" in done.errors:
                break
            await asyncio.sleep(pause)  # its mounts are busy while it ends
        else:
            log.warning("the box %s can't be removed: %s", name, last_words_of(done))
        self._boxes -= 1
        if not self._boxes and self._watching is not None:
            os.close(self._lifeline)
            self._watching.kill()
            self._watching.wait()
            self._watching = None

    async def remove_orphans(self) -> None:
        """Remove the boxes of processes that have ended without removing them."""
        listed = await self.ask("ps", "-a", "--filter", f"name=^{PREFIX}", "--format", "{{.Names}}")
        orphans = [name for name in listed.output.decode().split() if _is_orphan(name)]
        if orphans:
            log.warning("%d boxes of processes that were killed are removed", len(orphans))
            done = await self.ask("rm", "-f", "-v", *self._at_once(), *orphans)
            if done.code:
                log.warning("not all of these boxes can be removed: %s", last_words_of(done))

    def _at_once(self) -> tuple[str, ...]:
        return ("-t", "0") if self.is_podman else ()

    def _watch(self) -> None:
        """Start what removes the boxes of this process when it is killed."""
        theirs, self._lifeline = os.pipe()
        command = ["sh", "-c", _WATCH, self.program, f"{PREFIX}{owner()}-", " ".join(self._at_once())]
        self._watching = subprocess.Popen(
            command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.close(theirs)


async def end(client: Program) -> None:
    """End a command of an engine, unless it has ended."""
    if client.returncode is not None:
        return
    client.terminate()
    await asyncio.wait((client.ended,), timeout=_END_SECONDS)
    if client.returncode is None:
        client.kill()
    await client.wait()


def owner() -> str:
    """Return what names this process, also after its end: its number, the time of its start, and its namespace."""
    return f"{os.getpid()}-{process_start(os.getpid())}-{_namespace()}"


@cache
def find_engine() -> ContainerEngine:
    """Return podman, or docker if its daemon answers.

    Raises:
        ConfigError: there is neither.
    """
    if (podman := shutil.which("podman")) is not None:
        return ContainerEngine(podman)
    if (docker := shutil.which("docker")) is None:
        raise ConfigError("a box with an image needs podman or docker; run: apt-get install podman")
    known = subprocess.run([docker, "version"], capture_output=True, check=False, timeout=COMMAND_SECONDS)
    if known.returncode:
        raise ConfigError("docker is installed, and its daemon does not answer; start it, or: apt-get install podman")
    return ContainerEngine(docker)


def _is_orphan(name: str) -> bool:
    """Return whether a box belonged to a process of this namespace that has ended."""
    parts = name.removeprefix(PREFIX).split("-")
    if len(parts) != 4 or parts[2] != str(_namespace()):
        return False
    return process_start(int(parts[0])) != int(parts[1])


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _may_have_usual_limits() -> bool:
    """Return whether podman can give a box its usual limits of a process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    rights = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    given = (resource.getrlimit(one)[1] for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    enough = all(one == resource.RLIM_INFINITY or one >= _USUAL for one in given)
    return enough or bool(int(rights, 16) & _RAISE_LIMITS) or os.geteuid() != 0


def _own_limits() -> tuple[str, ...]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return ("--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={_PROCESSES}:{_PROCESSES}")


def check_answer(done: Finished, what: str) -> None:
    """Raise EnvironmentFailed if a command of the engine has failed. `what`: what it was to do."""
    if done.timed_out:
        raise EnvironmentFailed(f"{what}: the container engine does not answer")
    if done.code:
        raise EnvironmentFailed(f"{what}: {last_words_of(done)}")
