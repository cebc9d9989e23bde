"""`Display`: a screen without a monitor (Xvfb), its picture as PNG, and programs that see it and no other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import struct
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from palestra.envs.terminal.descriptors import Descriptors, read
from palestra.errors import ConfigError, EnvironmentFailed

_START_SECONDS = 30.0
_END_SECONDS = 5.0
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes: such signals come from outside
_ANY_ADDRESS = 0xFFFF  # in an authority file: the cookie is for every display
_COOKIE = b"MIT-MAGIC-COOKIE-1"


def check_installed() -> None:
    """Check that this machine has what a desktop needs.

    Raises:
        ConfigError: something is missing.
    """
    missing = [name for name in ("Xvfb", "xdotool", "setpriv") if shutil.which(name) is None]
    if find_spec("_tkinter") is None:
        missing.append("tkinter")
    if missing:
        raise ConfigError(
            f"this environment needs {', '.join(missing)}; run: apt-get install xvfb xdotool util-linux python3-tk"
        )


class Display:
    """A screen of its own, with a cookie that only its programs know; its processes end with this one."""

    def __init__(self, server: asyncio.subprocess.Process, folder: TemporaryDirectory[str], number: int) -> None:
        """Take a screen that has been started; `start_display` starts one.

        Args:
            server: Xvfb's process.
            folder: with the cookie, and the picture that Xvfb draws in.
            number: of the display.
        """
        self._server, self._folder = server, folder
        self._variables = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "DISPLAY": f":{number}",
            "XAUTHORITY": f"{folder.name}/authority",
            "LANG": "C.UTF-8",
        }

    @property
    def exit_code(self) -> int | None:
        """Return how the screen has ended, as a process of asyncio has it; None: it is there."""
        return self._server.returncode

    async def start(self, command: Sequence[str], **settings: Any) -> asyncio.subprocess.Process:
        """Start a program that sees the screen, and ends with this process.

        Args:
            command: the program, with its arguments.
            **settings: of `asyncio.create_subprocess_exec`.
        """
        return await asyncio.create_subprocess_exec(
            "setpriv", "--pdeathsig", "KILL", *command, env=self._variables, start_new_session=True, **settings
        )

    def screenshot(self) -> bytes:
        """Return what the screen shows, as PNG.

        Raises:
            EnvironmentFailed: the screen is gone.
        """
        try:
            return png_of_xwd(Path(self._folder.name, "Xvfb_screen0").read_bytes())
        except (OSError, struct.error) as error:
            raise EnvironmentFailed(f"the screen has no picture: {error}") from error

    async def close(self) -> None:
        """End the screen; programs that see it end as well."""
        await end(self._server)
        self._folder.cleanup()


async def start_display(width: int, height: int) -> Display:
    """Start a screen of its own.

    Args:
        width: in pixels.
        height: in pixels.

    Raises:
        ConfigError: Xvfb is not installed.
        EnvironmentFailed: Xvfb does not start.
    """
    check_installed()
    folder = TemporaryDirectory(prefix="palestra-display-")
    authority = _write_cookie(Path(folder.name))
    with Descriptors() as ours:
        numbers, written = ours.pipe()
        server = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", "Xvfb", "-displayfd", str(written), "-nolisten", "tcp"),
            *("-screen", "0", f"{width}x{height}x24", "-auth", str(authority), "-fbdir", folder.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(written,),
            start_new_session=True,
        )
        ours.close(written)
        try:
            async with asyncio.timeout(_START_SECONDS):
                number = int(await read(numbers))
        except (TimeoutError, ValueError) as error:
            await end(server)
            folder.cleanup()
            raise EnvironmentFailed(f"Xvfb does not start; it ended with {server.returncode}") from error
    return Display(server, folder, number)


def _write_cookie(folder: Path) -> Path:
    """Write a new cookie in the format of Xauthority, into a folder that only this user can read; return its path."""
    parts = (b"", b"", _COOKIE, secrets.token_bytes(16))  # address, display, name of the method, the cookie
    path = folder / "authority"
    path.write_bytes(struct.pack(">H", _ANY_ADDRESS) + b"".join(struct.pack(">H", len(part)) + part for part in parts))
    return path


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process, and wait until it is gone."""
    for stop in (process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
                return


def png_of_xwd(dump: bytes) -> bytes:
    """Return a picture in the format of X's window dumps as PNG.

    Args:
        dump: 32 bits a pixel, as Xvfb writes it at a depth of 24 bits.

    Raises:
        struct.error: the dump is too short.
    """
    fields = struct.unpack(">25I", dump[:100])
    begin, width, height, line_bytes, colours = fields[0], fields[4], fields[5], fields[12], fields[19]
    first = begin + 12 * colours
    little = fields[7] == 0  # the order of bytes in a pixel
    rows = []
    for row in range(height):
        line = dump[first + row * line_bytes :][: 4 * width]
        red, green, blue = (line[place::4] for place in ((2, 1, 0) if little else (1, 2, 3)))
        pixels = bytearray(3 * width)
        pixels[0::3], pixels[1::3], pixels[2::3] = red, green, blue
        rows.append(b"\0" + bytes(pixels))  # 0: the row is stored as it is
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(rows))),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
