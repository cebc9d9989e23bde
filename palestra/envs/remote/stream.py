"""Numbered messages over connections that break: each message is handled once, in the order in which it was sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import orjson

from palestra.errors import Conflict, InvalidRequest, PayloadTooLarge
from palestra.types.env_wire import MAX_FRAME_MESSAGES, Numbered

Message = TypeVar("Message", bound=Numbered)
MAX_UNACKNOWLEDGED = 10_000  # messages; one side that never acknowledges must not fill the other side's memory


class MessageStream:
    """One side of a session's messages, which outlives the connections that carry them.

    A message is kept until the other side acknowledges its number, and sent again over every new connection; one that
    arrives twice is dropped. So a message is handled once as long as both processes live, wherever a connection breaks.
    """

    def __init__(self, max_message_bytes: int) -> None:
        """Create a stream on which nothing was sent or received.

        Args:
            max_message_bytes: the longest message that is sent.
        """
        self._max = max_message_bytes
        self._kept: deque[bytes] = deque()  # encoded messages that are not acknowledged, oldest first
        self._acknowledged = 0  # number of the last message that the other side has
        self.received = 0  # number of the last message of the other side

    @property
    def sent(self) -> int:
        """Return the number of the last message."""
        return self._acknowledged + len(self._kept)

    @property
    def acknowledged(self) -> int:
        """Return the number of the last message that the other side has."""
        return self._acknowledged

    def add(self, message: dict[str, Any]) -> int:
        """Append a message to those that are sent, and return its number.

        Args:
            message: its fields without `number`, as JSON.

        Raises:
            InvalidRequest: the message is no JSON: a lone surrogate, an integer of more than 64 bits, another type.
            PayloadTooLarge: the message is too long, or too many wait for an acknowledgement.
        """
        number = self.sent + 1
        try:
            encoded = orjson.dumps({"number": number, **message})
        except TypeError as error:
            raise InvalidRequest(f"a {message.get('type')} can't be sent as JSON: {error}") from error
        if len(encoded) > self._max:
            raise PayloadTooLarge(f"a {message.get('type')} of {len(encoded)} bytes is over the limit of {self._max}")
        if len(self._kept) >= MAX_UNACKNOWLEDGED:
            raise PayloadTooLarge(f"{MAX_UNACKNOWLEDGED} messages wait for an acknowledgement")
        self._kept.append(encoded)
        return number

    def acknowledge(self, number: int) -> None:
        """Forget the messages that the other side has. A number that is lower than an earlier one changes nothing.

        Raises:
            InvalidRequest: no message with this number was sent.
        """
        if number > self.sent:
            raise InvalidRequest(f"message {number} is acknowledged, and the last one that was sent is {self.sent}")
        while self._acknowledged < number:
            self._kept.popleft()
            self._acknowledged += 1

    def resume(self, number: int) -> None:
        """Acknowledge what the other side has at the beginning of a connection.

        Args:
            number: of the last message that it has.

        Raises:
            Conflict: it has forgotten messages that it had acknowledged, so it is not the process that began.
            InvalidRequest: no message with this number was sent.
        """
        if number < self._acknowledged:
            raise Conflict(
                f"the connection goes on after message {number}, and messages up to {self._acknowledged} were "
                "acknowledged and are gone; begin a new session"
            )
        self.acknowledge(number)

    def accept(self, messages: Sequence[Message]) -> Iterable[Message]:
        """Yield the messages that have not been received before; each counts as received when it is yielded.

        Raises:
            InvalidRequest: a number is left out.
        """
        for message in messages:
            if message.number <= self.received:
                continue
            if message.number != self.received + 1:
                raise InvalidRequest(f"message {message.number} came after message {self.received}")
            self.received = message.number
            yield message

    def frame(self, after: int) -> tuple[bytes, int]:
        """Return the next frame to send, and the number of its last message.

        Args:
            after: number of the last message that this connection has carried.
        """
        start = max(after, self._acknowledged) - self._acknowledged
        chosen: list[bytes] = []
        size = 0
        for place in range(start, len(self._kept)):
            size += len(self._kept[place])
            if chosen and (size > self._max or len(chosen) == MAX_FRAME_MESSAGES):
                break
            chosen.append(self._kept[place])
        last = self._acknowledged + start + len(chosen)
        return b'{"ack":%d,"messages":[%b]}' % (self.received, b",".join(chosen)), last
