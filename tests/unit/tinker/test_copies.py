"""Copies of checkpoints, and when sessions and models are forgotten."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from palestra_bases.tinker.records import TinkerLimits
from unit.tinker.serving import Client, Model, running

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("tinker")) as started:
        yield started


@pytest.fixture
def ada(server):
    return Client(server.url, server.key("ada"))


def copy(client: Client, path: str, key: str = "k", **fields):
    return client.http.post("copy_weights", json={"source_path": path, **fields}, headers={"X-Idempotency-Key": key})


def loaded(client: Client, path: str) -> str:
    """A new model made of a checkpoint, with its optimizer."""
    client.session()
    body = {"session_id": client.session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    accepted = client.good("load_weights", body)
    client.result(accepted["request_id"])
    return accepted["model_id"]


def test_a_copy_is_on_the_disk_before_it_is_acknowledged(server, ada, monkeypatch):
    model, synced, sync = ada.model(), set(), os.fsync
    source = model.saves("one")
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(Path(os.readlink(f"/proc/self/fd/{fd}"))), sync(fd)))
    path = copy(ada, source).json()["tinker_path"]
    folder = server.do(lambda: server.server.service.saved.checkpoint("ada", path)).folder.resolve()
    assert {folder, folder.parent, folder.parent.parent, *folder.rglob("*")} <= synced


def test_a_copy_outlives_its_source_and_is_trained_on_as_the_source_would_be(server, ada):
    model = ada.model()
    model.train(2)
    source = model.saves("one")
    path = copy(ada, source).json()["tinker_path"]
    assert path.endswith("/weights/one")
    assert path != source
    assert copy(ada, source).json()["tinker_path"] == path, "the same request sent again"
    assert copy(ada, source, "other").json()["tinker_path"] != path
    model_id = path.removeprefix("tinker://").partition("/")[0]
    found = server.do(lambda: server.server.service.saved.checkpoint("ada", path))
    before = server.do(lambda: server.server.service.saved.checkpoint("ada", source))
    weights = "adapter_model.safetensors"
    assert (found.folder / weights).stat().st_ino == (before.folder / weights).stat().st_ino, "no bytes are duplicated"
    own = source.removeprefix("tinker://").partition("/")[0]
    assert ada.http.delete(f"training_runs/{own}/checkpoints/weights/one").status_code == 200
    assert ada.http.get(f"training_runs/{model_id}").json()["last_checkpoint"]["tinker_path"] == path
    one = Model(ada, loaded(ada, path))
    one.train()
    model.train()
    np.testing.assert_array_equal(one.logprobs(), model.logprobs())
    # The copy itself belongs to a model that is never trained.
    refused = ada.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert (refused.status_code, "is never trained" in refused.json()["error"]) == (422, True)


def test_a_copy_of_sampler_weights_samples_the_same_and_may_expire(server, ada):
    model = ada.model()
    model.train()
    source = model.samples_as("shown")
    session = ada.session()
    answer = copy(ada, source, session_id=session, model_seq_id=3, ttl_seconds=3600)
    path = answer.json()["tinker_path"]
    assert path == f"tinker://{session}:train:3/sampler_weights/shown"
    (listed,) = ada.http.get(f"training_runs/{session}:train:3/checkpoints").json()["checkpoints"]
    assert (listed["tinker_path"], listed["public"], listed["expires_at"] is None) == (path, False, False)
    one, other = (ada.sampler(model_path=name) for name in (source, path))
    tokens = [ada.sample(name, [1, 2, 3], max_tokens=6, seed=1).sequences[0].tokens for name in (one, other)]
    assert tokens[0] == tokens[1]


def test_another_tenant_copies_what_is_published_alone(server, ada):
    ben = Client(server.url, server.key("ben"))
    model = ada.model()
    model.train()
    path = model.samples_as("shown")
    assert copy(ben, path).status_code == 404
    ada.good(f"training_runs/{model.model_id}/checkpoints/sampler_weights/shown/publish", {})
    mine = copy(ben, path).json()["tinker_path"]
    assert ada.http.delete(f"training_runs/{model.model_id}/checkpoints/sampler_weights/shown").status_code == 200
    assert ben.sample(ben.sampler(model_path=mine), [1, 2], max_tokens=3).sequences[0].tokens
    assert copy(ada, mine, "k2").status_code == 404


def test_what_can_not_be_copied_is_refused_in_a_sentence(ada):
    path = ada.model().saves("x")
    own = path.removeprefix("tinker://").partition("/")[0]
    session, number = own.split(":train:")
    for answer, status, said in (
        (copy(ada, "tinker://nothing"), 404, "no checkpoint 'tinker://nothing'"),
        (copy(ada, path, ttl_seconds=5), 422, "ttl_seconds is 5"),
        (copy(ada, path, weights_access_token="secret"), 400, "weights_access_token is not supported here"),
        (copy(ada, path, ""), 422, "X-Idempotency-Key"),
        (copy(ada, path, session_id="session-x", model_seq_id=0), 404, "no session 'session-x'"),
        (copy(ada, path, session_id=session, model_seq_id=int(number)), 422, "has a model with the number"),
    ):
        assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text


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
