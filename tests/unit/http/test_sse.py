from __future__ import annotations

import pytest

from palestra.http.sse import KEEPALIVE_SECONDS, POLL_SECONDS, News, encode_event, follow


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, b"data: {}\n\n"),
        ({"event": "step"}, b"event: step\ndata: {}\n\n"),
        ({"event": "step", "event_id": "4.2"}, b"id: 4.2\nevent: step\ndata: {}\n\n"),
    ],
)
def test_an_event_is_framed_byte_for_byte(more, expected):
    assert encode_event(b"{}", **more) == expected


class Source:
    """Looks that find what the test lays down; after them nothing, and then it is over."""

    def __init__(self, *looks: News | None) -> None:
        self.looks = list(looks)
        self.paused = 0.0

    async def look(self) -> News | None:
        return self.looks.pop(0)

    async def pause(self, seconds: float) -> None:
        self.paused += seconds

    async def all(self, wait: bool = True, **more: bool) -> list[bytes]:
        return [chunk async for chunk in follow(self.look, wait, self.pause, **more)]


async def test_what_was_found_before_the_end_is_sent_and_then_the_stream_ends():
    source = Source(News([b"a", b"b"], False), News([], False), News([b"c"], True), News([], True))
    assert await source.all() == [b"a", b"b", b"c"]
    assert source.paused == POLL_SECONDS
    assert source.looks == []


async def test_one_who_does_not_wait_gets_what_is_there():
    source = Source(News([b"a"], False), News([], False), News([b"b"], False))
    assert await source.all(wait=False) == [b"a"]
    assert source.paused == 0.0


async def test_one_who_may_not_read_on_gets_nothing_more():
    assert await Source(News([b"a"], False), None).all() == [b"a"]


@pytest.mark.parametrize("keepalive", [True, False])
async def test_a_quiet_stream_is_kept_open_with_comments(keepalive):
    looks = int(KEEPALIVE_SECONDS / POLL_SECONDS)
    source = Source(*[News([], False)] * looks, News([], True))
    assert await source.all(keepalive=keepalive) == ([b": still here\n\n"] if keepalive else [])
