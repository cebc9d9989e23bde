from __future__ import annotations

from contextlib import suppress

import pytest
from starlette.requests import Request

from palestra.config import JobKind
from palestra.errors import Forbidden, NotFound, Unauthorized
from palestra.http.guard import bearer
from palestra.server.auth import (
    Door,
    EpisodeKey,
    JobKey,
    KeyRing,
    PlaygroundKey,
    RoleKey,
    ViewerKey,
    require_episode,
    require_job,
    require_role,
    require_seat,
)
from palestra.session import SeatKey
from palestra.store.key_files import seat_key
from unit.building import TASK, open_store

SECRET = b"\x01" * 32
RING = KeyRing(lambda: SECRET, "job")


def request(path: str = "/v1/x", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw, "path": path})


def carrying(key: str, path: str = "/v1/x") -> Request:
    return request(path, authorization=f"Bearer {key}")


def door(ring: KeyRing, page: str | None = None, kind: JobKind = "training") -> Door:
    return Door(ring, kind, ["/v1/calls"], 20_000, page)


def admit(door: Door, asked: Request) -> int:
    """How many bytes the body may have; the door waits for nothing."""
    with pytest.raises(StopIteration) as done:
        door.admit(asked).send(None)
    found: int = done.value.value
    return found


def admitted(ring: KeyRing, key: str, path: str = "/v1/x") -> Request:
    asked = carrying(key, path)
    admit(door(ring, "/page/"), asked)
    return asked


def calls(key: str, kind: JobKind = "training", ring: KeyRing = RING) -> None:
    admit(door(ring, kind=kind), carrying(key, "/v1/calls"))


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
    assert RING.check(RING.job_key) == JobKey()
    calls(RING.job_key, "inference")
    with pytest.raises(Forbidden):
        calls(RING.job_key)


def test_the_viewers_key_opens_the_page_and_nothing_else():
    assert RING.check(RING.viewer_key) == ViewerKey()
    with pytest.raises(Forbidden, match="viewer"):
        admitted(RING, RING.viewer_key)
    admitted(RING, RING.viewer_key, "/page/x")
    admitted(RING, RING.job_key, "/page/x")
    for key in (RING.episode_key("e", 1), RING.playground_key):
        with pytest.raises(Forbidden):
            admitted(RING, key, "/page/x")
    with pytest.raises(Unauthorized):
        admit(door(RING, "/page/"), request("/page/x"))
    with pytest.raises(Unauthorized):
        admitted(KeyRing(lambda: b"other" * 8, "job"), RING.viewer_key, "/page/x")


def test_the_key_of_a_talk_opens_model_calls_and_nothing_else():
    assert RING.check(RING.playground_key) == PlaygroundKey()
    calls(RING.playground_key)
    calls(RING.playground_key, "inference")
    with pytest.raises(Forbidden):
        admitted(RING, RING.playground_key, "/claim_episode")
    talk = admitted(RING, RING.playground_key)
    for check in (require_job, lambda r: require_seat(r, "e"), lambda r: require_role(r, "white")):
        with pytest.raises(Forbidden):
            check(talk)
    with pytest.raises(Unauthorized):
        KeyRing(lambda: b"other" * 8, "job").check(RING.playground_key)
    with pytest.raises(Unauthorized):
        KeyRing(lambda: SECRET, "other").check(RING.playground_key)


def test_a_job_key_may_be_given():
    ring = KeyRing(lambda: SECRET, "job", "my-own-key")
    assert ring.check("my-own-key") == JobKey()
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
    require_job(admitted(RING, RING.job_key))
    calls(RING.episode_key("e", 1))
    with pytest.raises(Forbidden):
        require_job(admitted(RING, RING.episode_key("e", 1)))
    with pytest.raises(Forbidden):
        calls(RING.episode_key("e", 1), "inference")
    with pytest.raises(Unauthorized):
        admit(door(RING), request())


def test_a_request_that_has_waited_is_refused_once_the_secret_is_another():
    secrets = [SECRET]
    ring = KeyRing(lambda: secrets[0], "job")
    asked = admitted(ring, ring.job_key)
    ring.recheck(asked)
    secrets[0] = b"\x02" * 32
    with pytest.raises(Unauthorized):
        ring.recheck(asked)


async def test_a_key_opens_no_other_episode(tmp_path):
    with open_store(tmp_path) as store:
        await store.groups.register("train", 0, 1, TASK, 2)
        mine, other = "train-000000-00", "train-000000-01"
        asked = admitted(RING, RING.episode_key(mine, 1))
        assert await require_episode(asked, mine, store.episodes) == EpisodeKey(mine, 1)
        with pytest.raises(Forbidden):
            await require_episode(asked, other, store.episodes)
        with pytest.raises(Forbidden):
            await require_episode(admitted(RING, RING.job_key), mine, store.episodes)
        with pytest.raises(NotFound):
            await require_episode(asked, "train-000009-00", store.episodes)


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
        calls(key, ring=SEATS)
        asked = admitted(SEATS, key)
        assert require_seat(asked, seat.episode_id) == seat
        for refused in (require_job, lambda r: require_role(r, "white"), lambda r: require_seat(r, "other")):
            with pytest.raises(Forbidden):
                refused(asked)
        with pytest.raises(Forbidden):
            admitted(SEATS, key, "/page/x")
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
    asked = admitted(SEATS, key)
    assert require_role(asked, "white")
    assert not require_role(admitted(SEATS, SEATS.job_key), "white")
    for refused in (
        require_job,
        lambda r: calls(key, ring=SEATS),
        lambda r: require_seat(r, WHITE.episode_id),
        lambda r: require_role(r, "black / ♟"),
    ):
        with pytest.raises(Forbidden):
            refused(asked)
    with pytest.raises(Forbidden):
        admitted(SEATS, key, "/page/x")
    for ring in (RING, KeyRing(lambda: SECRET, "other", seats=["white"])):
        with pytest.raises(Unauthorized):
            ring.check(key)
