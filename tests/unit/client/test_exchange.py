from __future__ import annotations

import logging
import ssl

import httpx2
import pytest

from palestra.client.exchange import Settings, exchange, send_call
from palestra.client.protocol import LONGEST_PAUSE_SECONDS, ApiCall
from palestra.errors import (
    ClaimOver,
    ConfigError,
    Conflict,
    ConnectionLost,
    EpisodeEnded,
    EpisodeLeaseExpired,
    Forbidden,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    TooManyRequests,
    Unauthorized,
)
from palestra.types.wire import EpisodeAnswer, HeartbeatEpisode

CALL = ApiCall("/heartbeat_episode", HeartbeatEpisode(episode_id="e"), EpisodeAnswer)
ANSWER = EpisodeAnswer(episode_id="e", state="claimed")


def settings(retry_seconds: float = 1000.0) -> Settings:
    return Settings("http://x/", "key", None, retry_seconds)


def reply(status: int, **error) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"message": "why", "code": "c"} | error} if error is not None else {})


def good() -> httpx2.Response:
    return httpx2.Response(200, json=ANSWER.model_dump())


def play(steps, *replies, **kw):
    """Answer each request with the next reply; returns (answer, pauses)."""
    pauses, replies = [], list(replies)
    step = next(steps)
    try:
        while True:
            if isinstance(step, dict):
                step = steps.send(replies.pop(0))
            else:
                pauses.append(step)
                step = next(steps)
    except StopIteration as stop:
        assert not replies
        return stop.value, pauses


def test_a_request_has_the_key_of_the_call_or_of_the_job():
    request = settings().request(CALL)
    assert request["url"] == "http://x/heartbeat_episode"
    assert request["headers"]["authorization"] == "Bearer key"
    assert request["content"] == '{"episode_id":"e"}'
    other = settings().request(ApiCall("/x", CALL.body, EpisodeAnswer, key="pe-1"))
    assert other["headers"]["authorization"] == "Bearer pe-1"


def test_without_a_key_the_environment_is_asked_and_then_it_is_an_error(monkeypatch):
    monkeypatch.delenv("PALESTRA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="PALESTRA_API_KEY"):
        Settings("http://x", None, None, 1.0)
    monkeypatch.setenv("PALESTRA_API_KEY", "from-environment")
    assert Settings("http://x", None, None, 1.0).key == "from-environment"


def test_an_answer_is_returned_at_once():
    assert play(send_call(settings(), CALL), good()) == (ANSWER, [])


@pytest.mark.parametrize("bad", [429, 500, 502, 503, None])
def test_what_could_not_be_served_now_is_sent_again_after_growing_pauses(bad):
    trouble = httpx2.ConnectError("refused") if bad is None else reply(bad)
    answer, pauses = play(send_call(settings(), CALL), *[trouble] * 8, good())
    assert answer == ANSWER
    for number, pause in enumerate(pauses):
        longest = min(LONGEST_PAUSE_SECONDS, 0.1 * 2**number)
        assert longest / 2 <= pause <= longest
    assert len(pauses) == 8


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (401, Unauthorized),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (413, PayloadTooLarge),
        (422, InvalidRequest),
    ],
)
def test_a_refusal_is_the_error_of_its_status_in_the_servers_words_and_is_not_sent_again(status, kind):
    with pytest.raises(kind, match=r"^why$"):
        play(send_call(settings(), CALL), reply(status))


def test_a_claim_that_is_over_is_known_by_its_code():
    with pytest.raises(ClaimOver):
        play(send_call(settings(), CALL), reply(409, code="claim_over"))


@pytest.mark.parametrize(
    ("last", "kind", "words"),
    [
        (reply(503), ConnectionLost, "why"),
        (reply(429), TooManyRequests, "why"),
        (httpx2.ConnectError("refused"), ConnectionLost, "refused"),
        (httpx2.ReadTimeout(""), ConnectionLost, "ReadTimeout"),
    ],
)
def test_after_its_time_the_last_trouble_is_raised(last, kind, words):
    with pytest.raises(kind, match=words):
        play(send_call(settings(retry_seconds=0.0), CALL), last)


@pytest.mark.parametrize("content", [b"<html>bad gateway</html>", b"[]", b'{"error": "x"}', b'{"error": {}}', b""])
def test_an_answer_that_is_not_ours_is_shown(content):
    with pytest.raises(NotFound, match="404"):
        play(send_call(settings(), CALL), httpx2.Response(404, content=content))


@pytest.mark.parametrize("wanted", ["2", "30"])
def test_a_server_that_says_when_to_come_back_is_asked_no_sooner(wanted):
    busy = httpx2.Response(503, headers={"retry-after": wanted}, json={})
    _, pauses = play(send_call(settings(), CALL), busy, good())
    assert pauses == [float(wanted)]


def test_a_server_that_is_back_too_late_is_not_waited_for():
    busy = httpx2.Response(503, headers={"retry-after": "60"}, json={})
    with pytest.raises(ConnectionLost):
        play(send_call(settings(retry_seconds=30.0), CALL), busy)


@pytest.mark.parametrize("wanted", ["soon", "-1", "1e9", "Wed, 21 Oct 2026 07:28:00 GMT", "²", ""])
def test_a_wish_that_is_no_number_of_seconds_is_none(wanted):
    busy = httpx2.Response(429, headers=[(b"retry-after", wanted.encode())], json={})
    _, pauses = play(send_call(settings(), CALL), busy, good())
    assert pauses[0] <= 0.1


GARBAGE = [
    b"",
    b"<html>sign in</html>",
    b"\xff\xfe",
    b"[]",
    b"null",
    b'{"status": 1}',
    ANSWER.model_dump_json().encode()[:-3],
]


@pytest.mark.parametrize("content", [*GARBAGE, b"[" * 200_000], ids=lambda content: repr(content[:20]))
def test_an_answer_that_is_none_of_ours_is_asked_for_again_and_then_said(content):
    garbage = httpx2.Response(200, content=content)
    answer, pauses = play(send_call(settings(), CALL), garbage, garbage, good())
    assert (answer, len(pauses)) == (ANSWER, 2)
    with pytest.raises(ConnectionLost, match=r"answer.*Palestra"):
        play(send_call(settings(retry_seconds=0.0), CALL), garbage)


def test_what_a_newer_server_adds_to_an_answer_is_no_garbage():
    more = httpx2.Response(200, json=ANSWER.model_dump() | {"new": 1})
    assert play(send_call(settings(), CALL), more) == (ANSWER, [])


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirection_is_an_error_of_the_url_and_names_the_place(status):
    with pytest.raises(ConfigError, match="elsewhere"):
        play(send_call(settings(), CALL), httpx2.Response(status, headers={"location": "https://elsewhere"}))


def test_what_waiting_does_not_help_is_raised_at_once():
    mismatch = httpx2.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number")
    mismatch.__cause__ = ssl.SSLError("wrong version number")
    for error in (mismatch, httpx2.UnsupportedProtocol("x"), httpx2.LocalProtocolError("x")):
        with pytest.raises(ConfigError):
            play(send_call(settings(), CALL), error)


def test_an_outage_is_told_at_its_first_failure_and_at_its_end_and_not_in_between(caplog):
    known, gone = settings(), httpx2.ConnectError("Connection refused")
    with caplog.at_level(logging.WARNING, "palestra.client"):
        waiting = send_call(known, CALL)
        next(waiting)
        waiting.send(gone)
        (first,) = caplog.messages
        assert "http://x can't be reached: Connection refused" in first
        assert "up to 1000 s" in first
        play(send_call(known, CALL), *[gone] * 5, good())
        assert len(caplog.messages) == 2
        assert "answers again" in caplog.messages[1]
        play(send_call(known, CALL), reply(429), good())  # busy is not gone
        assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:7411", "with http://"),
        ("localhost:7411", "with http://"),
        ("//host", "with http://"),
        ("", "with http://"),
        ("ftp://host", "with http://"),
        ("http://", "with http://"),
        ("http://host?x=1", "with http://"),
        ("http://[::1", "no URL"),
        ("http://host:x", "no URL"),
        ("http://host:7411/v1", "http://host:7411"),
        ("http://host:7411/v1/", "http://host:7411"),
        ("https://host/jobs/v1", "https://host/jobs"),
    ],
)
def test_a_url_that_can_be_none_is_refused_before_anything_is_sent(url, words):
    with pytest.raises(ConfigError, match=words):
        Settings(url, "key", None, 1.0)


@pytest.mark.parametrize(
    ("url", "kept"), [("http://host/", "http://host"), (" https://[::1]:7411/a/ \n", "https://[::1]:7411/a")]
)
def test_a_url_is_kept_without_what_does_not_belong_to_it(url, kept):
    assert Settings(url, "key\n", None, 1.0).request(CALL)["url"] == f"{kept}/heartbeat_episode"
    assert Settings(url, "key\n", None, 1.0).key == "key"


@pytest.mark.parametrize("key", ["ключ", "a\nb", "a\0"])
def test_a_key_that_fits_into_no_header_is_refused(key):
    with pytest.raises(ConfigError, match="the key"):
        Settings("http://x", key, None, 1.0)


@pytest.mark.parametrize(
    ("replied", "again"), [(httpx2.ConnectError("x"), True), (429, True), (503, True), (500, False), (502, False)]
)
def test_what_is_not_safe_to_send_twice_is_sent_again_only_where_it_had_no_effect(replied, again):
    known = settings()
    steps = exchange(known, lambda: known.request(CALL), lambda answer: answer.json(), safe=False)
    trouble = reply(replied) if isinstance(replied, int) else replied
    if again:
        assert play(steps, trouble, good())[0] == ANSWER.model_dump()
    else:
        with pytest.raises(ConnectionLost):
            play(steps, trouble)


@pytest.mark.parametrize(
    ("code", "kind"), [("episode_lease_expired", EpisodeLeaseExpired), ("episode_ended", EpisodeEnded)]
)
def test_a_lease_that_is_lost_is_known_by_its_code(code, kind):
    with pytest.raises(kind):
        play(send_call(settings(), CALL), reply(409, code=code))


def test_a_server_at_a_new_address_gets_the_whole_time_again(monkeypatch):
    known, gone = settings(retry_seconds=30.0), httpx2.ConnectError("no")
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr("palestra.client.exchange.time.monotonic", lambda: next(now))
    with pytest.raises(ConnectionLost):
        play(send_call(known, CALL), gone, gone)
    steps = send_call(known, CALL)
    assert next(steps)["url"].startswith("http://x/")
    known.move("http://y", "other")
    request = steps.send(None)
    assert request["url"].startswith("http://y/")
    assert request["headers"]["x-stainless-retry-count"] == "1"
    assert isinstance(steps.send(gone), float)
