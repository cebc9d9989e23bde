"""No tenant sees anything of another one, on any route; and there is no route without a key."""

from __future__ import annotations

import pytest

from palestra.errors import ConfigError, Unauthorized
from palestra_bases.tenant_keys import Tenants
from palestra_bases.tinker.routes import create_tinker_app
from unit.tinker.messages import batch_message
from unit.tinker.serving import TINY, Client, data_of, running

OF_NOBODY = {  # routes that show and change nothing of a tenant
    ("GET", "healthz"),
    ("POST", "client/config"),
    ("POST", "client/dynamic_config"),
    ("POST", "telemetry"),
    ("GET", "get_server_capabilities"),
    ("POST", "create_session"),
    ("POST", "create_custom_loss"),
}
BY_LINK = {("GET", "external_weights/{model_id}/{name}/{file:path}")}  # see test_downloads.py
LISTS = {
    ("GET", "training_runs"): "training_runs",
    ("GET", "checkpoints"): "checkpoints",
    ("GET", "sessions"): "sessions",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("tinker")) as started:
        yield started


class Owned:
    """One of everything, of ada."""

    def __init__(self, server) -> None:
        self.client = Client(server.url, server.key("ada"))
        self.model = self.client.model()
        self.model.train()
        self.path, self.sampled = self.model.saves("one"), self.model.samples_as("one")
        self.sampler = self.client.sampler(model_path=self.sampled)
        self.request = self.model.computes(data_of(0))

    def calls(self, session_id: str):
        """Each route with a body that names something of ada's, in a session of the caller's."""
        model, seq = self.model.model_id, self.model.seq_id + 1
        in_order = {"model_id": model, "seq_id": seq}
        prompt = {"chunks": [{"tokens": [1, 2]}]}
        forward = batch_message(data_of(0), model_id=model, seq_id=seq).SerializeToString()
        load = {"path": self.path, "optimizer": True}
        sampler = {"sampling_session_seq_id": 7, "model_path": self.sampled}
        lora = {"base_model": TINY, "lora_config": {"rank": 2}, "model_seq_id": 7}
        return [
            ("POST", "session_heartbeat", {"session_id": self.client.session_id}),
            ("POST", "sessions/{session_id}/finish", {"reason": {}}),
            ("GET", "sessions/{session_id}", None),
            ("POST", "create_model", lora | {"session_id": self.client.session_id}),
            ("POST", "load_weights", load | {"session_id": session_id, "model_seq_id": 8}),
            ("POST", "load_weights", load | in_order),
            ("POST", "forward_backward", forward),
            ("POST", "optim_step", in_order | {"adam_params": {}}),
            ("POST", "save_weights", in_order | {"path": "x"}),
            ("POST", "save_weights_for_sampler", in_order | {"path": "x"}),
            ("POST", "save_weights_external", in_order | {"path": "x"}),
            ("POST", "get_info", {"model_id": model}),
            ("POST", "create_sampling_session", sampler | {"session_id": session_id}),
            ("POST", "create_sampling_session", sampler | {"session_id": self.client.session_id}),
            ("GET", "samplers/{sampler_id}", None),
            ("POST", "asample", {"sampling_session_id": self.sampler, "seq_id": 0, "prompt": prompt}),
            ("POST", "retrieve_future", {"request_id": self.request}),
            ("POST", "retrieve_futures", {"target": {"sampling_session_id": self.sampler}, "timeout": 0}),
            ("POST", "join_sampling_session", {"sampling_session_id": self.sampler}),
            ("POST", "cancel_future", {"request_id": self.request}),
            ("GET", "training_runs/{model_id}", None),
            ("GET", "training_runs/{model_id}/checkpoints", None),
            ("PUT", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/ttl", {"ttl_seconds": 3600}),
            ("DELETE", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}", None),
            ("POST", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/publish", {}),
            ("DELETE", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/publish", None),
            ("GET", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/external_weights_urls", None),
            ("POST", "weights_info", {"tinker_path": self.path}),
            ("POST", "copy_weights", {"source_path": self.path, "session_id": session_id, "model_seq_id": 9}),
        ]

    def url(self, route: str) -> str:
        return (
            route.replace("{session_id}", self.client.session_id)
            .replace("{sampler_id}", self.sampler)
            .replace("{model_id}", self.model.model_id)
            .replace("{checkpoint_id:path}", "weights/one")
        )


@pytest.fixture(scope="module")
def owned(server):
    return Owned(server)


def send(client: Client, method: str, url: str, body):
    if isinstance(body, bytes):
        return client.post(url, body)
    return client.http.request(method, url, **({} if body is None else {"json": body}))


def test_no_route_gives_a_tenant_anything_of_another(server, owned):
    ben = Client(server.url, server.key("ben"))
    session = ben.session()
    for method, route, body in owned.calls(session):
        answer = send(ben, method, owned.url(route), body)
        assert answer.status_code == 404, (route, answer.text)
        assert answer.json()["category"] == "user"
    for (_, route), key in LISTS.items():
        found = ben.http.get(route).json()[key]
        assert found == ([session] if key == "sessions" else [])
    # Nothing of ada's has changed.
    assert owned.client.post("session_heartbeat", {"session_id": owned.client.session_id}).status_code == 200
    assert owned.model.output(owned.request).metrics["loss:sum"] > 0
    owned.client.result(owned.model.steps())
    assert len(owned.client.http.get("checkpoints").json()["checkpoints"]) == 2


def test_every_route_is_looked_at_here(server, owned):
    tenants = Tenants(server.folder / "keys", (), "tml-")
    app = create_tinker_app(server.server.service, tenants)
    known = {
        (method, route.path.removeprefix("/api/v1/"))
        for route in app.routes
        if route.path.startswith("/api/v1/") and route.path != "/api/v1/{path:path}"
        for method in route.methods - {"HEAD"}
    }
    looked_at = {(method, route) for method, route, _ in owned.calls("s")}
    assert known == looked_at | OF_NOBODY | LISTS.keys() | BY_LINK


@pytest.mark.parametrize("key", [None, "tml-wrong", "", "tml-" + "0" * 48])
def test_without_a_good_key_there_is_nothing(server, owned, key):
    stranger = Client(server.url, key or "")
    if key is None:
        del stranger.http.headers["x-api-key"]
    everything = [(m, route, None if m == "GET" else {}) for m, route in OF_NOBODY | LISTS.keys()] + owned.calls("s")
    for method, route, body in everything:
        answer = send(stranger, method, owned.url(route), body)
        assert answer.status_code == (200 if route == "healthz" else 401), route


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    first = Tenants(tmp_path / "keys", ("ada",), "tml-")
    (path,) = first.files
    key = path.read_text()
    assert key.startswith("tml-")
    assert path.stat().st_mode & 0o777 == 0o600
    again = Tenants(tmp_path / "keys", ("ada", "ben"), "tml-")
    assert (again.of(key), path.read_text()) == ("ada", key)
    with pytest.raises(Unauthorized):
        again.of(key[:-1])
    with pytest.raises(Unauthorized):
        again.of(None)


@pytest.mark.parametrize("name", ["", "a/b", "..", "A", "x" * 65])
def test_a_name_of_a_tenant_is_a_name_of_a_file(tmp_path, name):
    with pytest.raises(ConfigError, match="tenant's name"):
        Tenants(tmp_path / "keys", (name,), "tml-")


def test_a_key_that_no_client_would_send_or_that_two_have_is_refused(tmp_path):
    Tenants(tmp_path, ("ada",), "tml-")
    (tmp_path / "ben").write_text("sk-123456789012345678901234")
    with pytest.raises(ConfigError, match=r"begin.*tml-"):
        Tenants(tmp_path, (), "tml-")
    (tmp_path / "ben").write_text((tmp_path / "ada").read_text())
    with pytest.raises(ConfigError, match="another tenant"):
        Tenants(tmp_path, (), "tml-")


def test_what_a_tenant_publishes_all_may_sample_and_load_and_nobody_else_may_change(server):
    ada, ben = (Client(server.url, server.key(tenant)) for tenant in ("ada", "ben"))
    model = ada.model(rank=3)
    model.train()
    path, state = model.samples_as("shown"), model.saves("shown")
    own = f"training_runs/{model.model_id}/checkpoints/sampler_weights/shown/publish"
    ben.session()
    start = {"session_id": ben.session_id, "sampling_session_seq_id": 0, "model_path": path}
    assert ben.post("create_sampling_session", start).status_code == 404
    ada.good(own, {})
    assert ada.post(own, {}).status_code == 409, "it is public already"
    assert [one["public"] for one in ada.http.get("checkpoints").json()["checkpoints"]].count(True) == 1
    sampler = ben.good("create_sampling_session", start)["sampling_session_id"]
    mine = ada.sample(ada.sampler(model_path=path), [1, 2, 3], max_tokens=4, seed=1)
    assert ben.sample(sampler, [1, 2, 3], max_tokens=4, seed=1).sequences[0].tokens == mine.sequences[0].tokens
    load = {"session_id": ben.session_id, "model_seq_id": 0, "path": state, "optimizer": False}
    assert ben.post("load_weights", load).status_code == 404, "the other checkpoint of the name is not public"
    ada.good(own.replace("sampler_weights", "weights"), {})
    assert ben.result(ben.good("load_weights", load)["request_id"])["model_id"].endswith(":train:0")
    for method, url in (("DELETE", own), ("DELETE", own.removesuffix("/publish")), ("POST", own)):
        assert ben.http.request(method, url, json={}).status_code == 403, (method, url)
    assert ben.http.get("checkpoints").json()["checkpoints"] == []
    assert ada.http.delete(own).status_code == 200
    assert ada.http.delete(own).status_code == 409, "it is private already"
    assert ben.post("create_sampling_session", start | {"sampling_session_seq_id": 1}).status_code == 404
    body = {"sampling_session_id": sampler, "seq_id": 9, "prompt": {"chunks": [{"tokens": [1]}]}}
    assert ben.post("asample", body).status_code == 404, "also by a sampler that was made before"
