"""The database commits and its answer is lost: every operation finds its own row, and says what it has done."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from palestra.database.writer import Writer
from palestra.errors import Forbidden, NotFound, StoreUnreachable
from palestra.types.states import JobState
from palestra_service.accounts.administration import FIRST_USER
from palestra_service.placement.tenants import Quota
from palestra_service.rights import OPERATOR_TENANT, Role
from palestra_service.store.allowances import Spent
from palestra_service.store.tables import audit
from unit.control.building import identity, submit


@pytest.fixture
def lose_answer(monkeypatch):
    """A function that has the answer of the next commit lost."""
    really, armed = Writer._transaction, []

    def transaction(self, connection, group):
        really(self, connection, group)
        if armed:
            armed.clear()
            raise StoreUnreachable("the answer was lost")

    monkeypatch.setattr(Writer, "_transaction", transaction)
    yield lambda: armed.append(True)
    assert armed == []


async def opens(identities, key, tenant: str, user: str) -> bool:
    found = await identities.authenticate(key.secret)
    return (found.tenant, found.user) == (tenant, user)


async def test_keys_that_are_made_open_what_they_were_made_for(administration, identities, store, lose_answer):
    lose_answer()
    assert await opens(identities, await administration.first_start(), OPERATOR_TENANT, FIRST_USER)
    by = identity()
    lose_answer()
    assert await opens(identities, await administration.add_tenant(by, "physics"), "physics", FIRST_USER)
    lose_answer()
    user = await administration.add_user(by, "ann", Role.MEMBER)
    assert await opens(identities, user, OPERATOR_TENANT, "ann")
    lose_answer()
    assert await opens(identities, await administration.create_key(by, "ann"), OPERATOR_TENANT, "ann")
    lose_answer()
    assert await opens(identities, await administration.recover(), OPERATOR_TENANT, FIRST_USER)
    lose_answer()
    assert await opens(identities, await administration.admin_key(by, "physics"), "physics", FIRST_USER)
    assert len(await administration.keys(by, "ann")) == 2
    whats = await store.read(lambda c: list(c.execute(sa.select(audit.c.what)).scalars()))
    assert len(whats) == 7  # each once, and the operator's key in the logs of both tenants


async def test_changes_are_acknowledged(administration, store, lose_answer):
    by = identity()
    await administration.first_start()
    await administration.add_user(by, "ann", Role.MEMBER)
    lose_answer()
    await administration.change_role(by, "ann", Role.ADMIN)
    lose_answer()
    await administration.remove_user(by, "ann")
    with pytest.raises(NotFound):
        await administration.remove_user(by, "ann")
    lose_answer()
    assert await administration.change_quota(by, OPERATOR_TENANT, {"jobs": 2}) == (Quota(jobs=2), Spent())
    lose_answer()
    job = await submit(store)
    lose_answer()
    await store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "there is room")
    lose_answer()
    await store.request_cancel("a", job.job_id, "enough")
    assert [found.job_id for found in await store.live()] == [job.job_id]


async def test_the_operator_makes_a_key_for_the_admin_of_any_tenant(administration, identities):
    by = identity()
    await administration.first_start()
    physics = await identities.authenticate((await administration.add_tenant(by, "physics")).secret)
    await administration.add_user(physics, "eve", Role.ADMIN)
    await administration.remove_user(physics, FIRST_USER)
    assert await opens(identities, await administration.admin_key(by, "physics"), "physics", "eve")
    for name in ("chemistry", "../x"):
        with pytest.raises(NotFound):
            await administration.admin_key(by, name)
    with pytest.raises(Forbidden):
        await administration.admin_key(physics, OPERATOR_TENANT)


async def test_its_route(http):
    assert (await http.post("/tenants", json={"name": "physics"})).status_code == 201
    made = await http.post("/tenants/physics/keys")
    assert (made.status_code, made.json()["user"]) == (201, FIRST_USER)
    assert (await http.get("/me", headers={"authorization": f"Bearer {made.json()['secret']}"})).json()[
        "tenant"
    ] == "physics"
