from __future__ import annotations

import httpx2
import pytest

from palestra.client.async_client import AsyncClient
from palestra.errors import ConfigError, ConnectionLost, JobOver, NotFound
from palestra_control import job as job_module
from palestra_control.control import ControlClient, SubmitFields
from palestra_control.wire import ResourcesBody, SubmitJob

VIEW = {
    **dict.fromkeys(("name", "user", "kind", "priority", "reason"), "x"),
    **dict.fromkeys(("attached", "cancel_requested"), False),
    **dict.fromkeys(("created_at", "changed_at"), 0.0),
    **dict.fromkeys(("starts", "restarts_left"), 1),
    "job_id": "j",
    "state": "completed",
    "resources": {},
    "node": None,
    "config": {},
    "log_tail": None,
}


class Pieces(httpx2.SyncByteStream):
    """A body in pieces; an exception among them breaks it off."""

    def __init__(self, *pieces) -> None:
        self._pieces = pieces

    def __iter__(self):
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


def answering(monkeypatch, answer, retry_seconds: float = 0.2) -> ControlClient:
    client = ControlClient("http://control", "key", retry_seconds=retry_seconds)
    client._http = httpx2.Client(transport=httpx2.MockTransport(answer), base_url="http://control")
    return client


@pytest.mark.parametrize("job_id", ["../keys/key-1", "../tenants/physics?x=", "job-1#", "\x1b]0;x\x07", "日"])
def test_whatever_is_given_as_a_job_stays_below_jobs(monkeypatch, job_id):
    asked = []

    def answer(request):
        asked.append(request.url.raw_path)
        return httpx2.Response(404, json={"error": {"message": "there is no such job", "code": "not_found"}})

    with answering(monkeypatch, answer) as client:
        job = client.job(job_id)
        for ask in (job.view, job.cancel, job.server, job.rotate_key, lambda: list(job.logs())):
            with pytest.raises(NotFound, match="such job"):
                ask()
    assert len(asked) == 5
    assert all(path.startswith(b"/jobs/") and b".." not in path.split(b"/") for path in asked)
    assert {path.count(b"/") for path in asked} <= {2, 3}


def test_a_log_may_be_cut_within_a_character_also_where_the_connection_is_lost(monkeypatch):
    text = "über 学习\n".encode()
    asked = []

    def answer(request):
        if not request.url.path.endswith("/logs"):
            return httpx2.Response(200, json=VIEW)
        offset = int(request.url.params["offset"])
        asked.append(offset)
        pieces = [text[i : i + 1] for i in range(offset, len(text))]
        broken = [*pieces[:7], httpx2.ReadError("gone")] if offset == 0 else pieces
        return httpx2.Response(200, stream=Pieces(*broken))

    with answering(monkeypatch, answer) as client:
        assert "".join(client.job("j").logs()) == text.decode()
    assert asked == [0, 7]


def test_a_connection_that_is_lost_after_a_long_silence_is_made_anew(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(job_module.time, "monotonic", lambda: now[0])
    asked = []

    def answer(request):
        if not request.url.path.endswith("/events"):
            return httpx2.Response(200, json=VIEW)
        asked.append(request.headers.get("last-event-id"))
        if len(asked) > 1:
            return httpx2.Response(200, stream=Pieces(b'id: 1.1\nevent: step\ndata: {"step": 1}\n\n'))
        now[0] += 3600
        first = b'id: 1.0\nevent: state\ndata: {"state": "running"}\n\n: still here\n\n'
        return httpx2.Response(200, stream=Pieces(first, httpx2.ReadError("gone")))

    with answering(monkeypatch, answer) as client:
        assert [event.kind for event in client.job("j").events()] == ["state", "step"]
    assert asked == [None, "1.0"]


@pytest.mark.parametrize(
    ("url", "key"),
    [("localhost:7400", "k"), ("ftp://host", "k"), ("http://host:x", "k"), ("http://host", "ключ")],
)
def test_what_can_be_no_address_or_key_is_said_at_once(url, key):
    with pytest.raises(ConfigError):
        ControlClient(url, key)


async def test_a_server_that_is_back_somewhere_else_is_found_once_for_all_calls():
    found = []

    def find():
        found.append(1)
        return "http://new", "key"

    def answer(request):
        if request.url.host == "old":
            raise httpx2.ConnectError("refused")
        return httpx2.Response(200, json={"status": "finished", "job_state": "completed"})

    async with AsyncClient("http://old", "key", find=find) as client:
        client._http = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
        assert await client.begin_episode() is None
        assert await client.begin_episode() is None
    assert found == [1]


async def test_a_job_that_is_over_has_no_more_episodes_and_one_that_is_not_found_is_lost():
    def over():
        raise JobOver("job j is cancelled: enough")

    def refused(request):
        raise httpx2.ConnectError("refused")

    for find, raised in ((over, None), (None, ConnectionLost), (lambda: ("http://old", "key"), ConnectionLost)):
        async with AsyncClient("http://old", "key", find=find, retry_seconds=0.2) as client:
            client._http = httpx2.AsyncClient(transport=httpx2.MockTransport(refused))
            if raised is None:
                assert await client.begin_episode() is None
            else:
                with pytest.raises(raised):
                    await client.begin_episode()


def test_a_download_goes_on_where_its_connection_was_lost_and_begins_anew_where_the_file_has_changed(
    monkeypatch, tmp_path
):
    old, new, asked = b"0123456789", b"abcdefghij", []

    def answer(request):
        asked.append((request.headers.get("range"), request.headers.get("if-range")))
        match len(asked):
            case 1:
                return httpx2.Response(200, headers={"etag": "1"}, stream=Pieces(old[:4], httpx2.ReadError("gone")))
            case 2:
                return httpx2.Response(206, headers={"etag": "1"}, stream=Pieces(old[4:6], httpx2.ReadError("gone")))
            case 3:
                return httpx2.Response(503)
            case 4:
                return httpx2.Response(200, headers={"etag": "2"}, stream=Pieces(new[:3], httpx2.ReadError("gone")))
        return httpx2.Response(206, headers={"etag": "2"}, stream=Pieces(new[3:]))

    with answering(monkeypatch, answer, retry_seconds=60.0) as client:
        client.job("j").download("curve.png", tmp_path / "in" / "curve.png")
    assert (tmp_path / "in" / "curve.png").read_bytes() == new
    assert asked == [(None, None), ("bytes=4-", "1"), ("bytes=6-", "1"), ("bytes=6-", "1"), ("bytes=3-", "2")]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["curve.png"]


@pytest.mark.parametrize(("status", "error"), [(404, NotFound), (503, ConnectionLost), (None, ConnectionLost)])
def test_a_download_that_fails_leaves_what_was_there_and_nothing_else(monkeypatch, tmp_path, status, error):
    (tmp_path / "f").write_text("as before")

    def answer(request):
        broken = Pieces(b"half", httpx2.ReadError("gone"))
        return httpx2.Response(status) if status else httpx2.Response(200, stream=broken)

    with answering(monkeypatch, answer) as client, pytest.raises(error):
        client.job("j").download("f", tmp_path / "f")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "as before")]


def test_a_submission_names_the_fields_that_the_server_takes():
    taken = SubmitJob.model_fields.keys() - {"config"} | ResourcesBody.model_fields.keys()
    assert set(SubmitFields.__annotations__) == taken
    with ControlClient("http://127.0.0.1:1", "key") as control, pytest.raises(TypeError, match="'gpu'"):
        control.submit({}, gpu=1)
