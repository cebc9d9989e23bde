from __future__ import annotations

import httpx2
import pytest

from palestra.client.exchange import Settings, send_call
from palestra.client.protocol import LONGEST_PAUSE_SECONDS, Call
from palestra.errors import (
    ClaimOver,
    ConfigError,
    Conflict,
    ConnectionLost,
    Forbidden,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    TooManyRequests,
    Unauthorized,
)
from palestra.schemas.wire import EpisodeAnswer, HeartbeatEpisode

CALL = Call("/heartbeat_episode", HeartbeatEpisode(episode_id="e"), EpisodeAnswer)
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
    other = settings().request(Call("/x", CALL.body, EpisodeAnswer, key="pe-1"))
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
    with pytest.raises(NotFound, match="the server answered 404"):
        play(send_call(settings(), CALL), httpx2.Response(404, content=content))
