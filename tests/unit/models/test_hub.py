from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import httpx
import httpx2
import pytest
from huggingface_hub import constants

from palestra.config import parse_config
from palestra.dashboard.runs import token_text
from palestra.errors import ModelError, ServerFailed
from palestra.models.catalog import exact_model, model_folder
from palestra.models.causal_lm import load_tokenizer
from palestra_service.jobs.launcher import Ending, ending_of


class Hub(BaseHTTPRequestHandler):
    """Has nothing, and says so: `org/404` with this status, and any other with 404."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        status = re.search(r"org/(\d{3})", self.path)
        self.send_response(404 if status is None else int(status[1]))
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub():
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def nobody(hub) -> str:
    """An address at which nothing listens."""
    return "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def online(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_a_hub_that_answers_is_asked_by_transformers(monkeypatch, hub):
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    assert model_folder("org/model") == "org/model"


def test_a_hub_that_can_not_be_reached_is_one_line_after_one_try(monkeypatch, nobody, capfd):
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"'org/model'.*127\.0\.0\.1:9"):
        load_tokenizer("org/model")
    assert time.monotonic() - started < 5
    assert "Retrying" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("client", [httpx, httpx2])  # of huggingface_hub 1 and 2
def test_errors_of_both_clients_of_the_hub_are_one_line(monkeypatch, client):
    class Session:
        def head(self, *_, **__):
            raise client.ConnectError("no route")

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    with pytest.raises(ModelError, match=r"reached.*route"):
        model_folder("org/model")


def test_without_a_network_the_cache_is_used(monkeypatch, nobody, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("abc")
    assert model_folder("org/model") == snapshot


def test_offline_says_so_and_asks_nobody(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        model_folder("org/model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "ending"),
    [
        *((status, Ending.FAILED) for status in (401, 403, 404, 410)),
        *((status, Ending.LOST) for status in (429, 500, 503)),
    ],
)
def test_a_job_is_started_again_only_where_the_hub_may_answer_in_another_way(monkeypatch, hub, status, ending):
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    Hub.asked.clear()
    with pytest.raises((ModelError, ServerFailed), match=f"org/{status}") as failure:
        exact_model(f"org/{status}")
    assert ending_of(failure.value) is ending
    assert len(Hub.asked) < 3


def test_a_job_is_started_again_where_there_is_no_network_and_not_where_none_may_be_used(monkeypatch, nobody):
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    with pytest.raises(ServerFailed, match=r"hub.*reached") as failure:
        exact_model("org/model")
    assert ending_of(failure.value) is Ending.LOST
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE") as failure:
        exact_model("org/model")
    assert ending_of(failure.value) is Ending.FAILED


def test_an_adapter_of_the_hub_is_refused_because_it_names_any_folder_as_its_base(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/runs/of-another-tenant"}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelError, match="'org/adapter'"):
        exact_model("org/adapter")


def test_who_looks_at_a_run_asks_no_hub_for_the_model_that_its_folder_names(monkeypatch, hub):
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(Hub, "asked", [])
    config = parse_config({"name": "a", "policies": {"policy": {"model": "org/named-by-a-run"}}})
    with pytest.raises(ModelError, match="hub's cache"):
        token_text(config, "policy")
    assert Hub.asked == []
