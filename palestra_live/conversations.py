"""Finds the open session that a call without a name continues: its messages begin with a call of it and the reply."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

from palestra.session.history import Sameness, message_key
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage


class Conversations:
    """The calls of open sessions, by digests of their messages and replies.

    Attributes:
        sameness: changes of a reply that are ignored when a client sends it back.
    """

    def __init__(self, sameness: Sameness) -> None:
        self.sameness = sameness
        self._sessions: dict[bytes, str] = {}
        self._digests: defaultdict[str, list[bytes]] = defaultdict(list)  # by session

    def __len__(self) -> int:
        """Return the number of sessions that have calls."""
        return len(self._digests)

    def add(self, session_id: str, subject: str | None, chat: Chat) -> None:
        """Add a call of a session. If another session has an equal one, the newest counts."""
        if not chat.is_raw:
            *_, digest = self._prefixes(subject, (*chat.messages, chat.reply))
            self._sessions[digest] = session_id
            self._digests[session_id].append(digest)

    def find(self, subject: str | None, messages: Sequence[ChatMessage]) -> str | None:
        """Return the session of the longest call that the messages continue; None: they continue no call."""
        prefixes = reversed(list(self._prefixes(subject, messages)))
        return next((self._sessions[digest] for digest in prefixes if digest in self._sessions), None)

    def remove(self, session_id: str) -> None:
        """Forget a session, which is over."""
        for digest in self._digests.pop(session_id, ()):
            if self._sessions.get(digest) == session_id:
                del self._sessions[digest]

    def _prefixes(self, subject: str | None, messages: Sequence[ChatMessage]) -> Iterator[bytes]:
        """Yield a digest of the messages up to each one of the assistant."""
        digest = hashlib.blake2b(repr(subject).encode(), digest_size=16)
        for message in messages:
            digest.update(repr(message_key(message, self.sameness)).encode())
            if message.role == "assistant":
                yield digest.digest()
