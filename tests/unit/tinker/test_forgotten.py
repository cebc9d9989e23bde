"""When sessions and models are forgotten."""

from __future__ import annotations

import sqlite3

import pytest

from palestra_bases.tinker.records import TinkerLimits
from unit.tinker.serving import Client, running

pytestmark = pytest.mark.ci


@pytest.mark.slow
def test_sessions_and_models_are_forgotten_when_nothing_can_use_them(tmp_path):
    """Rows of a session stay while it is alive, or while one of its models has a checkpoint or waits for something."""
    limits = TinkerLimits(poll_seconds=5.0, kept_seconds=0.0)  # so that a session is forgotten as soon as it is over

    def rows(table: str) -> set[str]:
        names = {"models": "model_id", "sessions": "session_id", "requests": "target"}
        with sqlite3.connect(tmp_path / "tinker.db") as db:
            return {name for (name,) in db.execute(f"SELECT {names[table]} FROM {table}")}

    with running(tmp_path, limits) as server:
        clients = [Client(server.url, server.key("ada")) for _ in range(3)]
        _, saved, over = (client.model() for client in clients)
        for model in (saved, over):
            model.train()
        path = saved.saves("kept")
        for client in clients[1:]:
            client.good(f"sessions/{client.session_id}/finish", {"reason": {}})
        empty = Client(server.url, server.key("ada"))
        empty.session()
        empty.good(f"sessions/{empty.session_id}/finish", {"reason": {}})
        sweep = server.server.service.sweep
        server.do(sweep)
        assert over.model_id not in rows("models")
        assert saved.model_id in rows("models")
        assert over.model_id not in rows("requests")
        assert not {empty.session_id, clients[2].session_id} & rows("sessions")
        assert clients[2].post("get_info", {"model_id": over.model_id}).status_code == 404
        late = {"model_id": over.model_id, "seq_id": over.seq_id + 1, "adam_params": {}}
        assert clients[2].post("optim_step", late).status_code == 404
        assert over.model_id not in rows("requests")
        own = f"training_runs/{saved.model_id}/checkpoints/weights/kept"
        assert clients[1].http.delete(own).status_code == 200
        server.do(sweep)
        assert saved.model_id not in rows("models"), path
    with running(tmp_path, limits) as server:  # a server that is started again finds nothing that is missing
        assert Client(server.url, server.key("ada")).model().model_id in rows("models")


def test_a_living_session_is_kept_however_long_its_models_rest(tmp_path):
    with running(tmp_path, TinkerLimits(poll_seconds=5.0, kept_seconds=3600.0)) as server:
        client = Client(server.url, server.key("ada"))
        model = client.model()
        db = server.server.service.journal.db
        old = "UPDATE models SET used_at = used_at - 7200"
        server.do(lambda: db.write(lambda c: c.exec_driver_sql(old)))
        server.do(server.server.service.sweep)
        assert client.good("get_info", {"model_id": model.model_id})["model_id"] == model.model_id
        over = "UPDATE sessions SET seen_at = seen_at - 7200"
        server.do(lambda: db.write(lambda c: c.exec_driver_sql(over)))
        server.do(server.server.service.sweep)
        assert client.post("get_info", {"model_id": model.model_id}).status_code == 404
