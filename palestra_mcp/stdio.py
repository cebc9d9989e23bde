"""MCP over standard input and output: a process of our own, one message a line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import orjson

from palestra.errors import EnvironmentFailed
from palestra.process.child import kept_command, kept_ending
from palestra.waiting import cancelled
from palestra_mcp.connection import Message, Transport

# What a server's process gets of the environment of this one, which may hold keys.
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
EXIT_SECONDS = 1.0  # for the server to end by itself when its input is closed
_KILLED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
KEPT_BYTES = 2_000  # of what the server wrote to standard error, for the message that it has ended
STDERR_SECONDS = 0.01  # after each look at standard error: a server that writes without a pause takes no core of ours


class StdioTransport(Transport):
    """A server started here; its process group ends with this process, however that ends."""

    ended_by_itself = True

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], folder: Path | None, max_message_bytes: int
    ) -> None:
        """Store the command; `start` runs it. `folder` is the server's working directory; None: this process's."""
        self.where = f"the MCP server `{' '.join(command)}`"
        self._command, self._variables, self._folder = command, variables, folder
        self._max_bytes = max_message_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._said = b""

    async def start(self, receive: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Run the command and read its output."""
        ours = {name: os.environ[name] for name in INHERITED if name in os.environ}
        theirs, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *kept_command(theirs, GRACE_SECONDS, self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=self._max_bytes,
                env={**ours, **self._variables},
                cwd=self._folder,
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C at a terminal is for Palestra, which then ends the server
            )
        except OSError as error:
            self._hang_up()
            raise EnvironmentFailed(f"{self.where} can't be started: {error.strerror}") from error
        finally:
            os.close(theirs)
        self._reading = [
            asyncio.create_task(self._read(self._process, receive, lost)),
            asyncio.create_task(self._listen(self._process)),
        ]

    async def send(self, message: Message) -> None:
        """Write a line."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(orjson.dumps(message) + b"\n")
            await process.stdin.drain()
        except (OSError, RuntimeError) as error:  # a pipe without a reader, or one that is closed
            raise EnvironmentFailed(await self._how_ended(process)) from error

    async def close(self) -> None:
        """Close the server's input, wait a little, then end its process group."""
        process = self._process
        if process is None:
            return
        self._process = None
        try:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await process.wait()
        finally:
            self._hang_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * GRACE_SECONDS):
                    await process.wait()
                    await asyncio.wait(self._reading)  # until the pipes end
            await cancelled(*self._reading)
            # Closes the pipes that a process has kept which left the group. asyncio has no public way.
            process._transport.close()  # type: ignore[attr-defined]

    def _hang_up(self) -> None:
        """Close the pipe that the keeper watches."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def _read(
        self,
        process: asyncio.subprocess.Process,
        receive: Callable[[Message], None],
        lost: Callable[[str], None],
    ) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                if isinstance(message := orjson.loads(line) if line.strip() else {}, dict):
                    receive(message)
        except EnvironmentFailed:  # the session is lost
            pass
        except orjson.JSONDecodeError:
            lost(f"{self.where} writes to standard output what is no message of MCP: {line[:80]!r}")
        except ValueError:  # what `readline` raises over its limit
            lost(f"{self.where} has sent a message of more than {self._max_bytes:,} bytes")
        else:
            lost(await self._how_ended(process))
        self._hang_up()  # nothing that it writes is read any more

    async def _how_ended(self, process: asyncio.subprocess.Process) -> str:
        """Describe how a server with a closed pipe has ended, with the end of its output."""
        ending, how = asyncio.ensure_future(process.wait()), "has ended"
        await asyncio.wait((ending, *self._reading[1:]), timeout=EXIT_SECONDS, return_when=asyncio.ALL_COMPLETED)
        if ending.done():
            how = kept_ending(ending.result())
            self.ended_by_itself = ending.result() not in _KILLED
        await cancelled(ending)
        return f"{self.where} {how}{self._last_words()}"

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read standard error, so that the server never waits for it, and keep the end."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(65_536):
            self._said = (self._said + chunk)[-KEPT_BYTES:]
            await asyncio.sleep(STDERR_SECONDS)

    def _last_words(self) -> str:
        lines = self._said.decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()[:300]}" if lines else ""
