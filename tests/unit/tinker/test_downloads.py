"""Files of external weights: their links open one file each, for a while, and nothing else."""

from __future__ import annotations

import json
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import httpx2
import pytest
from safetensors.numpy import load

from palestra.errors import Unauthorized
from palestra_bases.tenant_keys import Tenants
from palestra_bases.tinker.listing import LINK_SECONDS, Links
from unit.building import FakeClock
from unit.tinker.serving import Client, running


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("tinker")) as started:
        yield started


@pytest.fixture(scope="module")
def saved(server):
    """Ada's client, the id of her model, and the links to its weights."""
    ada = Client(server.url, server.key("ada"))
    model = ada.model()
    model.train()
    path = ada.result(model.ask("save_weights_external", path="mine", ttl_seconds=3600))["path"]
    assert path == f"tinker://{model.model_id}/external_weights/mine"
    route = f"training_runs/{model.model_id}/checkpoints/external_weights/mine/external_weights_urls"
    return ada, model, ada.http.get(route).json()["urls"]


def changed(url: str, path: str | None = None, **query: str) -> str:
    """A link of which a part is another one."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query)) | query
    return urlunsplit(parts._replace(path=path or parts.path, query=urlencode(given)))


def test_a_link_gives_a_whole_file_without_a_key(saved):
    ada, _, urls = saved
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    answer = httpx2.get(urls["adapter_model.safetensors"])
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert any(name.endswith("lora_B.weight") and tensor.any() for name, tensor in load(answer.content).items())
    assert json.loads(httpx2.get(urls["adapter_config.json"]).content)["peft_type"] == "LORA"
    (listed,) = ada.http.get("checkpoints").json()["checkpoints"]
    assert (listed["checkpoint_id"], listed["checkpoint_type"]) == ("external_weights/mine", "external")


def test_a_link_that_is_changed_opens_nothing(server, saved):
    _, model, urls = saved
    url = urls["adapter_config.json"]
    other_file = urlsplit(url).path.replace("adapter_config.json", "adapter_model.safetensors")
    outside = urlsplit(url).path.replace("adapter_config.json", "..%2F..%2F..%2Fkeys%2Fada")
    for link in (
        changed(url, path=other_file),
        changed(url, path=outside),
        changed(url, tenant="ben"),
        changed(url, tenant="nobody"),
        changed(url, tenant=""),
        changed(url, expires="99999999999"),
        changed(url, expires="-1"),
        changed(url, signature="0" * 64),
        changed(url, signature="é"),
        url.split("?")[0],
    ):
        answer = httpx2.get(link)
        assert (answer.status_code, answer.json()["category"]) == (401, "user"), link
    ben = Client(server.url, server.key("ben"))
    route = f"training_runs/{model.model_id}/checkpoints/external_weights/mine/external_weights_urls"
    assert ben.http.get(route).status_code == 404


def test_other_kinds_have_no_links_and_deleted_weights_have_no_files(saved):
    ada, model, _ = saved
    model.saves("state")
    base = f"training_runs/{model.model_id}/checkpoints"
    answer = ada.http.get(f"{base}/weights/state/external_weights_urls")
    assert (answer.status_code, "save_weights_external" in answer.json()["error"]) == (422, True)
    ada.result(model.ask("save_weights_external", path="gone"))
    urls = ada.http.get(f"{base}/external_weights/gone/external_weights_urls").json()["urls"]
    assert ada.http.delete(f"{base}/external_weights/gone").status_code == 200
    assert httpx2.get(urls["adapter_config.json"]).status_code == 404


def test_encryption_is_refused(saved):
    ada, model, _ = saved
    with pytest.raises(Exception, match="not encrypted"):
        ada.result(model.ask("save_weights_external", path="x", age_encryption_recipients=["age1…"]))


class Asked:
    """What `Links` reads of a request."""

    def __init__(self, link: str) -> None:
        parts = urlsplit(link)
        self.scope, self.query_params = {"path": unquote(parts.path)}, dict(parse_qsl(parts.query))


def test_a_link_ends_after_an_hour_and_with_the_key(tmp_path):
    clock = FakeClock()
    tenants = Tenants(tmp_path / "keys", ("ada",), "tml-")
    links = Links(tenants, clock)
    asked = Asked(links.link("ada", "session:train:0", "mine", "adapter_config.json", links.expiry()))
    clock.advance(LINK_SECONDS - 2)
    assert links.tenant(asked) == "ada"  # type: ignore[arg-type]
    (tmp_path / "keys" / "ada").write_text("tml-" + "1" * 48)
    renewed = Links(Tenants(tmp_path / "keys", ("ada",), "tml-"), clock)
    for late, which in ((0, renewed), (2, links)):
        clock.advance(late)
        with pytest.raises(Unauthorized, match="not valid"):
            which.tenant(asked)  # type: ignore[arg-type]
