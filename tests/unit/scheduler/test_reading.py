"""What a job leaves, read through the API while it changes."""

from __future__ import annotations

import shutil
import threading

import httpx2
import pytest

from palestra.errors import InvalidRequest, NotFound
from palestra.scheduler.api import artifacts, create_control_app, streams
from palestra.scheduler.api.streams import Place
from palestra.scheduler.control_store import ControlStore
from palestra.scheduler.scheduler import RUN
from unit.building import FakeClock
from unit.scheduler.building import control_plane, submit


async def test_files_that_come_and_go_while_they_are_listed_are_no_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    over = threading.Event()

    def change():
        while not over.is_set():
            folder = tmp_path / "checkpoints" / "step"
            folder.mkdir(parents=True)
            for number in range(20):
                (folder / str(number)).touch()
            shutil.rmtree(tmp_path / "checkpoints")

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            assert "metrics.jsonl" in [artifact.path for artifact in await artifacts.listed(tmp_path)]
    finally:
        over.set()
        thread.join()


async def test_links_lead_nowhere(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "other").write_text("theirs")
    (run / "link").symlink_to(tmp_path / "other")
    (run / "folder").symlink_to(tmp_path)
    assert await artifacts.listed(run) == []
    for name in ("link", "folder/other", "../other", "", ".", "/etc/passwd", "x\0", "long" * 2000):
        with pytest.raises(NotFound):
            await artifacts.checked(run, name)


@pytest.mark.parametrize("text", ["", ".", "1", "1.", ".1", "1.x", "-1.0", "1.2.3", "²." + "1", "9" * 41 + ".1"])
def test_an_id_that_no_stream_had_is_refused(text):
    with pytest.raises(InvalidRequest):
        Place.of(text)


def test_the_largest_id_is_one_that_a_database_can_compare_with():
    assert Place.of("9" * 18 + "." + "9" * 18) == (streams.LARGEST, streams.LARGEST)


@pytest.mark.parametrize("changed", [False, True])
async def test_the_rest_of_a_file_can_be_asked_for_and_is_the_whole_where_it_has_changed(tmp_path, changed):
    with ControlStore(f"sqlite:///{tmp_path / 'control.db'}", FakeClock()) as store:
        plane = control_plane(store, tmp_path, without_keys=True)
        job = await submit(store, "default")
        run = plane.scheduler.folder_of(job.job_id) / RUN
        run.mkdir(parents=True)
        (run / "curve.png").write_bytes(b"0123456789")
        transport, path = httpx2.ASGITransport(create_control_app(plane)), f"/jobs/{job.job_id}/artifacts/curve.png"
        async with httpx2.AsyncClient(transport=transport, base_url="http://control") as http:
            first = await http.get(path)
            if changed:
                (run / "curve.png").write_bytes(b"abcdefghijk")
            rest = await http.get(path, headers={"range": "bytes=4-", "if-range": first.headers["etag"]})
            assert (rest.status_code, rest.content) == ((200, b"abcdefghijk") if changed else (206, b"456789"))
