"""The pictures of docs/how-to/dashboard.md: the main views of a run, in a real browser, light and dark.

Without more, of the run of the other tests, to see that all can be made. For the docs, of a run that has learned:

    PALESTRA_PICTURES=docs PALESTRA_PICTURES_OF=runs/addition pytest tests/browser/test_page_pictures.py -m browser

The findings are always those of a run that is made here, because one that learns has none: its learning rate is far too
high, and its reward grows with the length of replies.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser.test_page import ready, visit
from servers import Job, until

pytestmark = pytest.mark.browser
WIDTH, HEIGHT = 1180, 860
IN_THE_DARK = ("curves", "tokens")
LEAST_BYTES = 8_000  # of a picture that shows something


def episode_to_show(folder: Path) -> tuple[str, int]:
    """An episode of the newest batch whose group has different rewards, and its step."""
    with sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True) as connection:
        found = connection.execute(
            "SELECT e.episode_id, g.step FROM episodes e JOIN groups g USING (kind, group_index) "
            "WHERE e.kind = 'train' AND e.state = 'completed' AND (SELECT count(DISTINCT rewards) FROM episodes other "
            "WHERE other.kind = 'train' AND other.group_index = e.group_index) > 1 "
            "AND e.episode_id IN (SELECT episode_id FROM trained_tokens) ORDER BY g.step DESC, e.episode_id LIMIT 1"
        ).fetchone()
    connection.close()
    return found


def views(name: str, episode: str, step: int) -> dict[str, tuple[str, Callable[[Any], None]]]:
    """By picture: the address of a view, and what is done there before the picture is taken."""
    address = f"#/run/{name}"

    def choose(page: Any) -> None:
        """Choose a token that the policy was not sure of, if there is one."""
        page.wait_for_selector(".tokens .t")
        unsure = page.locator(".tokens .t.sampled:not(.p-0)")
        (unsure if unsure.count() else page.locator(".tokens .t.sampled")).first.click()
        page.wait_for_selector(".token-detail dl")
        page.locator(".tokenpart").scroll_into_view_if_needed()

    return {
        "curves": ("#/", lambda page: page.wait_for_selector(".plot canvas")),
        "steps": (f"{address}/steps", lambda page: None),
        "step": (f"{address}/step/{step}", lambda page: None),
        "group": (f"{address}/group/train/{int(episode[6:12])}", lambda page: None),
        "episode": (f"{address}/episode/{episode}", lambda page: page.wait_for_selector(".tokens .t")),
        "tokens": (f"{address}/episode/{episode}", choose),
        "episodes": (f"{address}/episodes", lambda page: None),
    }


SICK = """
import palestra

config = palestra.JobConfig(
    name="longer",
    run_dir={folder!r},
    model="tiny-random",
    steps=14,
    engine={{"threads": 1}},
    policies={{
        "policy": {{"max_context": 256, "sampling": {{"max_tokens": 24}}, "optimizer": {{"learning_rate": 0.1}}}}
    }},
    rollout={{"group_size": 4, "groups_per_step": 4}},
    evaluation={{"every_steps": 0}},
)
tasks = [{{"prompt": f"{{n}} + {{n}} ="}} for n in range(32)]
palestra.train(reward=lambda task, answer: float(len(answer)), tasks=tasks, config=config)
"""


@pytest.fixture(scope="module")
def sick(tmp_path_factory) -> Path:
    """A run in which the doctor finds something."""
    folder = tmp_path_factory.mktemp("sick") / "longer"
    subprocess.run([sys.executable, "-c", SICK.format(folder=str(folder))], capture_output=True, check=True)
    return folder


def taken(page: Any, picture: str, target: Path) -> None:
    """Take a picture, and see that it shows something."""
    page.wait_for_timeout(600)  # until all that is in sight is drawn
    # The docs are not of the folders of the machine on which the pictures are taken.
    page.evaluate(
        "document.querySelectorAll('main .head .path').forEach(one => "
        "{ one.textContent = 'runs/' + one.textContent.split('/').pop() })"
    )
    path = target / f"dashboard-{picture}.png"
    page.screenshot(path=path)
    until(path.exists, str(path))
    assert path.stat().st_size > LEAST_BYTES, path


def test_findings_have_their_picture(sick, dashboard, open_page, tmp_path):
    link, _ = dashboard(sick)
    page = open_page(link, width=WIDTH, height=560)
    visit(page, "#/run/longer/findings")
    assert page.locator(".finding").count() > 1
    taken(page, "findings", Path(os.environ.get("PALESTRA_PICTURES", tmp_path)))


def test_talking_to_a_checkpoint_has_its_picture(finished, dashboard, open_page, tmp_path):
    folder = Path(os.environ.get("PALESTRA_PICTURES_OF", finished.run_dir))
    link, _ = dashboard(folder)
    page = open_page(link, width=WIDTH, height=HEIGHT)
    visit(page, f"#/run/{folder.name}/episode/{episode_to_show(folder)[0]}")
    page.locator(".message.user .talkfrom").last.click()
    page.click(".local button:text-is('Load this checkpoint')")
    page.wait_for_selector(".composer textarea", timeout=180_000)
    page.fill("input[name=temperature]", "0")
    page.fill("input[name=max_tokens]", "12")
    for said in (None, "7 + 12 ="):
        if said is not None:
            page.fill(".composer textarea", said)
        wanted = 2 * (page.locator(".talk .message.assistant").count() + 1)
        page.click(".composer .primary")
        page.wait_for_function(
            "wanted => document.querySelectorAll('.talk .message.assistant button').length === wanted", arg=wanted
        )
    taken(page, "talk", Path(os.environ.get("PALESTRA_PICTURES", tmp_path)))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_main_view_has_its_picture(finished: Job, dashboard, open_page, tmp_path, scheme):
    folder = Path(os.environ.get("PALESTRA_PICTURES_OF", finished.run_dir))
    target = Path(os.environ.get("PALESTRA_PICTURES", tmp_path))
    link, _ = dashboard(folder)
    page = open_page(link, width=WIDTH, height=HEIGHT, scheme=scheme)
    for picture, (address, prepare) in views(folder.name, *episode_to_show(folder)).items():
        if scheme == "dark" and picture not in IN_THE_DARK:
            continue
        if page.evaluate("location.hash.split('?')[0]") != address:
            visit(page, address)
        ready(page, address)
        prepare(page)
        taken(page, f"{picture}{'-dark' if scheme == 'dark' else ''}", target)
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
