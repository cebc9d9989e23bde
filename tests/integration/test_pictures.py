"""Pictures in all dialects, over HTTP: the same bytes are the same picture, and refusals come before any sample."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from hostile_pictures import ATTACKS, RED, encoded
from in_process import episode_of, parts_of, serving
from PIL import Image
from seeing import PER_PICTURE, SeeingRenderer

from palestra import AsyncClient, Client
from palestra.pictures.pixels import decode_picture
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.runtime.local_job import LocalJob
from palestra.server import picture_fetch, state

PNG = encoded()
DIGEST = hashlib.sha256(PNG).hexdigest()
OTHER = encoded(Image.new("RGB", RED.size, (30, 200, 30)))


class Speaker:
    """A client of one episode, which sends what it is told."""

    def __init__(self, job: LocalJob, http: httpx2.AsyncClient, key: str, episode_id: str) -> None:
        self.job, self.http, self.key, self.episode_id = job, http, key, episode_id

    async def post(self, path: str, body: Any) -> httpx2.Response:
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {self.key}"})

    async def chat(self, *parts: Any, before: tuple[Any, ...] = ()) -> httpx2.Response:
        messages = [*before, {"role": "user", "content": list(parts)}]
        return await self.post("/v1/chat/completions", {"model": "policy", "messages": messages})

    async def upload(self, data: bytes, digest: str | None = None, key: str | None = None) -> httpx2.Response:
        name = hashlib.sha256(data).hexdigest() if digest is None else digest
        headers = {"authorization": f"Bearer {key or self.key}"}
        return await self.http.put(f"/pictures/{name}", content=data, headers=headers)

    @property
    def stored(self) -> list[str]:
        return list(self.job.plane.store.pictures)


@asynccontextmanager
async def speaking(folder: Path, blind: bool = False, **settings: Any) -> AsyncIterator[Speaker]:
    tokenizer = ByteTokenizer()
    renderer = ChatMLRenderer(tokenizer) if blind else SeeingRenderer()
    parts = parts_of(renderer, tokenizer, lambda prompt, seed: "seen")
    async with (
        serving(folder, parts, policies={"policy": {"max_context": 8192}}, **settings) as job,
        episode_of(job) as (ai, episode_id),
        httpx2.AsyncClient(base_url=job.url, timeout=30, trust_env=False) as http,
    ):
        yield Speaker(job, http, ai.api_key, episode_id)


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | more}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def refused(answer: httpx2.Response, status: int, *words: str) -> None:
    message = answer.json()["error"]["message"]
    assert answer.status_code == status, message
    assert [word for word in words if word not in message] == [], message


async def test_the_same_picture_has_the_same_digest_and_ids_in_every_dialect(tmp_path):
    async with speaking(tmp_path) as user:
        assert (await user.upload(PNG)).json() == {"digest": DIGEST}
        b64 = base64.b64encode(PNG).decode()
        for part in (
            shown(url_of(PNG)),
            shown(f"sha256:{DIGEST}"),
            shown(url_of(PNG), detail="high"),
            {"type": "image", "digest": DIGEST},
        ):
            assert (await user.chat(text("a"), part, text("b"))).status_code == 200
        for part in (
            {"type": "input_image", "image_url": url_of(PNG)},
            {"type": "input_image", "file_id": DIGEST, "detail": "auto"},
        ):
            items = [{"role": "user", "content": [_input("a"), part, _input("b")]}]
            answer = await user.post("/v1/responses", {"model": "policy", "input": items})
            assert answer.status_code == 200, answer.text
        for source in (
            {"type": "base64", "media_type": "image/png", "data": b64},
            {"type": "file", "file_id": DIGEST},
            {"type": "url", "url": url_of(PNG)},
        ):
            turn = {"role": "user", "content": [text("a"), {"type": "image", "source": source}, text("b")]}
            answer = await user.post("/v1/messages", {"model": "policy", "max_tokens": 9, "messages": [turn]})
            assert answer.status_code == 200, answer.text
        trajectory = await trajectory_of_open(user)
    assert len(trajectory) == 9
    assert len({chat.prompt_ids.tobytes() for chat in trajectory}) == 1
    assert len({chat.all_media for chat in trajectory}) == 1
    (span,) = trajectory[0].all_media
    assert (span.digest, span.tokens) == (DIGEST, PER_PICTURE)
    assert [part.type for part in trajectory[0].messages[0].content] == ["text", "image", "text"]
    assert user.stored == [DIGEST]


def _input(said: str) -> dict[str, Any]:
    return {"type": "input_text", "text": said}


async def trajectory_of_open(user: Speaker) -> tuple[Any, ...]:
    """The calls of the episode so far."""
    (found,) = await user.job.plane.store.calls.trajectories([user.episode_id])
    return found.chats


@pytest.mark.slow
async def test_results_of_tools_have_pictures_in_every_dialect(tmp_path):
    asked = {"role": "user", "content": "look"}
    async with speaking(tmp_path) as user:
        called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": "c", "content": [shown(url_of(PNG)), text("here")]}
        messages = [asked, {"role": "assistant", "content": "", "tool_calls": [called]}, result]
        answers = [await user.post("/v1/chat/completions", {"model": "policy", "messages": messages})]
        items = [
            asked,
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": url_of(PNG)}, _input("here")],
            },
        ]
        answers.append(await user.post("/v1/responses", {"model": "policy", "input": items}))
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
        block = {
            "type": "tool_result",
            "tool_use_id": "c",
            "content": [{"type": "image", "source": source}, text("here")],
        }
        use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        turns = [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
        answers.append(await user.post("/v1/messages", {"model": "policy", "max_tokens": 9, "messages": turns}))
        assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
        chats = await trajectory_of_open(user)
    assert len({chat.prompt_ids.tobytes() for chat in chats}) == 1
    assert [chat.all_media[0].digest for chat in chats] == [DIGEST] * 3
    assert chats[0].messages[2].content[0].digest == DIGEST


@pytest.mark.slow
async def test_a_conversation_goes_on_from_its_tokens_and_another_picture_of_the_same_size_does_not(tmp_path):
    async with speaking(tmp_path) as user:
        first = {"role": "user", "content": [text("a"), shown(url_of(PNG))]}
        await user.post("/v1/chat/completions", {"model": "policy", "messages": [first]})
        said = {"role": "assistant", "content": "seen"}
        await user.chat(shown(url_of(OTHER)), before=(first, said))
        changed = {"role": "user", "content": [text("a"), shown(url_of(OTHER))]}
        await user.chat(shown(url_of(OTHER)), before=(changed, said))
        one, two, three = await trajectory_of_open(user)
    assert two.parent is one
    assert two.shared == one.tokens
    assert two.fork is None
    assert [span.digest for span in two.all_media] == [DIGEST, hashlib.sha256(OTHER).hexdigest()]
    assert three.shared < one.prompt_tokens
    assert three.fork is not None


@pytest.mark.slow
async def test_an_upload_is_idempotent_and_takes_a_key_of_the_job(tmp_path):
    async with speaking(tmp_path) as user:
        key = user.job.plane.keys.job_key
        for _ in range(2):
            assert (await user.upload(PNG)).status_code == 200
            assert (await user.upload(PNG, key=key)).json() == {"digest": DIGEST}
        assert user.stored == [DIGEST]
        refused(await user.upload(PNG, digest="0" * 64), 422, "not the SHA-256")
        refused(await user.upload(b"<svg/>"), 422, "no type that is taken")
        assert (await user.upload(bytes(8 * 2**20 + 1))).status_code == 413
        assert (await user.upload(PNG, key="nonsense")).status_code == 401
        found = await user.http.get(f"/pictures/{DIGEST}", headers={"authorization": f"Bearer {key}"})
        assert found.content == PNG
        assert found.headers["content-type"] == "image/png"
        assert found.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in found.headers["content-security-policy"]
        for name, status in (("0" * 64, 404), ("..%2Fsecret", 404), ("x", 404)):
            got = await user.http.get(f"/pictures/{name}", headers={"authorization": f"Bearer {key}"})
            assert got.status_code == status
        for other, status in ((user.key, 403), (None, 401), (user.job.plane.keys.viewer_key, 403)):
            headers = {} if other is None else {"authorization": f"Bearer {other}"}
            assert (await user.http.get(f"/pictures/{DIGEST}", headers=headers)).status_code == status
        headers = {"authorization": f"Bearer {user.job.plane.keys.viewer_key}"}
        assert (await user.http.put(f"/pictures/{DIGEST}", content=PNG, headers=headers)).status_code == 403
        headers = {"authorization": f"Bearer {user.job.plane.keys.playground_key}"}
        assert (await user.http.put(f"/pictures/{DIGEST}", content=PNG, headers=headers)).status_code == 403


@pytest.mark.slow
async def test_clients_upload_a_picture_and_return_the_digest_that_messages_name(tmp_path):
    async with speaking(tmp_path) as user, AsyncClient(user.job.url, user.job.plane.keys.job_key) as client:
        with Client(user.job.url, user.job.plane.keys.job_key) as plain:
            assert await asyncio.to_thread(plain.upload_picture, PNG) == DIGEST
        assert await client.upload_picture(PNG) == DIGEST
        assert (await user.chat(shown(f"sha256:{DIGEST}"))).status_code == 200
        assert user.stored == [DIGEST]


@pytest.mark.slow
async def test_the_quota_of_the_run_is_kept(tmp_path):
    async with speaking(tmp_path, pictures={"store_gib": (len(PNG) + 10) / 2**30}) as user:
        assert (await user.chat(shown(url_of(PNG)))).status_code == 200
        refused(await user.chat(shown(url_of(OTHER))), 413, "messages.0.content.0", "pictures.store_gib")
        assert (await user.chat(shown(url_of(PNG)))).status_code == 200


@pytest.mark.slow
async def test_an_episode_fills_no_more_of_the_run_than_it_may(tmp_path, monkeypatch):
    most = len(PNG) + len(OTHER) - 1
    monkeypatch.setattr(state, "EPISODE_BYTES", most)
    async with speaking(tmp_path) as user:
        for _ in range(2):  # a picture that is there costs nothing
            assert (await user.chat(shown(url_of(PNG)))).status_code == 200
            assert (await user.upload(PNG)).status_code == 200
        refused(await user.chat(shown(url_of(OTHER))), 413, "messages.0.content.0", f"of {most:,} bytes")
        refused(await user.upload(OTHER), 413, f"{len(PNG):,} of {most:,} bytes")
        assert user.stored == [DIGEST]
        assert (await user.upload(OTHER, key=user.job.plane.keys.job_key)).status_code == 200
        assert (await user.chat(shown(url_of(OTHER)))).status_code == 200


@pytest.mark.slow
async def test_a_picture_that_the_disk_does_not_take_costs_its_episode_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "EPISODE_BYTES", len(PNG))
    async with speaking(tmp_path) as user:
        in_the_way = user.job.plane.store.pictures.path(DIGEST)
        in_the_way.mkdir(parents=True)  # a folder where the file has to be
        assert (await user.upload(PNG)).status_code == 500
        in_the_way.rmdir()
        assert (await user.upload(PNG)).status_code == 200


BAD: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "unknown digest": (shown(f"sha256:{'0' * 64}"), 422, ("there is no picture", "upload")),
    "no digest": (shown("sha256:../../secret"), 422, ("64 hexadecimal digits",)),
    "base64 that can't be decoded": (shown("data:image/png;base64,§§"), 422, ("base64 can't be decoded",)),
    "base64 with an end": (shown(url_of(PNG) + "=="), 422, ("base64 can't be decoded",)),
    "no base64": (shown("data:image/png,abc"), 422, ("data URL",)),
    "svg": (shown(url_of(b"<svg/>", "image/svg+xml")), 422, ("no type that is taken",)),
    "mislabelled": (shown(url_of(PNG, "image/jpeg")), 422, ("sent as image/jpeg and is image/png",)),
    "of a type that is none": (shown(url_of(PNG, "text/html")), 422, ("'text/html' are not taken",)),
    "url": (shown("https://example.com/a.png"), 422, ("example.com:443", "fetches nothing", "pictures.hosts")),
    "file": (shown("file:///etc/passwd"), 422, ("a picture is a data URL",)),
    "detail": (shown(url_of(PNG), detail="most"), 422, ("detail",)),
    "no url": ({"type": "image_url"}, 422, ("image_url",)),
    "sound": ({"type": "input_audio", "input_audio": {}}, 400, ("input_audio",)),
    "wide": (shown(url_of(encoded(Image.new("L", (9000, 1))))), 422, ("on a side",)),
}


async def test_bad_pictures_are_refused_by_message_and_part_before_anything_is_sampled(tmp_path):
    async with speaking(tmp_path) as user:
        for part, status, words in BAD.values():
            answer = await user.chat(text("a"), part, before=({"role": "user", "content": "hello"},))
            refused(answer, status, "messages.1", *words)
            assert "\n" not in answer.json()["error"]["message"]
            assert "content.1" in answer.json()["error"]["message"] or status == 400
        for role in ("system", "assistant"):
            message = {"role": role, "content": [shown(url_of(PNG))]}
            refused(await user.chat(text("a"), before=(message,)), 400, "messages.0.content.0", role)
        many = [shown(url_of(PNG))] * 101
        refused(await user.chat(*many), 422, "messages.0.content.100", "101 pictures", "100")
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,§"}]}]
        refused(await user.post("/v1/responses", {"model": "policy", "input": items}), 422, "input.0.content.0")
        items = [{"role": "user", "content": [{"type": "input_image"}]}]
        refused(await user.post("/v1/responses", {"model": "policy", "input": items}), 422, "image_url or file_id")
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "R0lGODlh"}}
        turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}]}
        body = {"model": "policy", "max_tokens": 3, "messages": [turn]}
        refused(await user.post("/v1/messages", body), 422, "messages.0.content.0.content.0", "cut off")
        assert (await user.post("/v1/messages/count_tokens", body | {"max_tokens": None})).status_code == 422
        assert await trajectory_of_open(user) == ()
        assert user.stored == []
        assert user.job.plane.sessions.context.counts["calls"] == 0


@pytest.mark.slow
async def test_a_model_that_takes_no_images_refuses_them_by_name(tmp_path):
    async with speaking(tmp_path, blind=True) as user:
        answer = await user.chat(text("a"), shown(url_of(PNG)), before=({"role": "user", "content": "hello"},))
        refused(answer, 400, "messages.1.content.1", "'policy' takes no images")
        assert user.stored == []
        await user.upload(PNG)
        answer = await user.chat({"type": "image", "digest": DIGEST})
        refused(answer, 400, "messages.0.content.0", "'policy' takes no images")
        assert (await user.chat(text("a"))).status_code == 200


@pytest.mark.slow
async def test_more_pictures_than_the_context_holds_are_refused_with_both_numbers(tmp_path):
    async with speaking(tmp_path) as user:
        few = [shown(url_of(PNG))] * 90
        body = {"model": "policy", "messages": [{"role": "user", "content": [*few, text("x" * 8000)]}]}
        refused(await user.post("/v1/chat/completions", body), 400, "8192", "tokens")
        assert await trajectory_of_open(user) == ()


@pytest.mark.slow
async def test_detail_low_shows_a_smaller_copy_that_is_kept_as_well(tmp_path):
    large = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 1024, 3), np.uint8))
    data = encoded(large)
    async with speaking(tmp_path) as user:
        for _ in range(2):
            assert (await user.chat(shown(url_of(data), detail="low"))).status_code == 200
        assert (await user.chat(shown(url_of(PNG), detail="low"))).status_code == 200  # is small already
        one, two, three = await trajectory_of_open(user)
        digest = one.all_media[0].digest
        copy = decode_picture(user.job.plane.store.pictures.get(digest))
        assert len(user.stored) == 3
    assert digest == two.all_media[0].digest != hashlib.sha256(data).hexdigest()
    assert three.all_media[0].digest == DIGEST
    assert copy.size == (512, 150)


@pytest.mark.slow
async def test_a_picture_of_a_hundred_calls_is_stored_once(tmp_path):
    async with speaking(tmp_path) as user:
        await user.upload(PNG)
        # Twenty at a time: as many clients as a small job has.
        for _ in range(5):
            answers = await asyncio.gather(*(user.chat({"type": "image", "digest": DIGEST}) for _ in range(20)))
            assert {answer.status_code for answer in answers} == {200}
        files = [path for path in (tmp_path / "pictures").rglob("*") if path.is_file()]
    assert [path.name for path in files] == [DIGEST]


@pytest.mark.slow
async def test_attacks_are_answered_within_100_ms_and_nothing_of_them_is_kept(tmp_path):
    async with speaking(tmp_path) as user:
        await user.upload(b"")  # imports
        for name, (make, _) in ATTACKS.items():
            data = make()
            message = {"role": "user", "content": [text("a"), shown(url_of(data))]}
            body = orjson.dumps({"model": "policy", "messages": [message]})
            took = []
            for _ in range(5):
                began = (
                    time.process_time()
                )  # client and server are one process, which does not sleep; others may be busy
                headers = {"authorization": f"Bearer {user.key}"}
                answer = await user.http.post("/v1/chat/completions", content=body, headers=headers)
                took.append(time.process_time() - began)
                large = len(data) > 3 * 2**20  # over the limit of a body, before any picture is looked at
                refused(answer, 413 if large else 422, *([] if large else ["messages.0.content.1"]))
            assert min(took) < 0.1, name
        assert user.stored == []
        assert await trajectory_of_open(user) == ()


@pytest.mark.slow
async def test_pictures_that_take_long_keep_no_other_request_waiting(tmp_path):
    whole = encoded(Image.new("RGB", (4096, 2304)), "JPEG", progressive=True)
    scan, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    slow = whole[:end] + whole[scan:end] * 50 + whole[end:]
    async with speaking(tmp_path) as user:
        await user.upload(PNG)  # imports
        uploads = [asyncio.create_task(user.upload(slow + bytes(number))) for number in range(12)]
        while not user.stored[1:]:
            await asyncio.sleep(0.05)
        answer = await user.chat(text("long " * 10_000))
        assert answer.status_code in {200, 400, 422}, answer.text  # it is parsed, and more than the model can read
        assert sum(upload.done() for upload in uploads) < 8
        assert {answer.status_code for answer in await asyncio.gather(*uploads)} == {200}


# URLs


class Host:
    """A web server that answers each path as it is told."""

    def __init__(self, answers: dict[str, tuple[int, dict[str, str], bytes]]) -> None:
        self.answers, self.asked = answers, []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:  # a client that has given up
            return writer.close()
        path = head.split()[1]
        self.asked.append(path)
        if path == "/slow":
            await asyncio.sleep(30)
        status, headers, body = self.answers.get(path, (404, {}, b""))
        lines = [f"HTTP/1.1 {status} x", *(f"{k}: {v}" for k, v in headers.items()), f"content-length: {len(body)}"]
        writer.write("\r\n".join(lines).encode() + b"\r\nconnection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()


@pytest.mark.slow
async def test_urls_are_fetched_from_allowed_hosts_only(tmp_path, monkeypatch):
    host = Host({})
    server = await asyncio.start_server(host, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    host.answers = {
        "/a.png": (200, {"content-type": "text/html"}, PNG),
        "/moved": (302, {"location": "/a.png"}, b""),
        "/away": (302, {"location": "http://169.254.169.254/latest"}, b""),
        "/damaged": (302, {"location": "http://[x"}, b""),
        "/round": (302, {"location": "/round"}, b""),
        "/large": (200, {}, bytes(3000)),
        "/zipped": (200, {"content-encoding": "gzip"}, PNG),
        "/html": (200, {}, b"<html>"),
    }
    base = f"http://localhost:{port}"
    limits = {"private_hosts": [f"localhost:{port}"], "hosts": [f"127.0.0.1:{port}"]}
    monkeypatch.setattr(picture_fetch, "FETCH_SECONDS", 3.0)
    monkeypatch.setattr(picture_fetch, "MAX_PICTURE_BYTES", 2000)
    async with server, speaking(tmp_path, pictures=limits) as user:
        for path in ("/a.png", "/moved", "/a.png"):
            answer = await user.chat(shown(base + path))
            assert answer.status_code == 200, answer.text
        assert host.asked == ["/a.png", "/moved", "/a.png"]  # a URL is fetched once
        assert user.stored == [DIGEST]
        for url, words in (
            (base + "/away", ("169.254.169.254",)),
            (base + "/damaged", ("can't be fetched",)),
            (base + "/round", ("redirects",)),
            (base + "/large", ("2,000 bytes",)),
            (base + "/zipped", ("compressed",)),
            (base + "/html", ("no type",)),
            (base + "/none", ("404",)),
            (base + "/slow", ("3 s",)),
            (f"http://127.0.0.1:{port}/a.png", ("private",)),
            (f"http://127.1:{port}/a.png", ("fetches nothing",)),
            (f"http://localhost:{port + 1}/a.png", ("fetches nothing",)),
            ("http://localhost/a.png", ("fetches nothing",)),
            (f"http://user@localhost:{port}/a.png", ("no http or https URL",)),
        ):
            refused(await user.chat(text("a"), shown(url)), 422, "messages.0.content.1", *words)
        assert len(await trajectory_of_open(user)) == 3
