from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from palestra.errors import ModelError
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_tokenizer


class Hub(BaseHTTPRequestHandler):
    """Has nothing, and says so."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

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
    with pytest.raises(
        ModelError, match=r"'org/model' is not in the hub's cache, and .*127\.0\.0\.1:9 can't be reached"
    ):
        load_tokenizer("org/model")
    assert time.monotonic() - started < 5
    assert "Retrying" not in "".join(capfd.readouterr())


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
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        model_folder("org/model")
