"""`palestra top` of a live run: versions with their stages, sessions, scores and feedback."""

from __future__ import annotations

import pytest

from palestra.cli.main import main
from palestra_live.feedback import Feedback
from palestra_live.gate.ledger import GateLedger
from palestra_live.store import LiveStore, NewSession, SessionState
from palestra_live.watching import clusters_of, table_of
from unit.dashboard.recorded import record
from unit.live.stories import passing, started

pytestmark = pytest.mark.anyio


async def used(
    store: LiveStore, name: str, policy: str, score: float | None, state=SessionState.DONE, cluster=None
) -> None:
    await store.begin(NewSession(session_id=name, subject=None, cluster=cluster, train=True), policy)
    given = Feedback(id=name, session=name, subject=None, call=None, kind="score", value=score)
    if score is not None:
        await store.add_feedback(given)
    await store.change(name, state=state.value, score=score)


async def test_each_version_has_a_line_with_what_it_served(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    await record(tmp_path)
    assert table_of(tmp_path) is None, "it is no live run"
    store, ledger = LiveStore(tmp_path, 10.0), GateLedger(tmp_path)
    await ledger.add_all([(f"k{n}", one) for n, one in enumerate((started(), *passing(12)))])
    for number in range(3):
        await used(store, f"a{number}", "policy@step-0", number / 2)
    await used(store, "b", "policy@step-0", None)
    await used(store, "c", "policy@step-12", None, SessionState.OPEN)
    _, rows = table_of(tmp_path)
    assert rows == [("12", "canary", "1", "1", "0", "", "0"), ("0", "live", "4", "0", "3", "0.5", "3")]
    assert main(["top", str(tmp_path), "--once"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "live", "4", "0", "3", "0.5", "3"] in lines
    ledger.close()
    store.close()


async def test_without_a_gate_the_newest_weights_serve(tmp_path):
    store = LiveStore(tmp_path, 10.0)
    assert table_of(tmp_path)[1] == []
    await used(store, "a", "policy", 1.0)
    assert table_of(tmp_path)[1] == [("policy", "the newest weights serve", "1", "0", "1", "1", "1")]
    store.close()


async def test_each_cluster_has_a_line_and_a_judge_s_score_is_no_feedback(tmp_path):
    store = LiveStore(tmp_path, 10.0)
    await used(store, "a", "policy", 1.0)
    assert clusters_of(tmp_path) is None
    await used(store, "b", "policy@step-0", 0.0, cluster="billing")
    await used(store, "c", "policy@step-5", None, cluster="billing")
    await store.add_verdict("c", 0.5)
    names, rows = clusters_of(tmp_path)
    assert rows == [("billing", "2", "2", "0", "2", "0.25", "1"), ("without one", "1", "1", "0", "1", "1", "1")]
    assert len(names) == len(rows[0])
    store.close()
