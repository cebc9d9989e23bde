"""What a job leaves, read through the API while it changes."""

from __future__ import annotations

import shutil
import threading

import pytest

from palestra.errors import InvalidRequest, NotFound
from palestra.scheduler.api import artifacts, streams
from palestra.scheduler.api.streams import Place


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
