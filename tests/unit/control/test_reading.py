"""What a job leaves, read through the API while it changes."""

from __future__ import annotations

import shutil
import threading

import pytest

from palestra.errors import InvalidRequest, NotFound
from palestra.types.states import JobState
from palestra_service.api import jobs_api as artifacts
from palestra_service.api import streams
from palestra_service.api.streams import StreamPlace
from palestra_service.jobs.scheduler import RUN
from unit.control.building import running, submit


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
            assert "metrics.jsonl" in [artifact.path for artifact in artifacts.run_files(tmp_path)]
    finally:
        over.set()
        thread.join()


async def test_links_lead_nowhere(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "other").write_text("theirs")
    (run / "link").symlink_to(tmp_path / "other")
    (run / "folder").symlink_to(tmp_path)
    assert artifacts.run_files(run) == []
    for name in ("link", "folder/other", "../other", "", ".", "/etc/passwd", "x\0", "long" * 2000):
        with pytest.raises(NotFound):
            artifacts.run_file(run, name)


@pytest.mark.parametrize("text", ["", ".", "1", "1.", ".1", "1.x", "-1.0", "1.2.3", "²." + "1", "9" * 41 + ".1"])
def test_an_id_that_no_stream_had_is_refused(text):
    with pytest.raises(InvalidRequest):
        StreamPlace.of(text)


def test_the_largest_id_is_one_that_a_database_can_compare_with():
    assert StreamPlace.of("9" * 18 + "." + "9" * 18) == (streams.LARGEST, streams.LARGEST)


@pytest.mark.parametrize("changed", [False, True])
async def test_the_rest_of_a_file_can_be_asked_for_and_is_the_whole_where_it_has_changed(plane, http, changed):
    job = await submit(plane.store, "default")
    run = plane.scheduler.folder_of(job.job_id) / RUN
    run.mkdir(parents=True)
    (run / "curve.png").write_bytes(b"0123456789")
    path = f"/jobs/{job.job_id}/artifacts/curve.png"
    first = await http.get(path)
    if changed:
        (run / "curve.png").write_bytes(b"abcdefghijk")
    rest = await http.get(path, headers={"range": "bytes=4-", "if-range": first.headers["etag"]})
    assert (rest.status_code, rest.content) == ((200, b"abcdefghijk") if changed else (206, b"456789"))


async def test_a_job_whose_folder_was_removed_has_its_record_left(plane, http):
    job = await running(plane.store, "default")
    await plane.store.change_state(job.job_id, JobState.RUNNING, JobState.COMPLETED, "its steps are done")
    for path, text in (("logs", ""), ("artifacts", "[]"), ("events", '"completed"'), ("changes", '"completed"')):
        answer = await http.get(f"/jobs/{job.job_id}/{path}")
        assert answer.status_code == 200, (path, answer.text)
        assert text in answer.text
    assert (await http.get(f"/jobs/{job.job_id}/artifacts/curve.png")).status_code == 404
    assert (await http.get(f"/jobs/{job.job_id}")).json()["state"] == "completed"
