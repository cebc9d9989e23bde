"""MiniWoB's pages: problems from a seed, the page's own reward, and episodes at the same time in one browser."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time

import pytest
from machine import require

from palestra.envs import catalog_entry
from palestra.errors import ConfigError
from palestra.types.messages import text_message
from palestra_inspect.environment_check import check_environment
from palestra_screens import MiniWoB
from palestra_screens.browser.chromium import shared_driver
from palestra_screens.browser.miniwob import PAGES, checked_page, page_server

require("chromium", packages=("miniwob", "playwright"))
pytestmark = pytest.mark.browser


async def play(environment: MiniWoB, task: dict, *commands: str) -> float:
    text, _ = await environment.reset(task)
    total = 0.0
    for command in commands or (solution(text),):
        for line in command.split("\n"):
            _, reward, over, _, _ = await environment.step_message(text_message("assistant", line))
            total += reward
            if over:
                return total
    return total


def solution(text: str) -> str:
    """Solve five of the tasks by reading the page as an agent sees it."""
    if found := re.match(r'Click on the "(.*)" button|Click on the link "(.*)"', text):
        line = re.search(rf"^.(\d+). (?:button |link )?{found[1] or found[2]}$", text, re.MULTILINE)
        return f"click {line[1] if line else 0}"
    if found := re.match(r'Enter "(.*)" into', text):
        return f"type 1 {found[1]}\nclick 2"
    if found := re.match(r"Select (.*) from the list", text):
        return f"select 1 {found[1]}\nclick 2"
    return "click 1"


async def test_five_tasks_are_solved_and_failed_as_the_pages_have_it():
    environment = MiniWoB(actions="text", max_steps=3)
    await environment.setup()
    try:
        for page in ("click-button", "click-link", "enter-text", "choose-list", "focus-text"):
            assert await play(environment, {"page": page, "seed": 11}) == 1.0
        assert await play(environment, {"page": "enter-text", "seed": 11}, "click 2") == 0.0
        assert await play(environment, {"page": "enter-text", "seed": 11}, "wait 0\nwait 0\nwait 0\nwait 0") == 0.0
        for page in (None, "../core/core", "no-such-page", "click-button.html"):
            with pytest.raises(ConfigError, match=r"MiniWoB.*page"):
                await environment.reset({"page": page, "seed": 1})
    finally:
        await environment.close()


async def test_a_seed_makes_the_same_problem_in_every_episode():
    environments = [MiniWoB(actions="text") for _ in range(2)]
    try:
        for one in environments:
            await one.setup()
        for page in PAGES[::4]:
            task = {"page": page, "seed": 5}
            (first, _), (second, _) = await asyncio.gather(*(one.reset(task) for one in environments))
            assert first == second
            assert "\n[1] " in first, page  # something to act on
        other = [(await environments[0].reset({"page": "click-link", "seed": seed}))[0] for seed in range(4)]
        assert len(set(other)) == 4
        assert shared_driver().starts == 1
    finally:
        for one in environments:
            await one.close()


def test_tasks_of_one_page_and_of_all():
    assert {task["page"] for task in catalog_entry("miniwob/click-tab").generate("train", 5, 1)} == {"click-tab"}
    assert {task["page"] for task in catalog_entry("miniwob").generate("train", 300, 1)} == set(PAGES)
    assert len(PAGES) == 30
    assert [checked_page(page) for page in PAGES] == [*PAGES]
    with pytest.raises(ConfigError, match=r"page.*'click-butto'"):
        catalog_entry("miniwob/click-butto").generate("train", 1, 1)


@pytest.mark.slow
def test_it_keeps_to_what_environments_have_to_do():
    entry = catalog_entry("miniwob/enter-text")
    actions = ["click 1", "type 1 x", "no action", "click 99", "key Nothing", "scroll down", "click 2"]
    check_environment(lambda: entry.make(actions="text"), entry.generate("train", 1, 1), actions)


def test_a_browser_that_closes_its_connection_is_no_error_to_report(capfd):
    host, port = page_server().split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /miniwob/click-test.html HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    time.sleep(0.2)
    assert capfd.readouterr().err == ""
