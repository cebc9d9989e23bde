from __future__ import annotations

import asyncio
import logging
import re
import traceback
from pathlib import Path

import pytest
import sqlalchemy as sa

from palestra.errors import Conflict, Forbidden, InvalidRequest, NotFound, PalestraError
from palestra.types.states import JobState
from palestra_service.accounts.administration import Administration
from palestra_service.accounts.identity import Identities
from palestra_service.rights import Role
from palestra_service.store.control_store import ControlStore
from palestra_service.store.tables import metadata
from unit.control.building import REQUEST, identity, submit


@pytest.fixture
async def admin(administration, identities):
    return await identities.authenticate((await administration.first_start()).secret)


async def test_the_first_start_makes_one_admin_once(administration, identities, store):
    keys = await asyncio.gather(*(administration.first_start() for _ in range(5)))
    made = [key for key in keys if key is not None]
    assert len(made) == 1
    assert await administration.first_start() is None
    who = await identities.authenticate(made[0].secret)
    assert (who.tenant, who.user, who.role) == ("default", "admin", Role.ADMIN)
    assert [(e.who, e.what, e.target) for e in await store.audit("default")] == [("palestra", "tenant.add", "default")]


async def test_an_operator_who_lost_all_keys_gets_one(administration, identities, admin):
    await administration.add_user(admin, "bob", Role.ADMIN)
    await administration.change_role(admin, "admin", Role.MEMBER)
    await administration.revoke_key(identity(user="bob"), admin.key_id)
    who = await identities.authenticate((await administration.recover()).secret)
    assert (who.user, who.role) == ("admin", Role.ADMIN)


async def test_a_tenant_comes_with_its_admin_who_sees_nothing_else(administration, identities, store, admin):
    job = await submit(store, "default", "admin")
    with pytest.raises(Conflict):
        await administration.add_tenant(admin, "default")
    other = await identities.authenticate((await administration.add_tenant(admin, "blue")).secret)
    assert list(await administration.tenants(admin)) == ["blue", "default"]
    assert (other.tenant, other.user, other.role) == ("blue", "admin", Role.ADMIN)
    assert [user.tenant for user in await administration.users(other)] == ["blue"]
    assert [key.tenant for key in await administration.keys(other)] == ["blue"]
    assert await store.audit("blue") == []
    for refused in (
        administration.tenants(other),
        administration.add_tenant(other, "red"),
        administration.change_quota(other, "blue", {"gpus": 9.0}),
        administration.drain(other, True),
    ):
        with pytest.raises(Forbidden):
            await refused
    await administration.add_user(admin, "bob", Role.MEMBER)
    for refused in (
        administration.revoke_key(other, admin.key_id),
        administration.create_key(other, user="bob"),
        administration.change_role(other, "bob", Role.MEMBER),
        administration.remove_user(other, "bob"),
        store.job("blue", job.job_id),
    ):
        with pytest.raises(NotFound):
            await refused
    assert await administration.keys(other, "bob") == []


async def test_members_have_only_their_own_keys(administration, identities, admin):
    bob = await identities.authenticate((await administration.add_user(admin, "bob", Role.MEMBER)).secret)
    for refused in (
        administration.users(bob),
        administration.add_user(bob, "eve", Role.MEMBER),
        administration.change_role(bob, "bob", Role.ADMIN),
        administration.remove_user(bob, "admin"),
        administration.keys(bob, "admin"),
        administration.create_key(bob, user="admin"),
        administration.create_key(bob, limits={"open_jobs": 10**6}),
        administration.tenants(bob),
    ):
        with pytest.raises(Forbidden):
            await refused
    with pytest.raises(NotFound):
        await administration.revoke_key(bob, admin.key_id)
    made = await administration.create_key(bob, label="laptop")
    assert {key.label for key in await administration.keys(bob)} == {"laptop", "first"}
    await administration.revoke_key(bob, made.record.key_id)


async def test_the_last_admin_stays(administration, identities, admin):
    for refused in (
        administration.change_role(admin, "admin", Role.MEMBER),
        administration.remove_user(admin, "admin"),
    ):
        with pytest.raises(Conflict, match="last admin"):
            await refused
    bob = await administration.add_user(admin, "bob", Role.ADMIN)
    outcomes = await asyncio.gather(
        administration.remove_user(admin, "admin"), administration.remove_user(admin, "bob"), return_exceptions=True
    )
    assert sorted(type(o).__name__ for o in outcomes) == ["Conflict", "NoneType"]
    await identities.authenticate(bob.secret)


async def test_a_name_is_never_given_twice(administration, admin):
    await administration.add_user(admin, "bob", Role.MEMBER)
    with pytest.raises(Conflict, match="is a user"):
        await administration.add_user(admin, "bob", Role.MEMBER)
    await administration.remove_user(admin, "bob")
    with pytest.raises(Conflict, match="was a user"):
        await administration.add_user(admin, "bob", Role.MEMBER)
    with pytest.raises(NotFound):
        await administration.create_key(admin, user="bob")


@pytest.mark.parametrize(
    "name", ["", "-x", "a b", "a/b", "é", "a\0", "\ud800", "x" * 65, "a\n", "' OR 1=1 --", "x" * 2**20]
)
async def test_a_name_that_is_no_identifier_is_refused(administration, admin, name):
    for refused in (administration.add_user(admin, name, Role.MEMBER), administration.add_tenant(admin, name)):
        with pytest.raises(InvalidRequest):
            await refused
    for missing in (
        administration.change_role(admin, name, Role.MEMBER),
        administration.remove_user(admin, name),
        administration.keys(admin, name),
        administration.create_key(admin, user=name),
        administration.revoke_key(admin, name),
    ):
        with pytest.raises(NotFound):
            await missing


@pytest.mark.parametrize(
    "values",
    [
        {"lifetime_seconds": 0},
        {"lifetime_seconds": -1},
        {"lifetime_seconds": float("nan")},
        {"lifetime_seconds": float("inf")},
        {"label": "a\0"},
        {"label": "x" * 129},
        {"label": "pk_0123456789ab_" + "x" * 43},
    ],
)
async def test_a_key_that_can_not_be_made_as_asked_is_refused(administration, admin, values):
    with pytest.raises(InvalidRequest):
        await administration.create_key(admin, **values)


async def test_every_change_is_in_the_audit_log_and_nothing_that_failed(administration, store, admin):
    key = await administration.add_user(admin, "bob", Role.MEMBER)
    await administration.change_role(admin, "bob", Role.ADMIN)
    await administration.revoke_key(admin, key.record.key_id)
    await administration.revoke_key(admin, key.record.key_id)
    await administration.remove_user(admin, "bob")
    with pytest.raises(PalestraError):
        await administration.remove_user(admin, "bob")
    assert [(e.who, e.key_id, e.what, e.target) for e in await store.audit("default")][:-1] == [
        ("admin", admin.key_id, what, target)
        for what, target in (
            ("user.remove", "bob"),
            ("key.revoke", f"{key.record.key_id} of bob"),
            ("key.revoke", f"{key.record.key_id} of bob"),
            ("user.change", "bob to admin"),
            ("user.add", "bob as member"),
        )
    ]


async def test_no_secret_is_in_a_row_a_file_a_repr_a_log_or_an_error(url, clock, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    texts, made = [], []
    with ControlStore(url, clock) as store:
        identities = Identities(store)
        administration = Administration(store, identities)
        made.append(await administration.first_start())
        admin = await identities.authenticate(made[0].secret)
        made += [
            await administration.add_user(admin, "bob", Role.MEMBER),
            await administration.create_key(admin, lifetime_seconds=10),
            await administration.add_tenant(admin, "blue"),
            await administration.recover(),
        ]
        made.append(await administration.create_key(admin))
        await administration.revoke_key(admin, made[1].record.key_id)
        secrets = [key.secret for key in made]
        for secret in secrets:
            await store.append_audit("default", secret, None, secret, secret)
            texts.append(repr(await identities.authenticate(secret)) if secret != secrets[1] else "")
        job = await submit(store, "default")
        await store.change_state(
            job.job_id, JobState.QUEUED, JobState.STARTING, f"with {secrets[0]}", log_tail=f"key={secrets[0]}"
        )
        clock.advance(20)
        for attempt in (
            lambda s: identities.authenticate(s),
            lambda s: identities.authenticate(s + "x"),
            lambda s: submit(store, name=s),
            lambda s: submit(store, config={"k": s}),
            lambda s: store.submit_job("a", "ann", REQUEST, s),
            lambda s: administration.add_user(admin, s, Role.MEMBER),
            lambda s: administration.create_key(admin, label=s),
            lambda s: administration.revoke_key(admin, s),
        ):
            for secret in secrets:
                try:
                    await attempt(secret)
                except PalestraError as error:
                    lines = traceback.format_exception_only(error)
                    texts.append("".join(lines) + repr(error.__cause__) + repr(error.args))
        texts += [repr(made), str(made), repr(vars(identities)), repr(await administration.keys(admin))]
        await identities.settle()
        rows = await store.read(lambda c: [list(c.execute(sa.select(t))) for t in metadata.tables.values()])
        texts.append(repr(rows))
        found = b"".join(file.read_bytes() for file in Path(tmp_path).rglob("*") if file.is_file())
    found += b"".join(file.read_bytes() for file in Path(tmp_path).rglob("*") if file.is_file())
    texts += [caplog.text, *capfd.readouterr()]
    assert any("pk_" in text for text in texts)
    assert url.startswith("postgresql") or made[0].record.key_id.encode() in found
    for secret in secrets:
        tail = re.fullmatch(r"pk_[0-9a-f]{12}_(.{43})", secret)[1]
        assert not any(tail in text for text in texts)
        assert tail.encode() not in found
