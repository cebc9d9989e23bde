"""Messages between a job and an engine worker: many in one frame, over a stream that only these two have."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

from palestra.backend.frames import Frame, read_frame, write_frame

_LENGTH = struct.Struct("<I")


class Channel:
    """Sends and receives messages in order.

    All messages of one turn of the event loop travel in one frame: a forward pass gives every running reply a token,
    and a frame for each of them would cost more than the token's share of the pass.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, sends_json: bool = False) -> None:
        """Use a connection.

        Args:
            sends_json: whether what is sent is JSON, without arrays and records.
        """
        self._reader, self._writer, self._sends_json = reader, writer, sends_json
        self._due: list[Mapping[str, Any]] = []

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message with the other messages of this turn of the event loop; see `write_frame`."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(message)

    def _flush(self) -> None:
        due, self._due = self._due, []
        if due and not self._writer.is_closing():
            data = write_frame({"messages": due}, is_json=self._sends_json)
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield what arrives, a frame of messages at a time, until the other side has gone.

        Raises:
            InvalidRequest: the bytes are no message.
        """
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                data = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError):
                return
            yield read_frame(data)

    async def drain(self) -> None:
        """Return when what was sent has left this process, or can't."""
        self._flush()
        try:
            await self._writer.drain()
        except OSError:
            return

    def close(self) -> None:
        """End the connection; the other side learns of it."""
        self._writer.close()
