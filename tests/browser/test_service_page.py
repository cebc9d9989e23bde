"""The page of a service in a real browser: a real control plane, a real cluster, real jobs, and what the API says.

The picture of docs/how-to/dashboard.md is made by

    PALESTRA_PICTURES=docs pytest tests/browser/test_service_page.py -m browser -k picture
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browser.test_page import HOSTILE, SERIOUS, VIOLATIONS, WIDTHS, numbers_of, shown, visit
from browser.test_page_pictures import LEAST_BYTES, WIDTH
from service import GAMES, LONG, Service, until

from palestra.config import JobConfig

pytestmark = [pytest.mark.browser, pytest.mark.service]
TOML = """name = "typed"
steps = 3
deterministic = true
[engine]
kind = "fake"
reply_tokens = 3
[environment]
name = "frozen-lake"
settings = { impossible_reward = -1.0 }
train_tasks = 9
validation_tasks = 3
[rollout]
group_size = 8
groups_per_step = 2
[evaluation]
every_steps = 1
"""


class Api:
    """The control plane, as its routes answer a key."""

    def __init__(self, service: Service, key: str) -> None:
        self._service, self.key = service, key

    def __call__(self, method: str, path: str, **more: Any) -> Any:
        headers = {"authorization": f"Bearer {self.key}"}
        answer = httpx2.request(method, self._service.url + path, headers=headers, timeout=30, **more)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def job(self, job_id: str) -> dict[str, Any]:
        return self("GET", f"/jobs/{job_id}")

    def state(self, job_id: str) -> str:
        return self.job(job_id)["state"]

    def start(self, name: str, config: dict[str, Any] = LONG, **needs: float) -> str:
        return self("POST", "/jobs", json={"name": name, "config": config, "resources": needs})["job_id"]


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("page"), options=("--cpus", "4", "--gpus", "2")) as service:
        yield service.start()


@pytest.fixture(scope="module")
def admin(service) -> Api:
    return Api(service, service.key)


@pytest.fixture(scope="module")
def member(service, admin) -> Api:
    return Api(service, admin("POST", "/users", json={"name": "vera", "role": "member"})["secret"])


@pytest.fixture
def page_of(service, open_page):
    """Returns a function that opens the page with a key, typed into its form."""
    return lambda api, **more: open_page(f"{service.url}/dashboard", api.key, **more)


@pytest.fixture(scope="module")
def long_job(admin) -> Iterator[str]:
    """A job that runs, and holds two of four cores and one of two GPUs."""
    job = admin.start("long-lake", cpus=2, gpus=1)
    until(lambda: admin.state(job) == "running", "it runs", 120)
    yield job
    end(admin, job)


def end(admin: Api, *jobs: str) -> None:
    for job in jobs:
        admin("DELETE", f"/jobs/{job}")
    until(lambda: all(admin.state(job) == "cancelled" for job in jobs), "they are cancelled", 120)


def facts_of(page: Any) -> dict[str, str]:
    """Read at one moment, because the page changes while it is read."""
    script = "at => at.flatMap(one => [...one.querySelectorAll('dt, dd')]).map(one => [one.tagName, one.innerText])"
    read = page.locator(".facts").evaluate_all(script)
    names, values = ([text for tag, text in read if tag == wanted] for wanted in ("DT", "DD"))
    return dict(zip(names, values, strict=True))


def test_a_job_is_started_from_a_file_watched_and_left_with_its_curves(service, admin, page_of, tmp_path):
    page = page_of(admin)
    assert "pk_" not in page.evaluate("location.href")
    page.click("text=Start a job")
    page.wait_for_selector("form.start")
    page.fill("#start-config", "steps = \n")
    page.click("form.start button")
    page.wait_for_selector("form.start [role=alert]:not(:empty)")
    assert "not valid TOML" in page.locator("form.start [role=alert]").inner_text()
    assert "line 1" in page.locator("form.start [role=alert]").inner_text()
    page.fill("#start-config", '{"steps": "many"}')
    page.click("form.start button")
    page.wait_for_selector("form.start [role=alert]:has-text('config: steps')")
    page.fill("#start-gpus", "3")
    page.set_input_files("#start-file", {"name": "job.toml", "mimeType": "text/plain", "buffer": TOML.encode()})
    until(lambda: page.input_value("#start-config") == TOML, "the file is read")
    page.click("form.start button")
    page.wait_for_selector("form.start [role=alert]:has-text('never start')")
    page.fill("#start-gpus", "1")
    page.click("form.start button")
    page.wait_for_selector(".facts dl")
    job = page.evaluate("location.hash").split("/")[2]
    view = admin.job(job)
    assert (view["name"], view["user"], view["resources"]["gpus"]) == ("typed", "admin", 1.0)
    assert facts_of(page)["id"] == job
    assert facts_of(page)["submitted"].startswith(f"{datetime.fromtimestamp(view['created_at']):%Y-%m-%d %H:%M:%S}")

    # The log follows; the state changes without a reload
    visit(page, f"#/run/{job}/log")
    page.wait_for_selector(".log .line:has-text('step      3/3')")
    page.wait_for_selector("[role=status]:has-text('has ended')")
    written = httpx2.get(f"{service.url}/jobs/{job}/logs", headers={"authorization": f"Bearer {admin.key}"}).text
    assert "\n".join(page.locator(".log .line").all_text_contents()) == written.rstrip("\n")
    visit(page, f"#/run/{job}/job")
    page.wait_for_selector(".head .badge:has-text('completed')")
    changes = admin("GET", f"/jobs/{job}/changes")
    assert "3 of 3 steps" in facts_of(page)["progress"]
    cells = page.locator("main tbody td:nth-child(2)").all_inner_texts()
    assert cells == [change["following"] for change in reversed(changes)]

    # The run's own views, through the service
    rows = (service.state / "jobs" / job / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    visit(page, f"#/run/{job}/curves")
    assert numbers_of(page)["reward"] == shown(last["train/reward_mean"], 3)
    assert numbers_of(page)["validation"] == shown(last["validation/reward_mean"], 3)
    visit(page, f"#/run/{job}/step/3")
    assert numbers_of(page)["trained tokens"] == shown(last["train/trained_tokens"])
    page.locator(".group h3 a").first.click()
    page.locator(".member h2 a").first.click()
    page.wait_for_selector(".tokens .t")
    page.keyboard.press("u")
    page.wait_for_selector(".member")
    assert "palestra submit --from-job" in _talk(page, job)


def _talk(page: Any, job: str) -> str:
    visit(page, f"#/run/{job}/talk")
    return page.locator("main").inner_text()


def test_the_queue_says_why_and_machines_and_quotas_are_those_of_the_api(admin, page_of, long_job):
    hungry = admin.start("hungry", GAMES, cpus=3, gpus=2)
    small = admin.start("small", GAMES, cpus=3)
    until(lambda: all(admin.job(job)["place"] is not None for job in (hungry, small)), "they have places")
    page = page_of(admin)
    page.wait_for_selector(".queue li >> nth=1")
    for number, job in enumerate((hungry, small)):
        view, line = admin.job(job), page.locator(f".queue [data-job={job}]")
        assert (view["state"], view["place"]) == ("queued", number + 1)
        assert line.locator(".place").inner_text() == f"{number + 1}."
        assert line.locator(".why").inner_text() == view["reason"]
        assert "waits for" in view["reason"] or "behind" in view["reason"]
    listed = admin("GET", "/jobs")["jobs"]
    shown_ids = [row.get_attribute("data-job") for row in page.locator("table.jobs tbody tr").all()]
    assert shown_ids == [job["job_id"] for job in listed]
    assert numbers_of(page)["CPUs"] == "2"

    # Curves of chosen jobs stand beside one another
    ended = next(job["job_id"] for job in listed if job["state"] == "completed")
    for job in (long_job, ended):
        page.check(f"table.jobs [data-job={job}] input")
    page.click("text=Curves of the chosen")
    page.wait_for_selector(".cards .card >> nth=1")
    assert page.locator(".card h2").all_inner_texts() == ["long-lake", "typed"]
    visit(page, "#/")

    # Of the running job, how far it is, and how long it still takes
    cell = page.locator(f"table.jobs [data-job={long_job}] .progress")
    until(lambda: "left" in cell.inner_text(), "the time that is left is known")
    steps = int(cell.locator("progress").get_attribute("value") or 0)
    ours = admin("GET", "/dashboard/api/runs")["runs"]
    assert [run["run"] for run in ours] == [long_job]
    assert 0 < steps <= ours[0]["step"]
    assert f"of {ours[0]['steps']:,} steps" in cell.inner_text()

    admin("PATCH", "/tenants/default", json={"quota": {"cpus": 3, "jobs": 5, "tokens": 7_000_000}})
    page.click("#places >> text=Machines")
    page.wait_for_selector(".machine")
    cluster = admin("GET", "/cluster")
    (node,) = cluster["nodes"]
    held = page.locator(".machine dd span").all_inner_texts()
    assert held[:2] == [
        f"{node['cpus'] - node['free_cpus']:g} of {node['cpus']:g} held",
        f"{node['gpus'] - node['free_gpus']:g} of {node['gpus']:g} held",
    ]
    assert page.locator(".holders li").all_inner_texts() == ["running long-lake of admin: 2 CPU, 1 GPU"]
    page.wait_for_selector("[data-of=CPUs] td:has-text('3')")
    for name, key in (("jobs", "jobs"), ("CPUs", "cpus"), ("GPUs", "gpus")):
        cells = page.locator(f"[data-of={name}] td").all_inner_texts()
        quota = cluster["quota"][key]
        assert cells[:2] == [f"{cluster['in_use'][key]:g}", "no limit" if quota is None else f"{quota:g}"]
    assert page.locator("[data-of='tokens spent'] td").all_inner_texts()[1].replace(",", "") == "7000000"
    admin("PATCH", "/tenants/default", json={"quota": {"cpus": None, "jobs": None, "tokens": None}})

    # A job is cancelled only after the question was answered
    visit(page, "#/?state=queued")
    page.click(f"table.jobs [data-job={small}] button")
    page.click("dialog.confirm >> text=Let it be")
    assert admin.state(small) == "queued"
    page.click(f"table.jobs [data-job={small}] button")
    page.click("dialog.confirm >> text=Cancel the job")
    page.wait_for_selector(f"table.jobs [data-job={small}]", state="detached")
    assert (admin.state(small), admin.state(hungry)) == ("cancelled", "queued")
    visit(page, f"#/run/{hungry}/steps")
    assert "has not begun" in page.locator(".empty").inner_text()
    end(admin, hungry)


def test_its_main_view_has_its_picture_with_the_model_of_each_job(admin, page_of, long_job, tmp_path):
    second = admin.start("lake-of-two", cpus=2, gpus=0.5)
    until(lambda: admin.state(second) == "running", "it runs", 120)
    waiting = [admin.start("two-gpus", cpus=2, gpus=2), admin.start("wide", cpus=4)]
    until(lambda: all(admin.job(job)["place"] is not None for job in waiting), "they have places")
    page = page_of(admin, width=WIDTH, height=720)
    for job in (long_job, second):
        cell = page.locator(f"table.jobs [data-job={job}] .progress")
        until(lambda cell=cell: "left" in cell.inner_text(), "the time that is left is known")
    models = [page.locator(f"table.jobs [data-job={job}] td.model").inner_text() for job in (long_job, *waiting)]
    assert models == [JobConfig().policies["policy"].model] * 3, "they name none"
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(0, 0)
    path = Path(os.environ.get("PALESTRA_PICTURES", tmp_path)) / "dashboard-service.png"
    page.screenshot(path=path)
    assert path.stat().st_size > LEAST_BYTES
    end(admin, second, *waiting)


def test_a_member_sees_anothers_job_and_another_tenant_sees_nothing(service, admin, member, page_of, long_job):
    page = page_of(member)
    assert page.locator(f"table.jobs [data-job={long_job}]").count() == 1
    visit(page, f"#/run/{long_job}/job")
    assert page.locator(".head [data-act=cancel]").count() == 0
    visit(page, f"#/run/{long_job}/log")
    page.wait_for_selector(".log .line")

    stranger = Api(service, admin("POST", "/tenants", json={"name": "other"})["secret"])
    theirs = page_of(stranger)
    assert theirs.locator("table.jobs").count() == 0
    for view in ("job", "log", "curves", "steps", "episodes"):
        visit(theirs, f"#/run/{long_job}/{view}")
        said = theirs.locator("main").inner_text()
        assert "there is no job" in said, (view, said)
        assert "long-lake" not in said
    visit(theirs, "#/machines")
    assert "1 job that this key does not see" in theirs.locator(".machine").inner_text()
    assert "long-lake" not in theirs.locator("main").inner_text()


def test_a_key_that_is_revoked_while_the_page_is_open_opens_nothing_more(service, admin, page_of):
    made = admin("POST", "/users", json={"name": "leaver", "role": "member"})
    page = page_of(Api(service, made["secret"]))
    assert page.locator("#places a").all_inner_texts() == ["Jobs", "Machines", "Start a job"]
    admin("DELETE", "/users/leaver")
    page.wait_for_selector("#key")
    assert page.locator("#places").count() == 0
    assert page.evaluate("sessionStorage.getItem('palestra-key')") is None
    assert page.evaluate("JSON.stringify(localStorage)").count("pk_") == 0
    page.fill("#key", "pk_000000000000_" + "x" * 43)
    page.click("form.login button")
    page.wait_for_selector("form.login [role=alert]:not(:empty)")
    page.fill("#key", admin.key)
    page.click("form.login button")
    page.wait_for_selector("#places >> text=admin")


def test_a_server_that_was_gone_is_followed_again_and_no_change_is_missing_or_twice(service, admin, page_of, long_job):
    page = page_of(admin)
    begun = admin.start("before", GAMES, cpus=9 / 8)
    page.wait_for_selector(".news li")
    service.processes[-1].kill()
    page.wait_for_selector("#live.lost")
    service.start()
    page.wait_for_selector("#live.live")
    until(lambda: admin.state(begun) == "completed", "it ends", 120)
    end(admin, admin.start("after", GAMES, cpus=4, gpus=2))
    wanted = 2 + len(admin("GET", f"/jobs/{begun}/changes"))
    page.wait_for_selector(f".news li >> nth={wanted - 1}")
    numbers = [int(line.get_attribute("data-number")) for line in page.locator(".news li").all()]
    assert numbers == list(range(numbers[0], numbers[0] - wanted, -1))
    assert admin.state(long_job) == "running"


def test_what_a_log_says_can_do_nothing_and_is_followed_over_a_lost_connection(service, admin, page_of, long_job):
    log = service.state / "jobs" / long_job / "log.txt"
    page = page_of(admin)
    visit(page, f"#/run/{long_job}/log")
    page.wait_for_selector(".log .line")
    with log.open("ab") as file:
        file.write(f"\n{HOSTILE}\n\x1b[31mred\x1b[0m\n".encode() + b"\xff\xfe wrong\n")
        file.write(b"y" * 10_000_000 + b"\nthe last line\n")
    started = time.monotonic()
    page.wait_for_selector(".log .line:has-text('the last line')")
    assert time.monotonic() - started < 20
    assert "owned" not in page.title()
    assert page.locator("main img, main script").count() == 0
    text = page.locator(".log").inner_text()
    assert not set("\u202e\u0007\x1b") & set(text)
    assert "␛[2J" in text
    assert "U+202E" in text
    assert "9,998,000 more characters" in text
    assert "red" in page.locator(".log .line").all_text_contents()
    # A part of the log that is long is behind a button
    page.reload()
    page.wait_for_selector(".log .line:has-text('the last line')")
    page.click("text=From the beginning")
    page.wait_for_selector(".log .line:has-text('before training')")
    service.processes[-1].kill()
    page.wait_for_selector("[role=status]:has-text('Connection lost')")
    with log.open("ab") as file:
        file.write(b"while it was gone\n")
    service.start()
    page.wait_for_selector(".log .line:has-text('while it was gone')")
    lines = page.locator(".log .line").all_text_contents()
    assert [lines.count(line) for line in ("while it was gone", "the last line")] == [1, 1]


def test_nothing_serious_keeps_anybody_from_using_any_view(admin, page_of, long_job, axe):
    waits = admin.start("waits", GAMES, cpus=4)
    page = page_of(admin)
    page.evaluate(axe)
    of_job = [f"#/run/{long_job}/{view}" for view in ("job", "log", "curves", "steps", "nowhere")]
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for address in ("#/", "#/machines", "#/start", f"#/run/{waits}/steps", *of_job):
            visit(page, address)
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{address} is wider than {width} px"
            page.emulate_media(color_scheme="dark" if width == 360 else "light")
            if width != 2560:
                found = page.evaluate(VIOLATIONS)
                assert [one for one in found if one[0] in SERIOUS] == [], (address, width)
    # The question before a job is cancelled, by keyboard alone
    visit(page, f"#/run/{waits}/job")
    page.locator("[data-act=cancel]").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog.confirm[open]")
    assert [one for one in page.evaluate(VIOLATIONS) if one[0] in SERIOUS] == []
    page.keyboard.press("Escape")
    assert admin.state(waits) == "queued"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".head .badge:has-text('cancelled')")
