"""`Display`: a screen without a monitor (Xvfb) with one window, in a sandbox of its own, and its picture as PNG."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited
from palestra_sandboxes.bubblewrap import program
from palestra_sandboxes.bubblewrap.program import ProgramLimits, SandboxedProgram, start_program
from palestra_sandboxes.child import Descriptors, readable

_PROGRAM = Path(__file__).parent / "window.py"
_TKINTER = "python3*/lib-dynload/_tkinter*.so"  # of the machine's own Python, below /usr/lib
_MAX_ANSWER = 4 << 20  # bytes
_CHUNK = 65_536


def check_desktop() -> None:
    """Check that a sandbox on this machine has what a desktop needs."""
    missing = [name for name in ("Xvfb", "xdotool") if shutil.which(name, path="/usr/bin:/bin") is None]
    if not any(Path("/usr/lib").glob(_TKINTER)):
        missing.append("tkinter")
    if missing:
        raise ConfigError(
            f"this environment needs {', '.join(missing)} in /usr; run: apt-get install xvfb xdotool python3-tk"
        )
    program.check_bubblewrap()


class Display:
    """A screen with a window. Everything with access to the screen runs in one sandbox, which ends
    with this process.
    """

    def __init__(
        self, box: SandboxedProgram, owned: Descriptors, *, requests: int, answers: int, size: tuple[int, int]
    ) -> None:
        """Take a started screen; `start_display` starts one. `requests`: pipe for lines of JSON to the window's
        program. `answers`: pipe with its answers, a line each.
        """
        self._box, self._owned, self._requests, self._answers, self._size = box, owned, requests, answers, size

    def check_alive(self) -> None:
        """Check that the screen and the window are running."""
        if self._box.running:
            return
        code = self._box.process.returncode
        if code is not None and code < 0:
            raise EnvironmentFailed(f"the screen was killed from outside, by signal {-code}")
        reason = f": {self._box.ended_for}" if self._box.ended_for else ""
        raise EpisodeForfeited(f"the screen, or the window on it, has ended{reason}")

    async def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of the window's program to a request; see `window.py`. `request`: `{}` for the window's
        state, or one of its keys.
        """
        self.check_alive()
        try:
            async with asyncio.timeout(seconds):
                os.write(self._requests, json.dumps(request).encode() + b"\n")
                line = await self._line()
                if not line:  # it has ended: wait until it is known how
                    await self._box.process.wait()
            found: dict[str, Any] = json.loads(line)
        except (TimeoutError, ValueError, OSError) as error:
            self.check_alive()
            raise EpisodeForfeited("the window does not answer") from error
        return found

    async def screenshot(self, seconds: float) -> bytes:
        """Return a screenshot, as PNG."""
        try:
            return png_of_xwd(base64.b64decode((await self.ask({"picture": True}, seconds))["picture"]), self._size)
        except (KeyError, struct.error, binascii.Error) as error:
            raise EpisodeForfeited(f"the screen has no picture: {error}") from error

    async def close(self) -> None:
        """End the screen with everything that has access to it."""
        self._owned.close_all()
        await self._box.close()

    async def _line(self) -> bytes:
        found = bytearray()
        while not found.endswith(b"\n") and len(found) < _MAX_ANSWER:
            await readable(asyncio.get_running_loop(), self._answers)
            if not (chunk := os.read(self._answers, _CHUNK)):
                break
            found += chunk
        return bytes(found)


async def start_display(window: Mapping[str, Any], size: tuple[int, int]) -> Display:
    """Start a screen with a window. `size` is its width and height in pixels."""
    check_desktop()
    owned = Descriptors()
    try:
        (asked, requests), (answers, answered) = owned.pipe(), owned.pipe()
        command = ("/usr/bin/python3", "-I", _PROGRAM.name, json.dumps({**window, "size": size}), str(answered))
        box = await start_program(
            command,
            {_PROGRAM.name: _PROGRAM.read_bytes()},
            ProgramLimits(),
            stdin=asked,
            stdout=subprocess.DEVNULL,
            pass_fds=(answered,),
        )
        owned.close(asked, answered)
    except BaseException:
        owned.close_all()
        raise
    return Display(box, owned, requests=requests, answers=answers, size=size)


def png_of_xwd(dump: bytes, size: tuple[int, int]) -> bytes:
    """Convert an X window dump to PNG. `dump`: 32 bits a pixel, as Xvfb writes it at a depth of 24 bits. Raises
    struct.error if the dump is too short, or of another size.
    """
    fields = struct.unpack(">25I", dump[:100])
    if (fields[4], fields[5]) != size:
        raise struct.error(f"the picture has the size {fields[4]} x {fields[5]}")
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
