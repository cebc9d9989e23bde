"""Calls over a channel: answers, streams, errors, cancelled calls, and the end of either side."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from palestra.errors import EngineFailure, InvalidRequest, NotFound
from palestra.process.channel import (
    Beat,
    BlockingChannel,
    Call,
    CallBroken,
    Cancel,
    Channel,
    Event,
    Failed,
    Piece,
    Remote,
    Result,
    TakenBack,
    raw,
)
from palestra.process.child import ending
from palestra.process.codec import SentError, decode
from palestra.process.stub import Server, method_of, proxy


class Adder(Protocol):
    async def add(self, one: int, other: int = 1) -> int: ...

    def count(self, most: int) -> AsyncIterator[int]: ...

    def name(self) -> str: ...


class Local:
    def name(self) -> str:
        return "here"


@pytest.fixture
async def ends():
    """Calls on one side, and the other side, which has no event loop."""
    ours, theirs = socket.socketpair()
    events: list[Event] = []

    async def cause(problem: InvalidRequest | None) -> Exception:
        return problem or EngineFailure("gone")

    remote = Remote(await Channel.over(ours), cause, events.append)
    with theirs:
        yield remote, BlockingChannel(theirs), theirs, events
    await remote.close()


def answering(channel, *answers) -> threading.Thread:
    """Answer each call that arrives with what a function makes of it."""

    def run() -> None:
        for answer, message in zip(answers, channel.messages(), strict=False):
            for one in answer(message):
                channel.send(one)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


async def test_a_call_gets_its_arguments_in_order_with_defaults_and_returns_what_was_sent(ends):
    remote, channel, _, _ = ends

    def add(call: Call):
        one, other = method_of(Adder, call.method).decoded(call.arguments)
        return [Result(call.id, raw(one + other))]

    answering(channel, add, add)
    adder = proxy(Adder, remote, Local())
    assert await adder.add(2) == 3
    assert await adder.add(other=5, one=2) == 7
    assert adder.name() == "here"


async def test_an_argument_of_another_type_and_a_result_of_another_type_are_refused(ends):
    remote, channel, _, _ = ends
    answering(channel, lambda call: [Result(call.id, raw("three"))])
    with pytest.raises(InvalidRequest):
        await proxy(Adder, remote, Local()).add(2)
    for given in (["two"], [], [1, 2, 3], {"one": 1}):
        with pytest.raises(InvalidRequest):
            method_of(Adder, "add").decoded(raw(given))
    for name in ("subtract", "__init__", "_is_protocol"):
        with pytest.raises(InvalidRequest):
            method_of(Adder, name)


async def test_a_stream_is_yielded_in_order_and_one_that_is_left_is_cancelled(ends):
    remote, channel, _, _ = ends
    seen = []

    def count(call: Call):
        return [Piece(call.id, raw(n)) for n in range(3)] + ([Result(call.id, raw(None))] if call.id == 1 else [])

    thread = answering(channel, count, count, lambda message: seen.append(message) or [])
    adder = proxy(Adder, remote, Local())
    assert [number async for number in adder.count(3)] == [0, 1, 2]
    stream = adder.count(3)
    assert await anext(stream) == 0
    await stream.aclose()
    await asyncio.to_thread(thread.join, 10)
    assert seen == [Cancel(2)]


async def test_errors_arrive_as_they_were_raised(ends):
    remote, channel, _, _ = ends
    answering(
        channel,
        lambda call: [Failed(call.id, SentError.of(NotFound("no such policy")))],
        lambda call: [Failed(call.id, SentError.of(KeyError("x")), "Traceback")],
        lambda call: [Failed(call.id, None)],
    )
    adder = proxy(Adder, remote, Local())
    with pytest.raises(NotFound, match="such policy"):
        await adder.add(1)
    with pytest.raises(CallBroken) as broken:
        await adder.add(1)
    assert (type(broken.value.error), broken.value.trace) == (KeyError, "Traceback")
    with pytest.raises(TakenBack):
        await adder.add(1)


async def test_when_the_other_side_has_gone_all_calls_and_streams_fail_with_the_reason(ends):
    remote, _, theirs, _ = ends
    adder = proxy(Adder, remote, Local())
    call = asyncio.ensure_future(adder.add(1))
    piece = asyncio.ensure_future(anext(adder.count(1)))
    await asyncio.sleep(0)
    theirs.shutdown(socket.SHUT_RDWR)
    for waiting in (call, piece, adder.add(2)):
        with pytest.raises(EngineFailure, match="gone"):
            await waiting
    assert remote.closed.done()


async def test_events_are_handed_on_and_bytes_that_are_no_message_end_the_channel(ends):
    remote, channel, theirs, events = ends
    channel.send(Event("phase", raw("loading")))
    theirs.sendall(b"\x03\0\0\0abc")
    await asyncio.wait_for(remote.closed, 10)
    assert [(event.name, decode(str, event.value)) for event in events] == [("phase", "loading")]
    with pytest.raises(InvalidRequest):
        await remote.call("add", 1)


async def test_a_message_arrives_whole_however_its_bytes_are_cut(ends):
    _, channel, theirs, events = ends
    ours, other = socket.socketpair()
    with ours, other:
        BlockingChannel(ours).send(Event("a", raw(list(range(100)))))
        data = other.recv(2**20)
    for start in range(0, len(data), 7):
        theirs.sendall(data[start : start + 7])
    channel.send(Event("b", raw(None)))
    while len(events) < 2:
        await asyncio.sleep(0.01)
    assert decode(list[int], events[0].value) == list(range(100))


async def test_odd_errors_end_their_call_and_not_the_channel(ends):
    remote, channel, _, _ = ends
    answering(
        channel,
        lambda call: [Failed(call.id, SentError("ExceptionGroup", "several"))],
        lambda call: [Failed(call.id, SentError.of(NotFound("half a pair: \ud800")))],
        lambda call: [Result(call.id, raw(3))],
    )
    adder = proxy(Adder, remote, Local())
    with pytest.raises(RuntimeError, match="ExceptionGroup: several"):
        await adder.add(1)
    with pytest.raises(NotFound, match=r"half.*pair"):
        await adder.add(1)
    assert await adder.add(1) == 3


async def test_a_call_of_a_closed_channel_fails(ends):
    remote, *_ = ends
    adder = proxy(Adder, remote, Local())
    waiting = asyncio.ensure_future(adder.add(1))
    await asyncio.sleep(0)
    await remote.close()
    for call in (waiting, adder.add(1)):
        with pytest.raises(ConnectionAbortedError):
            await call


@pytest.mark.parametrize(("code", "said"), [(3, "code 3"), (-9, "SIGKILL"), (-40, "signal 40")])
def test_how_a_process_ended_is_said_in_words(code, said):
    assert said in ending(code)


@pytest.mark.parametrize("name", ["register", "mro", "__init__", "none"])
def test_what_is_no_method_of_a_protocol_is_refused(name):
    with pytest.raises(InvalidRequest, match="no method"):
        method_of(Adder, name)


class Arriving:
    """A channel on which messages arrive, until it is closed."""

    def __init__(self, *messages):
        self._messages, self.sent = messages, []

    def send(self, message) -> None:
        self.sent.append(message)

    async def drain(self) -> None:
        return

    async def frames(self):
        for message in self._messages:
            yield [message]


class Slow:
    async def add(self, one: int, other: int = 1) -> int:
        await asyncio.sleep(0.01)
        return one + other

    async def count(self, most: int) -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield most


async def sent(error: Exception) -> Exception:
    return error


async def test_a_stranger_has_few_calls_at_a_time_and_those_end_without_it_but_for_streams():
    calls = [Call(1, "count", raw((3,))), *(Call(number, "add", raw((number,))) for number in (2, 3, 4))]
    channel = Arriving(*calls, Cancel(2))
    async with asyncio.timeout(10):
        await Server(channel, {"": (Adder, Slow())}, sent, most_calls=3).run()
    refused, *answers = channel.sent
    assert (refused.id, refused.error.kind) == (4, "TooManyRequests")
    assert answers == [Result(2, raw(3)), Result(3, raw(4))]


@pytest.mark.parametrize("odd", [Call(1, "add", raw((1,))), Result(1, raw(None)), Beat()])
async def test_what_a_stranger_does_not_send_is_refused_after_its_calls(odd):
    channel = Arriving(Call(1, "add", raw((1,))), odd)
    with pytest.raises(InvalidRequest):
        await Server(channel, {"": (Adder, Slow())}, sent, most_calls=3).run()
    assert channel.sent == [Result(1, raw(2))]


async def test_over_a_new_channel_calls_are_made_again(ends):
    remote, *_ = ends
    adder = proxy(Adder, remote, Local())
    remote.lose(EngineFailure("gone"))
    with pytest.raises(EngineFailure):
        await adder.add(1)
    await remote.close()
    ours, theirs = socket.socketpair()
    with theirs:
        remote.renew(await Channel.over(ours))
        answering(BlockingChannel(theirs), lambda call: [Result(call.id, raw(3))])
        assert await adder.add(1) == 3
