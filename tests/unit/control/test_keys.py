from __future__ import annotations

import hashlib
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra_service.rights import ExpiryClock, digest_of, fits, key_id_of, make_secret
from palestra_service.store.stored_text import has_secret, redact
from unit.building import FakeClock


def test_a_key_has_32_random_bytes_and_says_its_id():
    asked = []

    def random(count):
        asked.append(count)
        return bytes(range(count))

    key_id, secret = make_secret(random)
    assert asked == [6, 32]
    assert secret == f"pk_{key_id}_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert key_id_of(secret) == key_id == "000102030405"


def test_what_is_stored_is_the_sha_256():
    _, secret = make_secret(secrets.token_bytes)
    assert digest_of(secret) == hashlib.sha256(secret.encode()).hexdigest()
    assert fits(secret, digest_of(secret))
    assert not fits(secret, digest_of(secret + "x"))
    assert not fits(secret, "")


@given(st.text() | st.from_regex(r"pk_[0-9a-f]{10,13}_[A-Za-z0-9_-]{42,44}\n?", fullmatch=True))
def test_anything_may_come_as_a_key(text):
    found = key_id_of(text)
    assert found is None or (len(text) == 59 and text.startswith(f"pk_{found}_"))
    assert not fits(text, "")


@pytest.mark.parametrize("text", ["\ud800", "pk_٠١٢٣٤٥٦٧٨٩ab_" + "a" * 43, "pk_0123456789ab_" + "é" * 43])
def test_what_is_not_ascii_is_no_key(text):
    assert key_id_of(text) is None
    assert not fits(text, "0" * 64)


@given(st.binary(min_size=38, max_size=38), st.text(alphabet="ab -_/.:\"'\n", max_size=5), st.text(max_size=5))
def test_no_key_survives_redaction_wherever_it_stands(data, before, after):
    key_id, secret = make_secret(lambda count: data[:count] if count == 6 else data[6:])
    text = before + secret + after
    assert has_secret(text)
    assert secret[16:] not in redact(text)
    assert key_id in redact(text)
    assert not has_secret(redact(text))


def test_expiry_goes_by_the_later_of_the_clock_and_the_time_that_passed():
    clock = FakeClock()
    expiry = ExpiryClock(clock)
    start = clock.wall
    assert expiry.now() == start
    clock.advance(10)
    assert expiry.now() == start + 10
    clock.wall -= 1e6  # set back: no key lives longer
    assert expiry.now() == start + 10
    clock.ticks += 5
    assert expiry.now() == start + 15
    clock.wall += 2e6  # ahead
    assert expiry.now() == clock.wall
    clock.wall -= 2e6
    assert expiry.now() == start + 15
