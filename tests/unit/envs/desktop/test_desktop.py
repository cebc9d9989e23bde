"""A window on a screen of its own: what an agent sees and does, the picture of it, and what breaks."""

from __future__ import annotations

import asyncio
import glob
import io
import json
import os
import re
import signal
import sys

import psutil
import pytest
from machine import require
from PIL import Image

from palestra.envs import catalog_entry
from palestra.errors import EnvironmentFailed, EpisodeForfeited
from palestra.tools import ToolFailure
from palestra.types.messages import FunctionCall, ToolCall, text_message
from palestra_inspect.environment_check import check_environment
from palestra_screens import DesktopEnvironment
from palestra_screens.desktop.environment import desktop_tasks

pytestmark = pytest.mark.ci

require("Xvfb", "xdotool", "bwrap")
TASK = {
    "id": "w",
    "prompt": "Write Ada into Name. Tick Gift. Then press Save.",
    "fields": ["Name", "City"],
    "boxes": ["Gift"],
    "buttons": ["Save", "Delete"],
    "expected": {"pressed": "Save", "values": {"Name": "Ada", "City": "", "Gift": True}},
}


@pytest.fixture
async def desktop():
    environment = DesktopEnvironment(actions="text")
    yield environment
    await environment.close()


async def do(environment: DesktopEnvironment, *commands: str) -> tuple[float, bool, str]:
    reward, over, text = 0.0, False, ""
    for command in commands:
        messages, reward, over, _, _ = await environment.step_message(text_message("assistant", command))
        text = messages[-1].text if messages else ""
    return reward, over, text


def places(text: str) -> dict[str, str]:
    return {name: at for name, at in re.findall(r"^\w+ (\w+).* at (\d+ \d+)$", text, re.MULTILINE)}


@pytest.mark.slow
async def test_a_window_is_filled_in_by_mouse_and_keyboard(desktop):
    text, _ = await desktop.reset(TASK)
    assert [line.partition(" at ")[0] for line in text.splitlines()] == [
        *(TASK["prompt"], "", 'field Name ""', 'field City ""', "box Gift", "button Save", "button Delete")
    ]
    at = places(text)
    _, over, text = await do(desktop, f"click {at['Name']}", "type Adax", "key BackSpace", f"click {at['Gift']}")
    assert not over
    assert 'field Name "Ada"' in text
    assert "box Gift (ticked)" in text
    assert (await do(desktop, f"click {at['Save']}"))[:2] == (1.0, True)
    at = places((await desktop.reset(TASK))[0])  # a new window, with nothing in it
    assert (await do(desktop, f"click {at['Save']}"))[:2] == (0.0, True)


async def test_its_picture_shows_what_was_done(desktop):
    text, _ = await desktop.reset(TASK)
    before = Image.open(io.BytesIO(await desktop.screenshot()))
    assert (before.size, before.mode) == ((320, 200), "RGB")
    x, y = map(int, places(text)["Name"].split())
    assert before.getpixel((x, y)) == (255, 255, 255)  # the field is white, what is around it is not
    assert before.getpixel((310, 190)) not in ((255, 255, 255), (0, 0, 0))
    await do(desktop, f"click {x} {y}", "type MMMM")
    after = Image.open(io.BytesIO(await desktop.screenshot()))
    left = range(x - 70, x)
    dark = [sum(sum(picture.getpixel((place, y))) < 300 for place in left) for picture in (before, after)]
    assert dark[0] < 5 < dark[1]


async def test_what_an_agent_does_wrong_is_said(desktop):
    await desktop.reset(TASK)
    for command in ("key NoSuchKey", "key a;b", "click x y", "click 5", "click -1 5", "press Save", "type"):
        _, over, text = await do(desktop, command)
        assert not over
        assert text.startswith(("Error: ", "That is no action"))


@pytest.mark.parametrize(
    "command",
    [
        *(
            "key Terminate_Server",
            "key ctrl+Terminate_Server",
            "key 0xfed5",
            "key exec",
            "key search",
            "key MouseKeys_Enable",
        ),
        *("key " + "+".join("a" * count) for count in (2, 10, 11, 25)),
        *("key ctrl+ctrl+a", "key ctrl+alt+BackSpace", "key a+", "key +", "key F13", "key Pointer_Button1"),
        *("click 320 1", "click 1 200", "click 9999999999 1", "type a\x1bb", "type \ud800"),
    ],
)
async def test_what_no_key_and_no_place_is_does_not_reach_the_screen(desktop, monkeypatch, command):
    """An agent that ended its screen had its episode played again; eleven keys at once broke xdotool's heap."""

    async def reached(*arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(desktop, "_xdotool", reached)
    name, _, rest = command.partition(" ")
    names = {"key": ["key"], "type": ["text"], "click": ["x", "y"]}[name]
    arguments = dict(zip(names, rest.split(" ") if name == "click" else [rest], strict=True))
    (result,) = await desktop._manager.execute_calls(
        [ToolCall(id="c", function=FunctionCall(name=name, arguments=json.dumps(arguments)))]
    )
    assert result.failure is ToolFailure.BAD_ARGUMENTS


@pytest.mark.parametrize(
    ("blow", "kind"),
    [
        ("window.py", EpisodeForfeited),
        pytest.param("Xvfb", EpisodeForfeited, marks=pytest.mark.slow),
        ("bwrap", EnvironmentFailed),
    ],
)
async def test_what_ends_in_the_sandbox_is_a_forfeit_and_what_kills_the_sandbox_is_not(desktop, blow, kind):
    others = psutil.Process().children(recursive=True)  # of tests before this one
    await desktop.reset(TASK)
    started = [one for one in psutil.Process().children(recursive=True) if one not in others]
    victim = next(one for one in started if any(part.endswith(blow) for part in one.cmdline()[:3]))
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.sleep(0.5)
    with pytest.raises(kind):
        await do(desktop, "click 5 5")
    at = places((await desktop.reset(TASK))[0])
    assert (await do(desktop, f"click {at['Delete']}"))[:2] == (0.0, True)
    await desktop.close()
    assert set(psutil.Process().children()) <= set(others)


async def test_all_that_sees_the_screen_runs_in_the_sandbox(desktop):
    """A model's text has written past the heap of xdotool, which had the rights of the operator."""
    sockets = set(glob.glob("/tmp/.X11-unix/*"))
    others = psutil.Process().children(recursive=True)
    await desktop.reset(TASK)
    assert set(glob.glob("/tmp/.X11-unix/*")) == sockets
    ours = os.stat("/proc/self/ns/net").st_ino
    started = [one for one in psutil.Process().children(recursive=True) if one not in others]
    programs = [one for one in started if "Xvfb" in one.cmdline()[:1] or "window.py" in one.cmdline()[:3]]
    assert programs
    assert all(os.stat(f"/proc/{one.pid}/ns/net").st_ino != ours for one in programs)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_nothing_of_a_desktop_is_left_however_its_process_ends(tmp_path, number):
    code = (
        "import asyncio, json, sys\nfrom palestra_screens.desktop import DesktopEnvironment\n"
        "async def main():\n    await DesktopEnvironment().reset(json.loads(sys.argv[1]))\n"
        "    print('ready', flush=True)\n    await asyncio.sleep(60)\nasyncio.run(main())\n"
    )
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, json.dumps(TASK), stdout=-1, env=variables)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    family = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(number)
    await child.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert list(tmp_path.iterdir()) == []


def test_tasks_name_what_their_window_has():
    for task in desktop_tasks("validation", 20, 1):
        assert task["expected"]["pressed"] in task["buttons"]
        assert {*task["expected"]["values"]} == {*task["fields"], *task["boxes"]}
        assert task["expected"]["pressed"] in task["prompt"]


@pytest.mark.slow
def test_it_keeps_to_what_environments_have_to_do():
    entry = catalog_entry("desktop")
    check_environment(entry.make, entry.generate("train", 1, 1))


async def test_an_agent_is_shown_the_screen_after_each_action():
    environment = DesktopEnvironment(observation="screenshot", actions="text")
    try:
        goal, first = (await environment.reset(TASK))[0]
        assert goal == TASK["prompt"]
        assert first.data == await environment.screenshot()
        (message,), *_ = await environment.step_message(text_message("assistant", "click 5 5"))
        (shown,) = message.content
        assert Image.open(io.BytesIO(shown.data)).size == (320, 200)
    finally:
        await environment.close()
