"""The page's tables of costs show calls and money where the job counts them, and only time elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from servers import PALESTRA, SCRIPTED, Job, run_through

pytestmark = pytest.mark.browser
TABLES = """Array.from(document.querySelectorAll('main table'),
    one => Array.from(one.rows, row => Array.from(row.cells, cell => cell.innerText)))"""


def test_what_a_job_counts_is_shown_and_nothing_else(finished, dashboard, open_page, tmp_path):
    with Job(tmp_path / "job", {**SCRIPTED, "prices": {"device_hour": 2.0}}) as job:
        run_through(job, [])
        shutil.copytree(job.run_dir, tmp_path / "priced")
    shutil.copytree(finished.run_dir, tmp_path / "plain")
    link, _ = dashboard(tmp_path / "plain", tmp_path / "priced")
    page = open_page(link)

    def tables_of(run: str) -> list[list[list[str]]]:
        address = f"#/run/{run}/costs"
        page.evaluate("address => { location.hash = address }", address)
        page.wait_for_selector(f'html[data-ready="{address}"]', state="attached")
        return page.evaluate(TABLES)

    assert [rows[0] for rows in tables_of("plain")] == [["phase", "time"]]
    phases, payees = tables_of("priced")
    assert phases[0] == ["phase", "calls", "tokens in", "tokens out", "time", "money"]
    said = subprocess.run([PALESTRA, "cost", tmp_path / "priced", "--json"], capture_output=True, check=True).stdout
    calls = json.loads(said)["total"]["calls"]
    assert [int(rows[-1][1].replace(",", "")) for rows in (phases, payees)] == [calls, calls]
    assert calls > 0
