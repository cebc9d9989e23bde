from __future__ import annotations

from contextlib import suppress

import pytest
from starlette.requests import Request

from palestra.errors import Forbidden, NotFound, Unauthorized
from palestra.http.guard import bearer
from palestra.server.auth import EpisodeKey, KeyRing, RoleKey, TalkKey
from palestra.session import SeatKey
from palestra.store.key_files import seat_key
from unit.building import TASK, open_store

SECRET = b"\x01" * 32
RING = KeyRing(lambda: SECRET, "job")


def request(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


def carrying(key: str) -> Request:
    return request(authorization=f"Bearer {key}")


def test_an_episode_key_opens_its_episode_under_its_fence():
    assert RING.check(RING.episode_key("train-000001-02", 3)) == EpisodeKey("train-000001-02", 3)


def test_the_same_claim_always_has_the_same_key():
    assert RING.episode_key("e", 1) == KeyRing(lambda: SECRET, "job").episode_key("e", 1)


def test_the_key_is_the_hmac_of_secret_job_episode_and_fence():
    import hashlib
    import hmac

    wanted = hmac.new(SECRET, b"job\0episode\0e\x007", hashlib.sha256).hexdigest()[:40]
    assert RING.episode_key("e", 7) == f"pe-e.7.{wanted}"


def test_a_key_that_was_checked_before_opens_nothing_once_the_secret_is_another():
    secrets = [SECRET]
    ring = KeyRing(lambda: secrets[0], "job")
    key = ring.episode_key("e", 1)
    assert ring.check(key) == ring.check(key) == EpisodeKey("e", 1)
    secrets[0] = b"\x02" * 32
    with pytest.raises(Unauthorized):
        ring.check(key)
    assert ring.episode_key("e", 1) != key


def test_the_job_key_opens_the_job_and_no_episode():
    assert RING.check(RING.job_key) is None


def test_the_viewers_key_opens_the_page_and_nothing_else():
    with pytest.raises(Forbidden, match="viewer"):
        RING.check(RING.viewer_key)
    viewer = carrying(RING.viewer_key)
    with pytest.raises(Forbidden):
        RING.admit(viewer)
    RING.require_view(viewer)
    RING.require_view(carrying(RING.job_key))
    with pytest.raises(Forbidden):
        RING.require_job(viewer)
    with pytest.raises(Forbidden):
        RING.require_episode(viewer)
    assert not RING.opens_job(viewer)
    with pytest.raises(Forbidden):
        RING.require_view(carrying(RING.episode_key("e", 1)))
    with pytest.raises(Unauthorized):
        RING.require_view(request())
    with pytest.raises(Unauthorized):
        KeyRing(lambda: b"other" * 8, "job").require_view(viewer)


def test_the_key_of_a_talk_opens_model_calls_and_nothing_else():
    talk = carrying(RING.talk_key)
    assert RING.check(RING.talk_key) == TalkKey()
    assert RING.opens_talk(talk)
    for check in (RING.require_job, RING.require_view, RING.require_episode):
        with pytest.raises(Forbidden):
            check(talk)
    with pytest.raises(Forbidden):
        RING.require_seat(talk, "e")
    with pytest.raises(Forbidden):
        RING.require_role(talk, "white")
    assert not RING.opens_job(talk)
    for other in (RING.job_key, RING.episode_key("e", 1)):
        assert not RING.opens_talk(carrying(other))
    with pytest.raises(Forbidden):
        RING.opens_talk(carrying(RING.viewer_key))
    with pytest.raises(Unauthorized):
        KeyRing(lambda: b"other" * 8, "job").check(RING.talk_key)
    with pytest.raises(Unauthorized):
        KeyRing(lambda: SECRET, "other").check(RING.talk_key)


def test_a_job_key_may_be_given():
    ring = KeyRing(lambda: SECRET, "job", "my-own-key")
    assert ring.check("my-own-key") is None
    with pytest.raises(Unauthorized):
        ring.check(RING.job_key)


@pytest.mark.parametrize(
    "key", [None, "", "x", "pe-", "pe-e", "pe-e.1", "pe-e.1.", "pe-..", "pj-", "é", "pe-e.\u0661.x"]
)
def test_no_key_and_nonsense_are_unauthorized(key):
    with pytest.raises(Unauthorized):
        RING.check(key)


def test_keys_of_another_job_secret_episode_or_fence_are_unauthorized():
    good = RING.episode_key("e", 1)
    signature = good.rpartition(".")[2]
    forged = [
        KeyRing(lambda: SECRET, "other").episode_key("e", 1),
        KeyRing(lambda: b"\x02" * 32, "job").episode_key("e", 1),
        f"pe-f.1.{signature}",
        f"pe-e.2.{signature}",
        f"pe-e.01.{signature}",
        f"pe-e.1.{signature[:-1]}",
        good + "0",
        good.upper(),
        KeyRing(lambda: SECRET, "other").job_key,
    ]
    for key in forged:
        with pytest.raises(Unauthorized):
            RING.check(key)


def test_the_key_is_read_from_either_header():
    assert bearer(request(authorization="Bearer abc ")) == "abc"
    assert bearer(request(authorization="bearer abc")) == "abc"
    assert bearer(request(x_api_key="abc")) == "abc"
    assert bearer(request(authorization="Basic abc", x_api_key="def")) == "def"
    assert bearer(request()) is None


def test_a_route_of_the_job_forbids_an_episodes_key_and_the_other_way_round():
    RING.require_job(carrying(RING.job_key))
    assert RING.require_episode(carrying(RING.episode_key("e", 1))) == EpisodeKey("e", 1)
    with pytest.raises(Forbidden):
        RING.require_job(carrying(RING.episode_key("e", 1)))
    with pytest.raises(Forbidden):
        RING.require_episode(carrying(RING.job_key))
    for check in (RING.require_job, RING.require_episode):
        with pytest.raises(Unauthorized):
            check(request())


async def test_a_key_opens_no_other_episode(tmp_path):
    with open_store(tmp_path) as store:
        await store.groups.register("train", 0, 1, TASK, 2)
        mine, other = "train-000000-00", "train-000000-01"
        key = carrying(RING.episode_key(mine, 1))
        assert await RING.require_this_episode(key, mine, store.episodes) == EpisodeKey(mine, 1)
        with pytest.raises(Forbidden):
            await RING.require_this_episode(key, other, store.episodes)
        with pytest.raises(Forbidden):
            await RING.require_this_episode(carrying(RING.job_key), mine, store.episodes)
        with pytest.raises(NotFound):
            await RING.require_this_episode(key, "train-000009-00", store.episodes)
        with pytest.raises(Unauthorized):
            await RING.require_this_episode(carrying("pe-x.1.y"), mine, store.episodes)


@pytest.mark.parametrize("given", [None, "my-own-key"])
def test_a_check_asks_for_the_secret_once(given):
    asked = []

    def secret() -> bytes:
        asked.append(1)
        return SECRET

    ring = KeyRing(secret, "job", given)
    keys = [ring.job_key, ring.episode_key("e", 1), "pe-e.1.x"]
    for key in keys:
        asked.clear()
        with suppress(Unauthorized):
            ring.check(key)
        assert len(asked) == 1, key


SEATS = KeyRing(lambda: SECRET, "job", seats=["white", "black / ♟"])
WHITE = SeatKey("train-000001-02", 3, "white", 2)


def test_the_key_of_a_seat_opens_that_seat_under_that_lease_and_nothing_else():
    for seat in (WHITE, SeatKey("e.1", 1, "black / ♟", 7)):
        key = SEATS.seat_key(seat)
        assert key.isascii(), "it fits into a header"
        assert SEATS.check(key) == seat
        assert SEATS.require_episode(carrying(key)) == seat
        assert SEATS.require_seat(carrying(key), seat.episode_id) == seat
        for refused in (SEATS.require_job, SEATS.require_view, lambda r: SEATS.require_role(r, "white")):
            with pytest.raises(Forbidden):
                refused(carrying(key))
        with pytest.raises(Forbidden, match="not the key of a seat of episode other"):
            SEATS.require_seat(carrying(key), "other")
        for ring in (KeyRing(lambda: b"\x02" * 32, "job", seats=["white", "black / ♟"]), RING):
            with pytest.raises(Unauthorized):
                ring.check(key)


@pytest.mark.parametrize("place", range(4))
def test_no_part_of_a_seats_key_can_be_changed(place):
    parts = SEATS.seat_key(WHITE).removeprefix("ps-").split(".")
    for other in ("train-000001-03", "0", "1", "2", "3", "03", "99999999999", "x", "\u0661", ""):
        if parts[place] != other:
            with pytest.raises(Unauthorized):
                SEATS.check("ps-" + ".".join([*parts[:place], other, *parts[place + 1 :]]))


def test_the_key_of_a_role_claims_that_seat_and_nothing_else():
    key = seat_key(SECRET, "job", "white")
    assert SEATS.check(key) == RoleKey("white")
    SEATS.require_role(carrying(key), "white")
    SEATS.require_role(carrying(SEATS.job_key), "white")
    with pytest.raises(Forbidden, match="claims the seat 'white', and not 'black"):
        SEATS.require_role(carrying(key), "black / ♟")
    for refused in (
        SEATS.require_job,
        SEATS.require_view,
        SEATS.require_episode,
        lambda request: SEATS.require_seat(request, WHITE.episode_id),
    ):
        with pytest.raises(Forbidden):
            refused(carrying(key))
    for ring in (RING, KeyRing(lambda: SECRET, "other", seats=["white"])):
        with pytest.raises(Unauthorized):
            ring.check(key)
