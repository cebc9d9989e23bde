"""The page's timeline of a live run's versions: what the gate decided, in order, with its reasons."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import time

import pytest

from palestra_live.gate.machine import Gate
from palestra_live.gate.records import Audited, HeldOut, Offered, Ordered, Started

pytestmark = pytest.mark.browser
TABLE = """Array.from(document.querySelector('.versions table').tBodies[0].rows,
    row => [row.cells[0].innerText, row.cells[1].innerText,
            row.cells[2].firstChild.getAttribute('aria-label').split(' since').length - 1,
            row.cells[3].innerText])"""


def test_the_versions_of_a_live_run_have_a_line_of_stages_and_the_reason_of_the_last(
    finished, dashboard, open_page, tmp_path
):
    shutil.copytree(finished.run_dir, tmp_path / "live")
    gate, decided = Gate(), []
    for observation in (
        Started(version=0, key="6b" * 16, bounds={"canary": 0.5}),
        Offered(version=1),
        HeldOut(version=1, differences=(-1.0,) * 40),
        Offered(version=2),
        HeldOut(version=2, differences=(0.1,) * 40),
        Audited(version=2, passed=True),
        Ordered(order="hold", by="ann", reason="<b>a & b</b> ü"),
    ):
        decided += gate.see(observation)
    began = time.time() - 1000
    with contextlib.closing(sqlite3.connect(tmp_path / "live" / "run.db")) as store, store:
        for number, one in enumerate(decided, 1):
            data = json.dumps(one.event | {"number": number, "at": began + 100 * number})
            for _ in range(2):  # one that was written again after a kill counts once
                store.execute("INSERT INTO events (at, kind, data) VALUES (?, 'gate_decided', ?)", (began, data))
    link, _ = dashboard(tmp_path / "live")
    page = open_page(link)
    page.evaluate("location.hash = '#/run/live/events'")
    page.wait_for_selector(".versions table")
    assert page.evaluate(TABLE) == [
        ["2", "canary", 2, "passed held-out tasks and audit"],
        ["1", "rejected", 2, "worse than the live version on held-out tasks"],
        ["0", "live", 1, "the version that the run begins with"],
    ]
    assert "promotions stopped by ann: <b>a & b</b> ü" in page.inner_text("main")
