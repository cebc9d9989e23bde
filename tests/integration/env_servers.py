"""An environment server in a thread of the test, and a proxy that cuts connections at a chosen frame."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

from palestra.envs import ConcurrentEnvironment, Environment
from palestra.http.server import listen, url_of
from palestra_remote import RemoteEnvironment, SessionLimits, SessionTable
from palestra_remote.app import served_environment

KEY = "env-test-key"


class EnvServer:
    """A server in a thread of its own, with an event loop of its own."""

    def __init__(self, make: Callable[[], Any], **limits: Any) -> None:
        self._ready, self._thread = threading.Event(), threading.Thread(target=self._serve, daemon=True)
        self._make, self._limits = make, SessionLimits(**limits)

    def __enter__(self) -> EnvServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        async def run() -> None:
            self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            listener = listen("127.0.0.1", 0)
            self.url, self.table = url_of(listener), SessionTable(self._make, self._limits)
            async with served_environment(self.table, KEY, listener):
                self._ready.set()
                await self._stop.wait()

        asyncio.run(run())

    def remote(self, url: str | None = None, **more: Any) -> RemoteEnvironment:
        return RemoteEnvironment(url or self.url, KEY, **more)


class CuttingProxy:
    """Passes bytes on between clients and a server, and cuts a connection at one frame of a WebSocket.

    Attributes:
        frames: how many frames were passed on, by direction ("up" to the server, "down" to the client).
        cut: (direction, number of the frame from 0, whether the frame is passed on before the connection is cut); None:
            none is cut. Frames of later connections count on.
    """

    def __init__(self, target: str, cut: tuple[str, int, bool] | None = None) -> None:
        self._host, _, port = target.removeprefix("http://").partition(":")
        self._port, self.cut, self.cuts = int(port), cut, 0
        self.frames = {"up": 0, "down": 0}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):  # closed before
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((self._host, self._port))
            self._sockets += [client, server]
            for direction, source, sink in (("up", client, server), ("down", server, client)):
                thread = threading.Thread(target=self._pass_on, args=(direction, source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # an end was closed
            for piece, is_frame in _pieces(source):
                if is_frame and self._is_cut(direction):
                    if self.cut is not None and self.cut[2]:
                        sink.sendall(piece)
                    break
                sink.sendall(piece)
        for one in (source, sink):
            with suppress(OSError):  # the other thread has closed its own
                one.shutdown(socket.SHUT_RDWR)
        source.close()

    def _is_cut(self, direction: str) -> bool:
        with self._lock:
            number = self.frames[direction]
            self.frames[direction] += 1
            hit = self.cut is not None and not self.cuts and self.cut[:2] == (direction, number)
            self.cuts += hit
            return hit


def _pieces(source: socket.socket) -> Iterator[tuple[bytes, bool]]:
    """Yield what comes, and whether it is one text frame of a WebSocket; other frames pass as bytes."""
    held = b""
    upgraded = False
    while True:
        if not upgraded:
            data = source.recv(65_536)
            if not data:
                return
            held += data
            head, end, rest = held.partition(b"\r\n\r\n")
            if not end or b"upgrade: websocket" not in head.lower():
                yield held, False
                held = b""
                continue
            upgraded, held = True, rest
            yield head + end, False
        while (size := _frame_size(held)) is not None and len(held) >= size:
            yield held[:size], held[0] & 0x0F == 1
            held = held[size:]
        data = source.recv(65_536)
        if not data:
            return
        held += data


def _frame_size(data: bytes) -> int | None:
    """Return the length of the WebSocket frame at the beginning of `data`; None: its head is not complete."""
    if len(data) < 2:
        return None
    mask, length, head = 4 * (data[1] >> 7), data[1] & 0x7F, 2
    if length >= 126:
        more = 2 if length == 126 else 8
        if len(data) < 2 + more:
            return None
        length, head = int.from_bytes(data[2 : 2 + more], "big"), 2 + more
    return head + mask + length


class Ledger(Environment):
    """Writes every action down, so that a lost one, a doubled one and another order show in what it answers."""

    blocking = False
    books: ClassVar[list[list[str]]] = []

    def __init__(self, steps: int = 4) -> None:
        self._steps, self._book = steps, []

    def reset(self, task):
        self._book = []
        Ledger.books.append(self._book)
        return f"begin {task['name']}", {}

    def step(self, action):
        self._book.append(action)
        return "; ".join(self._book), float(len(self._book)), len(self._book) == self._steps, False, {}


async def played(environment: ConcurrentEnvironment, task: dict, actions) -> list[tuple]:
    """Play an episode and return what was shown: texts, rewards, ends."""
    from palestra.errors import EpisodeOver
    from palestra.types.messages import text_message

    await environment.reset(task)
    seen, said = [], iter(actions)
    try:
        while True:
            shown = await environment.observe()
            seen.append(
                (shown.agent, tuple(m.text for m in shown.content), shown.reward, shown.terminated, shown.truncated)
            )
            if not shown.is_last:
                environment.act(shown.id, text_message("assistant", next(said)))
    except EpisodeOver:
        await environment.abandon()
        return seen
