"""The routes of the page: each needs a key, a link is good once, and nothing from elsewhere is let in."""

from __future__ import annotations

import asyncio
import io
import json
import re

import httpx2
import pytest
from PIL import Image

from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.files import public_paths
from palestra.dashboard.routes import create_page_app
from palestra.pictures.blobs import Blobs
from palestra.pictures.pixels import decode_picture
from unit.dashboard.recorded import PICTURE, PICTURE_DIGEST, record

VALUES = {
    "run": "recorded",
    "step": "5",
    "kind": "train",
    "group": "0",
    "episode": "train-000000-00",
    "row": "0",
    "call": "1",
    "digest": PICTURE_DIGEST,
    "policy": "policy",
}


@pytest.fixture
async def page(tmp_path):
    access = OneTimeLink()
    app = create_page_app([await record(tmp_path)], access, asyncio.Event())
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://page") as http:
        yield app, access, http


def api_paths(app) -> list[str]:
    found = [path for path in app.openapi()["paths"] if path.startswith("/dashboard/api/")]
    return [re.sub(r"\{(\w+)\}", lambda match: VALUES[match[1]], path) for path in found]


async def key_of(http: httpx2.AsyncClient, credential: str) -> httpx2.Response:
    return await http.post("/dashboard/session", headers={"authorization": f"Bearer {credential}"})


async def test_every_route_of_data_needs_the_viewers_key(page):
    app, access, http = page
    key = (await key_of(http, access.code)).json()["key"]
    paths = api_paths(app)
    assert len(paths) == 17
    for path in paths:
        address = path + ("?follow=false" if path.endswith("/events") else "")
        for wrong in ({}, {"authorization": "Bearer pv-no"}, {"cookie": f"key={key}"}):
            assert (await http.get(address, headers=wrong)).status_code == 401, path
        assert (await http.get(f"{address}{'&' if '?' in address else '?'}key={key}")).status_code == 401
        good = await http.get(address, headers={"authorization": f"Bearer {key}"})
        assert good.status_code == 200, (path, good.text)
        assert good.headers["cache-control"] == "no-store"


async def test_a_picture_is_shown_as_it_is_stored_with_a_type_of_ours(page):
    _, access, http = page
    headers = {"authorization": f"Bearer {(await key_of(http, access.code)).json()['key']}"}
    found = await http.get(f"/dashboard/api/runs/recorded/pictures/{PICTURE_DIGEST}", headers=headers)
    assert found.content == PICTURE
    assert found.headers["content-type"] == "image/png"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in found.headers["content-security-policy"]
    for name in ("0" * 64, "..%2F..%2Frun.db", "x"):
        assert (await http.get(f"/dashboard/api/runs/recorded/pictures/{name}", headers=headers)).status_code == 404


async def test_a_picture_is_shown_as_the_model_of_a_policy_got_it(page):
    _, access, http = page
    headers = {"authorization": f"Bearer {(await key_of(http, access.code)).json()['key']}"}
    address = f"/dashboard/api/runs/recorded/pictures/{PICTURE_DIGEST}/seen"
    words = {"policy": "2 x 2 tiles of 32 x 32", "llava": "4 x 4 squares of 8 x 8", "qwen": "2 x 2 squares of 28 x 28"}
    for policy, parts, side in (("policy", "2 2", 64), ("llava", "4 4", 32), ("qwen", "2 2", 56)):
        found = await http.get(f"{address}/{policy}", headers=headers)
        assert (found.headers["content-type"], found.headers["x-palestra-tiles"]) == ("image/png", parts)
        assert words[policy] in found.headers["x-palestra-seen"]
        assert "sandbox" in found.headers["content-security-policy"]
        assert decode_picture(found.content).size == (side, side)
        assert decode_picture(found.content).getcolors() == [(side * side, (255, 0, 0))]
    for hostile in ("enlarging", "narrowing"):
        refused = await http.get(f"{address}/{hostile}", headers=headers)
        assert (refused.status_code, "and the page shows 16,777,216" in refused.text) == (422, True)
    for other in (f"{address}/unknown", address.replace(PICTURE_DIGEST, "0" * 64) + "/policy"):
        assert (await http.get(other, headers=headers)).status_code == 404


async def test_a_small_file_of_very_many_pixels_is_not_decoded_for_the_page(page, tmp_path):
    _, access, http = page
    headers = {"authorization": f"Bearer {(await key_of(http, access.code)).json()['key']}"}
    (folder,) = tmp_path.rglob("pictures")
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    assert len(file.getvalue()) < 10_000
    address = f"/dashboard/api/runs/recorded/pictures/{Blobs(folder).put(file.getvalue())}"
    assert (await http.get(address, headers=headers)).content == file.getvalue()
    refused = await http.get(f"{address}/seen/policy", headers=headers)
    assert (refused.status_code, "a picture may have 16,777,216 in all" in refused.text) == (422, True)


async def test_a_link_is_good_once_and_a_new_one_can_be_made(page):
    _, access, http = page
    code = access.code
    first = await key_of(http, code)
    assert first.status_code == 200
    assert (await key_of(http, code)).status_code == 401
    assert access.code is None
    access.renew()
    again = await key_of(http, access.code)
    assert again.json() == first.json()
    assert (await key_of(http, first.json()["key"])).status_code == 200, "another tab has the key already"


async def test_the_files_are_public_whole_and_let_no_script_in(page):
    _, _, http = page
    for path in public_paths():
        found = await http.get(path)
        assert found.status_code == 200
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        again = await http.get(path, headers={"if-none-match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    text = (await http.get("/dashboard")).text
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', text)) <= public_paths() | {
        "/dashboard/assets/vendor/uPlot.min.css"
    }
    assert not re.findall(r"<script(?![^>]*src=)|\son\w+=|style=", text)
    assert (await http.get("/dashboard/assets/../routes.py")).status_code in (401, 404)


def test_no_file_of_the_page_asks_for_anything_elsewhere():
    from importlib.resources import files

    root = files("palestra.dashboard") / "static"
    for file in root.iterdir():
        if file.name.endswith((".js", ".css", ".html")):
            text = file.read_text(encoding="utf-8")
            assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text), file.name
            assert "innerHTML" not in text, file.name
            assert "eval(" not in text, file.name


async def test_wrong_values_are_answered_with_what_is_wrong(page):
    _, access, http = page
    headers = {"authorization": f"Bearer {(await key_of(http, access.code)).json()['key']}"}
    base = "/dashboard/api/runs/recorded"
    for path, status in [
        ("/steps/-1", 422),
        ("/steps/99999999999999999999999", 422),
        ("/steps/99", 404),
        ("/groups/other/1", 422),
        ("/groups/train/77", 404),
        ("/episodes/nope", 404),
        ("/episodes/nope/calls/0", 404),
        ("/episodes/train-000000-00/calls/2", 404),
        ("/episodes/train-000000-00/calls/-1", 422),
        ("/episodes/train-000000-00/rows/9", 404),
        ("/episodes?limit=0", 422),
        ("/episodes?unknown=1", 422),
        ("/episodes?before=x", 422),
        ("/history?before=-1", 422),
    ]:
        found = await http.get(base + path, headers=headers)
        assert found.status_code == status, (path, found.text)
        assert found.json()["error"]["message"]
    assert (await http.get("/dashboard/api/runs/other", headers=headers)).status_code == 404


async def test_events_are_replayed_after_any_of_them(page):
    _, access, http = page
    headers = {"authorization": f"Bearer {(await key_of(http, access.code)).json()['key']}"}

    async def numbers(**after: str) -> list[int]:
        found = await http.get("/dashboard/api/events?follow=true", headers=headers, params=after)
        events = [json.loads(block.partition("data: ")[2]) for block in found.text.split("\n\n") if block]
        assert all(event["run"] == "recorded" for event in events)
        return [event["event_id"] for event in events if "event_id" in event]  # the others say how far the run is

    everything = await numbers()
    assert everything == sorted(set(everything))
    assert len(everything) >= 2
    for place, number in enumerate(everything):
        assert await numbers(after=f"recorded:{number}") == everything[place + 1 :]
    for wrong, status in [("other:1", 404), ("recorded", 422), ("recorded:-1", 422), (":", 422)]:
        found = await http.get("/dashboard/api/events", headers=headers, params={"after": wrong})
        assert found.status_code == status
