"""What is deleted is the session's own, also where its name begins another's."""

from __future__ import annotations

import pytest

from palestra_live.forgetting import forget
from palestra_live.store import LiveStore, NewSession
from unit.building import open_store

pytestmark = pytest.mark.anyio


async def test_events_of_sessions_with_longer_names_stay(tmp_path):
    store, live = open_store(tmp_path), LiveStore(tmp_path, 10.0)
    for name in ("s1", "s10"):
        await live.begin(NewSession(session_id=name, subject=name, cluster=None, train=True), "policy@step-0")
        await store.log.add_event("session_stale", {"session": name, "step": 1})
    live.close()
    assert forget(tmp_path, ["s1"], "s1").sessions == 1
    left = [one.data["session"] for one in await store.log.events(0) if one.kind == "session_stale"]
    store.close()
    assert left == ["s10"]
