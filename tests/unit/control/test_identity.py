from __future__ import annotations

import asyncio
import secrets

import pytest

from palestra.errors import Unauthorized
from palestra_service.accounts import identity
from palestra_service.accounts.identity import UNKNOWN, Identities, local_operator
from palestra_service.rights import Role, make_secret
from palestra_service.store import accounts


@pytest.fixture
async def admin_key(administration):
    return await administration.first_start()


async def refused(identities, secret):
    with pytest.raises(Unauthorized) as caught:
        await identities.authenticate(secret)
    return str(caught.value)


async def test_a_key_says_who_it_is(identities, admin_key):
    who = await identities.authenticate(admin_key.secret)
    assert (who.tenant, who.user, who.role) == ("default", "admin", Role.ADMIN)
    assert who.key_id == admin_key.record.key_id
    assert await identities.authenticate(admin_key.secret) == who


async def test_whatever_is_wrong_the_answer_is_the_same(administration, identities, admin_key):
    admin = await identities.authenticate(admin_key.secret)
    revoked = await administration.create_key(admin)
    await administration.revoke_key(admin, revoked.record.key_id)
    removed = await administration.add_user(admin, "bob", Role.MEMBER)
    await administration.remove_user(admin, "bob")
    expired = await administration.create_key(admin, lifetime_seconds=1e-9)
    guess = expired.secret[:-1] + ("A" if expired.secret[-1] != "A" else "B")
    for secret in (
        "x",
        "pk_",
        "\ud800",
        "pk_0123456789ab_" + "\0" * 43,
        make_secret(secrets.token_bytes)[1],
        admin_key.secret + "x",
        admin_key.secret[:-1],
        admin_key.secret.upper(),
        f"pk_{admin_key.record.key_id}_{'A' * 43}",
        revoked.secret,
        removed.secret,
        guess,
        "x" * 2**20,
    ):
        assert await refused(identities, secret) == UNKNOWN
    for secret in (None, ""):
        assert "Authorization" in await refused(identities, secret)


async def test_only_who_has_the_key_is_told_that_it_expired(administration, identities, admin_key, clock):
    admin = await identities.authenticate(admin_key.secret)
    key = await administration.create_key(admin, lifetime_seconds=60)
    clock.advance(59)
    await identities.authenticate(key.secret)
    clock.advance(1)
    assert "expired at 2027-01-15 08:01:00 UTC" in await refused(identities, key.secret)
    assert key.secret[16:] not in await refused(identities, key.secret)
    assert await refused(identities, key.secret[:-2] + "__") == UNKNOWN


async def test_no_jump_of_the_clock_makes_a_key_live_longer(administration, identities, admin_key, clock, store):
    admin = await identities.authenticate(admin_key.secret)
    key = await administration.create_key(admin, lifetime_seconds=3600)
    clock.wall -= 10 * 86400
    await identities.authenticate(key.secret)
    clock.advance(3600)
    assert "expired" in await refused(identities, key.secret)
    clock.wall += 10 * 86400
    assert "expired" in await refused(identities, key.secret)
    key = await administration.create_key(admin, lifetime_seconds=3600)
    clock.wall += 7200  # ahead, and back
    assert "expired" in await refused(identities, key.secret)
    clock.wall -= 7200
    await identities.authenticate(key.secret)
    revoked = await administration.create_key(admin, lifetime_seconds=3600)
    await administration.revoke_key(admin, revoked.record.key_id)
    for jump in (-1e6, 2e6):
        clock.wall += jump
        assert await refused(identities, revoked.secret) == UNKNOWN


async def use_until_refused(identities, secret):
    while True:
        try:
            await identities.authenticate(secret)
        except Unauthorized:
            return
        await asyncio.sleep(0)


async def test_a_revoked_key_opens_nothing_from_the_moment_of_the_answer(administration, identities, admin_key):
    admin = await identities.authenticate(admin_key.secret)
    for _ in range(5):
        key = await administration.create_key(admin)
        users = [asyncio.create_task(use_until_refused(identities, key.secret)) for _ in range(4)]
        await asyncio.sleep(0.01)
        await administration.revoke_key(admin, key.record.key_id)
        assert await refused(identities, key.secret) == UNKNOWN
        await asyncio.wait_for(asyncio.gather(*users), 60)


async def test_a_look_up_that_a_revocation_overtakes_is_not_remembered(administration, identities, admin_key, store):
    """The look-up has read the key before it is revoked, and comes back after."""
    admin = await identities.authenticate(admin_key.secret)
    key = await administration.create_key(admin)
    read, goes_on, has_read = store.read, asyncio.Event(), asyncio.Event()

    async def slow(operation):
        result = await read(operation)
        has_read.set()
        await goes_on.wait()
        return result

    store.read = slow
    late = asyncio.create_task(identities.authenticate(key.secret))
    await has_read.wait()
    store.read = read
    await administration.revoke_key(admin, key.record.key_id)
    goes_on.set()
    await late  # it came before the revocation was answered
    assert await refused(identities, key.secret) == UNKNOWN


async def test_a_revocation_whose_caller_goes_away_is_carried_out(administration, identities, admin_key, store):
    admin = await identities.authenticate(admin_key.secret)
    key = await administration.create_key(admin)
    await identities.authenticate(key.secret)  # remembered
    await identities.settle()
    submit, committed, goes_on = store._db.submit, asyncio.Event(), asyncio.Event()

    async def slow(*args):
        await submit(*args)
        committed.set()
        await goes_on.wait()

    store._db.submit = slow
    caller = asyncio.create_task(administration.revoke_key(admin, key.record.key_id))
    await committed.wait()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert caller.cancelled()
    store._db.submit = submit
    goes_on.set()
    await asyncio.wait_for(use_until_refused(identities, key.secret), 60)
    assert await refused(identities, key.secret) == UNKNOWN


async def test_a_change_of_role_counts_at_once(administration, identities, admin_key):
    admin = await identities.authenticate(admin_key.secret)
    bob = await administration.add_user(admin, "bob", Role.MEMBER)
    for role in (Role.ADMIN, Role.MEMBER):
        await administration.change_role(admin, "bob", role)
        assert (await identities.authenticate(bob.secret)).role is role


async def test_keys_are_looked_up_once_and_their_use_is_written_seldom(
    identities, admin_key, store, clock, monkeypatch
):
    reads, writes = [], []
    read, write = store.read, store.write
    monkeypatch.setattr(store, "read", lambda *a: reads.append(a) or read(*a))
    monkeypatch.setattr(store, "write", lambda *a: writes.append(a) or write(*a))

    async def last_used():
        await identities.settle()
        return (await read(lambda c: accounts.keys_of(c, "default", "admin")))[0].last_used_at

    first = clock.wall
    for _ in range(50):
        await identities.authenticate(admin_key.secret)
    assert await last_used() == first
    clock.advance(299)
    await identities.authenticate(admin_key.secret)
    assert await last_used() == first
    clock.advance(1)
    await identities.authenticate(admin_key.secret)
    assert await last_used() == clock.wall
    assert (len(reads), len(writes)) == (1, 2)


async def test_what_is_remembered_is_bounded(administration, store, admin_key, monkeypatch):
    monkeypatch.setattr(identity, "MOST_REMEMBERED", 2)
    identities = Identities(store)
    admin = await identities.authenticate(admin_key.secret)
    for key in [await administration.create_key(admin) for _ in range(4)]:
        await identities.authenticate(key.secret)
    assert len(identities._known) == len(identities._touched) == 2
    await identities.authenticate(admin_key.secret)
    await identities.settle()


def test_without_keys_everybody_is_the_operator():
    who = local_operator()
    assert (who.tenant, who.role, who.key_id) == ("default", Role.ADMIN, None)
