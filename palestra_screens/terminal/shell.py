"""`Shell`: bash on a pseudo-terminal in a sandbox, for one command after another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import termios
import time
from collections.abc import Mapping

from palestra.errors import EnvironmentFailed
from palestra.terminal import printable
from palestra.tools import BadArguments
from palestra_sandboxes.bubblewrap.program import ProgramLimits, SandboxedProgram, start_program
from palestra_sandboxes.child import Descriptors

# CSI, OSC and the other strings (ended by BEL or ST), escape with one more character.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?", re.DOTALL)


def plain_text(written: str) -> str:
    """Return a terminal's output without colours, titles and cursor movements.

    A carriage return restarts its line, as for progress bars, and a backspace removes a character. Other control
    characters are replaced by their control pictures.
    """
    text = _ESCAPES.sub("", written).replace("\r\n", "\n")
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return printable(_without_backspaces(text) if "\b" in text else text)


def _without_backspaces(text: str) -> str:
    """Apply each backspace to the character before it, unless that ends a line."""
    kept: list[str] = []
    for character in text:
        if character == "\b" and kept and kept[-1] not in "\n\b":
            kept.pop()
        else:
            kept.append(character)
    return "".join(kept)


class Output:
    """The beginning and the end of a program's output, however long it is."""

    def __init__(self, most: int) -> None:
        """Begin empty. `most`: number of bytes to keep of the beginning, and of the end."""
        self._most = most
        self._head, self._tail, self._count = bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        """Add further output."""
        self._count += len(chunk)
        room = self._most - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 4 * self._most:
            del self._tail[: -self._most]

    def take(self) -> str:
        """Return the output as plain text, with the number of missing bytes, and begin again."""
        head, tail, count = bytes(self._head), bytes(self._tail[-self._most :]), self._count
        self._head, self._tail, self._count = bytearray(), bytearray(), 0
        missing = count - len(head) - len(tail)
        if not missing:
            return plain_text((head + tail).decode(errors="replace"))
        first, last = (plain_text(part.decode(errors="replace")) for part in (head, tail))
        return f"{first}\n… ({missing:,} bytes are left out) …\n{last}"


_KEPT_BYTES = 4000  # of the beginning of a command's output, and again of its end
_CHUNK = 65_536
_MAX_BYTES = 128 << 20  # that are read for one action; a program that writes more waits for the next action
_BETWEEN_BYTES = 1 << 20  # that are read between two actions
_START_SECONDS = 30.0
_QUIET_SECONDS = 0.02  # without output after which a command that has ended has written all
_KEYS = {"enter": "\n", "tab": "\t", "escape": "\x1b", "up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C"}
_KEYS |= {"left": "\x1b[D", "backspace": "\x7f", "space": " "}
MAX_COMMAND = 8000  # characters of a command: it has to fit into a pipe


class Shell:
    """A shell in a sandbox. An agent's action that ends it, such as `exit`, is not a failure."""

    def __init__(
        self, sandbox: SandboxedProgram, owned: Descriptors, *, terminal: int, status: int, commands: int, take: str
    ) -> None:
        """Take a started shell; `start_shell` starts one. `status`: pipe with the exit code of each command.
        `commands`: pipe from which the shell reads commands. `take`: typed text that makes it read one.
        """
        self.sandbox = sandbox
        self._owned, self._terminal, self._status, self._commands = owned, terminal, status, commands
        self._output, self._codes, self._code, self._take = Output(_KEPT_BYTES), b"", "0", take
        self._busy = True  # whether a command, at first the start of bash, has not ended
        self._news, self._ended = asyncio.Event(), False
        self._unread = _MAX_BYTES  # that may still be read before the next action
        self._sources = {terminal: self._take_output, status: self._take_status}  # that have not come to their end
        for descriptor in (commands, *self._sources):
            os.set_blocking(descriptor, False)

    async def run(self, command: str, seconds: float) -> str:
        """Run a command and return its output, with its exit code if that is not 0.

        Args:
            seconds: how long to wait for its end; it continues afterwards.

        Raises:
            BadArguments: the previous command has not ended, or the shell accepts no commands any more.
        """
        if not self.sandbox.running:
            return self._ending()
        if self._busy:
            raise BadArguments("the last command has not ended; send it keys, such as C-c")
        self._hand_over(command[:MAX_COMMAND].encode(errors="replace").replace(b"\0", b"") + b"\0")
        self._busy = True
        self._send(self._take + "\n")
        return await self._wait(seconds)

    async def keys(self, keys: str, seconds: float) -> str:
        """Send keys to the running program, and return its output. `keys`: a name (`Enter`, `C-c`, `Up`), or text."""
        if not self.sandbox.running:
            return self._ending()
        name = keys.strip().lower()
        control = name[:2] == "c-" and len(name) == 3 and name[2].isascii() and name[2].isalpha()
        self._send(chr(ord(name[2]) & 31) if control else _KEYS.get(name, keys))
        return await self._wait(seconds)

    async def started(self) -> None:
        """Wait until bash accepts commands."""
        said = await self._wait(_START_SECONDS)
        if self._busy or not self.sandbox.running:
            raise EnvironmentFailed(f"bash did not start in its sandbox: {said}")

    async def end(self) -> None:
        """Kill everything in the sandbox; its files can be read until `close`."""
        if not self._ended:
            self._ended = True
            self._stop_reading()
            self._owned.close_all()
        await self.sandbox.end()

    async def close(self) -> None:
        """Kill everything in the sandbox, and remove its files."""
        await self.end()
        await self.sandbox.close()

    def check_alive(self) -> None:
        """Check that the sandbox was not ended from outside."""
        code = self.sandbox.process.returncode
        if code is not None and code < 0 and not self._ended:
            raise EnvironmentFailed(f"the sandbox was killed from outside, by signal {-code}")

    async def _wait(self, seconds: float) -> str:
        """Wait for the end of the command, or of the shell, and return the output."""
        self._unread = _MAX_BYTES
        for descriptor, take in self._sources.items():
            asyncio.get_running_loop().add_reader(descriptor, take, descriptor)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._busy and self.sandbox.running and self._unread > 0:
                    self._news.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.1):  # the end of the shell brings no news
                            await self._news.wait()
        await self._quiet()
        text, state = self._output.take().rstrip("\n"), self._state()
        self._unread = min(self._unread, _BETWEEN_BYTES)
        return f"{text}\n{state}".strip("\n")

    async def _quiet(self) -> None:
        """Wait until the terminal has no more output: the kernel delivers it with a delay."""
        end, unread = time.monotonic() + 1, None
        while unread != self._unread and time.monotonic() < end:
            unread = self._unread
            await asyncio.sleep(_QUIET_SECONDS)

    def _state(self) -> str:
        """Describe the shell's state; "": its command has ended with exit code 0."""
        if not self.sandbox.running:
            return self._ending()
        if self._busy:
            waits = "" if self._unread > 0 else f"; it has written {_MAX_BYTES >> 20} MiB, and waits for the next keys"
            return f"(still running{waits})"
        return "" if self._code == "0" else f"(exit code {self._code})"

    def _ending(self) -> str:
        reason = self.sandbox.ended_for
        return "(the terminal has ended" + (f": {reason})" if reason else ")")

    def _hand_over(self, command: bytes) -> None:
        """Write a command into the pipe, without blocking: programs in the sandbox can shrink the pipe."""
        try:
            taken = os.write(self._commands, command)
        except BlockingIOError:
            taken = 0
        if taken < len(command):
            raise BadArguments("the shell does not take commands any more; send it keys, such as C-c")

    def _send(self, text: str) -> None:
        with contextlib.suppress(BlockingIOError):  # the program reads nothing, and the terminal holds no more
            os.write(self._terminal, text.encode(errors="replace"))

    def _take_output(self, descriptor: int) -> None:
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # the last program that had the terminal open has ended
            chunk = b""
        self._output.add(chunk)
        self._took(descriptor, chunk)

    def _take_status(self, descriptor: int) -> None:
        chunk = os.read(descriptor, _CHUNK)
        self._codes = (self._codes + chunk)[-64:]
        if b"\n" in chunk:
            said = self._codes.split()  # nothing, where a program in the sandbox writes empty lines
            self._code = said[-1].decode(errors="replace")[:3] if said else "?"
            self._busy = False
            self._news.set()
        self._took(descriptor, chunk)

    def _took(self, descriptor: int, chunk: bytes) -> None:
        """Count what was read, and stop at the end or at the limit."""
        self._unread -= len(chunk)
        if self._unread <= 0:
            self._stop_reading()
            self._news.set()
        elif not chunk:
            asyncio.get_running_loop().remove_reader(descriptor)
            del self._sources[descriptor]

    def _stop_reading(self) -> None:
        for descriptor in self._sources:
            asyncio.get_running_loop().remove_reader(descriptor)


async def start_shell(files: Mapping[str, bytes], limits: ProgramLimits) -> Shell:
    """Start bash on a pseudo-terminal in a new sandbox, and wait until it accepts commands.

    Commands come through a pipe instead of the terminal, where a line cannot exceed 4,096 bytes and an open quote would
    block bash. Exit codes come back through another pipe.
    """
    owned = Descriptors()
    try:
        terminal, program_end = map(owned.add, pty.openpty())
        (status, status_in), (commands_out, commands) = owned.pipe(), owned.pipe()
        _make_plain(program_end)
        bash = (
            *("env", f"PROMPT_COMMAND=echo $? >&{status_in}", "PS1=", "PS2="),
            *("setsid", "--ctty", "bash", "--noprofile", "--norc", "--noediting", "-i"),
        )
        inherited = (status_in, commands_out)
        sandbox = await start_program(bash, files, limits, stdin=program_end, stdout=program_end, pass_fds=inherited)
        owned.close(program_end, *inherited)
    except BaseException:
        owned.close_all()
        raise
    take = f"IFS= read -r -d '' -u {commands_out} REPLY && eval \"$REPLY\""
    shell = Shell(sandbox, owned, terminal=terminal, status=status, commands=commands, take=take)
    try:
        await shell.started()
    except BaseException:
        await shell.close()
        raise
    return shell


def _make_plain(terminal: int) -> None:
    """Give a terminal 24 lines of 80 columns, without echo."""
    termios.tcsetwinsize(terminal, (24, 80))
    modes = termios.tcgetattr(terminal)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
