"""Two streams over connections that lose, repeat and break anything: each message arrives once, and in order."""

from __future__ import annotations

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.envs.remote.stream import MAX_UNACKNOWLEDGED, MessageStream
from palestra.errors import Conflict, InvalidRequest, PayloadTooLarge
from palestra.types.env_wire import CLIENT_FRAME, MAX_FRAME_MESSAGES, ClientFrame


def cancel(name: str) -> dict[str, str]:
    return {"type": "cancel", "observation_id": name}


class Side:
    """One side of a session, with a connection that has carried its messages up to `carried`."""

    def __init__(self) -> None:
        self.stream, self.carried, self.handled = MessageStream(1000), 0, []

    def frame(self) -> bytes:
        data, self.carried = self.stream.frame(self.carried)
        return data

    def take(self, data: bytes) -> None:
        frame: ClientFrame = CLIENT_FRAME.validate_json(data)
        self.stream.acknowledge(frame.ack)
        self.handled += [message.observation_id for message in self.stream.accept(frame.messages)]


@examples(60, 1000)
@given(st.lists(st.tuples(st.sampled_from(["add", "send", "lose", "twice", "break"]), st.booleans()), max_size=80))
def test_each_message_is_handled_once_and_in_order(steps):
    sides, added = (Side(), Side()), ([], [])
    for what, first in steps:
        here, there = sides if first else sides[::-1]
        if what == "add":
            added[not first].append(f"m{len(added[not first])}")
            here.stream.add(cancel(added[not first][-1]))
        elif what == "break":
            for one, other in (sides, sides[::-1]):
                one.stream.resume(other.stream.received)
                one.carried = one.stream.acknowledged
        elif what == "lose":  # a frame is lost only where its connection is
            here.frame()
            for one, other in (sides, sides[::-1]):
                one.stream.resume(other.stream.received)
                one.carried = one.stream.acknowledged
        else:
            data = here.frame()
            for _ in range(2 if what == "twice" else 1):
                there.take(data)
    for _ in range(2):
        for here, there in (sides, sides[::-1]):
            while here.carried < here.stream.sent:
                there.take(here.frame())
            there.take(here.frame())
    assert sides[1].handled == added[0]
    assert sides[0].handled == added[1]
    assert all(side.stream.acknowledged == side.stream.sent for side in sides)


def test_frames_are_cut_by_number_and_size():
    stream = MessageStream(1000)
    for number in range(MAX_FRAME_MESSAGES + 6):
        stream.add(cancel(f"m{number}"))
    data, last = stream.frame(0)
    assert len(data) <= 1000 + 100
    while last < stream.sent:
        data, after = stream.frame(last)
        assert last < after
        assert len(data) <= 1100
        last = after


def test_what_can_not_be_sent_or_continued_is_refused():
    stream = MessageStream(100)
    with pytest.raises(PayloadTooLarge, match="over the limit of 100"):
        stream.add(cancel("x" * 100))
    with pytest.raises(InvalidRequest, match="JSON"):
        stream.add(cancel("\ud800"))
    assert stream.sent == 0
    with pytest.raises(InvalidRequest, match="the last one that was sent is 0"):
        stream.acknowledge(1)
    for _ in range(MAX_UNACKNOWLEDGED):
        stream.add(cancel("x"))
    with pytest.raises(PayloadTooLarge, match="wait for an acknowledgement"):
        stream.add(cancel("x"))
    stream.acknowledge(5)
    stream.acknowledge(3)  # a frame that was held up
    with pytest.raises(Conflict, match="begin a new session"):
        stream.resume(3)
    late = CLIENT_FRAME.validate_python({"ack": 0, "messages": [{"number": 2, "type": "abandon"}]})
    with pytest.raises(InvalidRequest, match="message 2 came after message 0"):
        list(stream.accept(late.messages))
