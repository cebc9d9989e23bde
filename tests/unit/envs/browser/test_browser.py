"""Pages: what an agent sees and does, what no page reaches, what no episode finds of another, and what breaks."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import tempfile
from typing import Any

import psutil
import pytest
from machine import require

from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited
from palestra.process.keeper import process_start
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall, text_message
from palestra_screens.browser.chromium import checked_hosts, shared_driver
from palestra_screens.browser.page import BrowserPage
from unit.envs.browser.pages import Visit, site

require("chromium")
pytestmark = pytest.mark.browser

FORM = """<!doctype html><title>Form</title><h1>Order</h1><p>Please <b>fill in</b>.</p>
<label>Name <input id=name placeholder="your name"></label><input type=password value=abc>
<select id=size><option>small<option>large</select><label><input type=checkbox> gift</label>
<button disabled>later</button><button id=send>Send</button><a href="/next">more</a>
<span id=icon style="cursor:pointer;display:inline-block;width:9px;height:9px" class="trash"></span>
<p style="display:none">hidden</p>
<div style="height:3000px"></div><p id=far>far below</p>
<script>
document.getElementById("send").addEventListener("click", () => {
  document.title = "sent"; document.body.append(document.createElement("p"));
  document.body.lastChild.textContent = "sent " + document.getElementById("name").value + " " + size.value;
});
document.getElementById("icon").addEventListener("click", () => { throw new Error("a page's own error") });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") document.body.textContent = "escaped"; });
</script>"""
OVERLAP = """<button style="position:absolute;left:0;top:0;width:200px;height:50px" onclick="document.title='low'">low
</button><button style="position:absolute;left:50px;top:0;width:200px;height:50px" onclick="document.title='high'">
high</button>"""


def calls(*asked: tuple[str, dict[str, Any]]) -> ChatMessage:
    made = tuple(
        ToolCall(id=f"c{number}", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        for number, (name, arguments) in enumerate(asked)
    )
    return ChatMessage(role="assistant", content=(), tool_calls=made)


async def act(environment: Visit, *asked: tuple[str, dict[str, Any]]) -> list[str]:
    messages, *_ = await environment.step_message(calls(*asked))
    return [message.text for message in messages]


def command(process: psutil.Process) -> str:
    """The command of a process; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def act_until_it_fails(environment: Visit, ref: int = 6) -> None:
    for _ in range(50):
        await act(environment, ("click", {"ref": ref}))
        await asyncio.sleep(0.05)


@pytest.fixture
async def visit():
    made: list[Visit] = []

    def make(hosts: list[str], **settings: Any) -> Visit:
        made.append(Visit(hosts=hosts, **settings))
        return made[-1]

    yield make
    for environment in made:
        await environment.close()


async def test_what_an_agent_sees_and_does(visit):
    with site({"/": FORM, "/next": "<p>the next page</p>"}) as pages:
        environment = visit([pages.host])
        await environment.setup()
        text, _ = await environment.reset({"url": f"http://{pages.host}/", "answer": "42"})
        assert text.splitlines() == [
            *("Read the page.", "", "Order", "Please", "fill in", ".", "Name"),
            *('[1] textbox your name ""', '[2] password "***"', "[3] choice *small | large", "[4] checkbox gift"),
            *("[5] button later (disabled)", "[6] button Send", "[7] link more", "[8] span#icon.trash", "far below"),
        ]
        shown = await act(
            environment,
            ("type", {"ref": 1, "text": "Ada"}),
            ("select", {"ref": 3, "option": "large"}),
            ("click", {"ref": "4"}),
            ("click", {"ref": 8}),
            ("click", {"ref": 6}),
        )
        assert shown[:5] == ["done"] * 5
        assert {'[1] textbox your name "Ada"', "[3] choice small | *large", "[4] checkbox gift (checked)"} <= {
            *shown[5].splitlines()
        }
        assert "sent Ada large" in shown[5]
        shown = await act(
            environment,
            ("click", {"ref": 99}),
            ("select", {"ref": 3, "option": "huge"}),
            ("key", {"key": "NoSuchKey"}),
            ("scroll", {"direction": "sideways"}),
            ("click", {"ref": "a b"}),
            ("type", {"ref": 1, "text": ""}),
            ("scroll", {"direction": "down"}),
        )
        assert [text.partition(":")[0] for text in shown[:5]] == ["Error"] * 5
        assert '[1] textbox your name ""' in shown[7]
        assert "the next page" in (await act(environment, ("click", {"ref": 7})))[1]
        messages, reward, over, _, _ = await environment.step_message(calls(("finish", {"answer": "42"}), ("wait", {})))
        assert (reward, over) == (1.0, True)
        assert "the episode is over" in messages[1].text


async def test_a_page_can_not_hand_over_more_than_is_read(visit, monkeypatch):
    """Also not one that replaces what describes it, or what strings are made with."""
    large = "<body><script>document.body.append('\\u{1f600}'.repeat(1e6));"
    replacing = "window.__palestra = {}; window.__palestra.snapshot = () => 'x'.repeat(1e7);"
    functions = "String.prototype.slice = Array.prototype.join = () => 'x'.repeat(1e7);"
    with site({"/": f"{large}</script>", "/evil": f"{large}{replacing}{functions}</script>"}) as pages:
        environment = visit([pages.host], max_chars=101)
        await environment.setup()
        lengths: list[int] = []
        evaluate = BrowserPage.evaluate

        async def noted(self: BrowserPage, *asked: Any) -> Any:
            found = await evaluate(self, *asked)
            lengths.append(len(found[0]) if found is not None else 0)
            return found

        monkeypatch.setattr(BrowserPage, "evaluate", noted)
        for path, length in (("/", "2,000,000"), ("/evil", "10,000,000")):
            text, _ = await environment.reset({"url": f"http://{pages.host}{path}"})
            assert text.endswith(f"… ({length} characters, cut)")
            assert text.encode()  # no half of a pair of surrogates
        assert max(lengths) <= 101


async def test_keys_and_elements_that_cover_one_another(visit):
    with site({"/": FORM, "/over": OVERLAP}) as pages:
        environment = visit([pages.host], actions="text")
        await environment.setup()
        await environment.reset({"url": f"http://{pages.host}/"})
        messages, *_ = await environment.step_message(text_message("assistant", "I press it.\nkey Escape"))
        assert messages[0].text == "escaped"
        await environment.reset({"url": f"http://{pages.host}/over"})
        for command, title in (("click 1", "low"), ("click 2", "high")):
            await environment.step_message(text_message("assistant", command))
            assert await environment.opened().evaluate("document.title") == title


async def test_the_accessibility_tree_and_the_screenshot(visit):
    with site({"/": FORM}) as pages:
        environment = visit([pages.host], observation="accessibility")
        await environment.setup()
        text, _ = await environment.reset({"url": f"http://{pages.host}/"})
        ref = text.split('button "Send" [ref=')[1].split("]")[0]
        assert "sent small" in (await act(environment, ("click", {"ref": ref})))[1]
        by_pixel = visit([pages.host], observation="screenshot", size=(400, 300))
        await by_pixel.setup()
        goal, shown = (await by_pixel.reset({"url": f"http://{pages.host}/"}))[0]
        assert goal == "Read the page."
        picture = shown.data
        assert picture == await by_pixel.screenshot()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", picture[16:24]) == (400, 300)
        assert "click_at" in {tool["function"]["name"] for tool in by_pixel.tools}
        box = await by_pixel.opened().evaluate(
            "(() => { const b = send.getBoundingClientRect(); return [b.x, b.y] })()"
        )
        await act(by_pixel, ("click_at", {"x": int(box[0]) + 5, "y": int(box[1]) + 5}))
        assert await by_pixel.opened().evaluate("document.title") == "sent"


PLANT = """<script>
document.cookie = "planted=1; max-age=9999"; localStorage.planted = 1; sessionStorage.planted = 1;
window.ready = (async () => {
  await new Promise((resolve) => { const open = indexedDB.open("planted"); open.onsuccess = resolve; });
  await caches.open("planted");
  try { await navigator.serviceWorker.register("/worker.js"); window.worker = "registered"; }
  catch (error) { window.worker = "refused"; }
  await fetch("/cached"); history.pushState({}, "", "/?planted");
})();
</script>"""
FOUND = """(async () => {
  await window.ready?.catch(() => {});
  return [document.cookie, localStorage.length, sessionStorage.length, (await indexedDB.databases()).length,
    (await caches.keys()).length, (await navigator.serviceWorker.getRegistrations()).length, history.length];
})()"""


async def test_no_episode_finds_anything_of_another(visit):
    pages = {"/": PLANT, "/empty": "<p>empty", "/worker.js": "self.x = 1", "/cached": "1"}
    with site(pages) as served:
        environment, beside = visit([served.host]), visit([served.host])
        await environment.setup()
        await beside.setup()
        await environment.reset({"url": f"http://{served.host}/"})
        planted = await environment.opened().evaluate(FOUND)
        assert planted[0] == "planted=1"
        assert planted[1:5] == [1, 1, 1, 1]  # the test can fail
        asked = served.asked.count("/cached")
        for other in (beside, environment):  # at the same time, and afterwards
            await other.reset({"url": f"http://{served.host}/empty"})
            # An empty page comes first in the history of each tab.
            assert await other.opened().evaluate(FOUND) == ["", 0, 0, 0, 0, 0, 2]
            await other.opened().evaluate("fetch('/cached').then((one) => one.text())")
        assert served.asked.count("/cached") == asked + 2  # it was in no cache


REACH = """<p>reaching</p><img src="http://%(other)s/image"><iframe src="http://%(other)s/frame"></iframe>
<link rel=prefetch href="http://%(other)s/prefetch"><link rel=preconnect href="http://%(other)s">
<script>
navigator.sendBeacon("http://%(other)s/beacon", "x");
new WebSocket("ws://%(other)s/socket");
new Worker(URL.createObjectURL(new Blob([`fetch("http://%(other)s/worker", {mode: "no-cors"})`])));
const peer = new RTCPeerConnection({iceServers: [{urls: "stun:%(other)s"}]});
peer.createDataChannel("x"); peer.createOffer().then((offer) => peer.setLocalDescription(offer));
window.tried = fetch("http://%(other)s/fetch", {mode: "no-cors"}).then(() => "reached", () => "refused");
window.byName = fetch("http://localhost:%(port)s/name", {mode: "no-cors"}).then(() => "reached", () => "refused");
setTimeout(() => open("http://%(other)s/popup"), 50);
</script>"""


async def test_no_page_reaches_what_is_not_allowed(visit):
    with site({}) as other:
        text = REACH % {"other": other.host, "port": other.host.partition(":")[2]}
        with site({"/": text, "/away": f"<script>location = 'http://{other.host}/redirect'</script>"}) as pages:
            environment = visit([pages.host])
            await environment.setup()
            await environment.reset({"url": f"http://{pages.host}/"})
            evaluate = environment.opened().evaluate
            assert await evaluate("Promise.all([tried, byName])") == ["refused", "refused"]
            await asyncio.sleep(0.5)
            await environment.opened().goto(f"http://{pages.host}/away")
            await asyncio.sleep(0.3)
            assert other.asked == []
            with pytest.raises(EpisodeForfeited, match="ERR_"):
                await environment.reset({"url": f"http://{other.host}/"})
            allowed = visit([pages.host, other.host])
            await allowed.setup()
            await allowed.reset({"url": f"http://{pages.host}/"})
            assert (await allowed.opened().evaluate("tried")) == "reached"  # the test can fail
            assert "/fetch" in other.asked


@pytest.mark.parametrize("blow", ["browser", "driver", "page"])
async def test_what_dies_fails_its_episodes_and_is_replaced(visit, blow):
    with site({"/": FORM}) as pages:
        environment, beside = visit([pages.host]), visit([pages.host])
        for one in (environment, beside):
            await one.setup()
            await one.reset({"url": f"http://{pages.host}/"})
        browser = psutil.Process(environment._browser._process)
        if blow == "browser":
            browser.kill()
        elif blow == "page":
            next(one for one in browser.children(recursive=True) if "--type=renderer" in command(one)).kill()
        else:
            (driver,) = [one for one in psutil.Process().children(recursive=True) if "run-driver" in command(one)]
            driver.kill()
        with pytest.raises(EpisodeForfeited if blow == "page" else EnvironmentFailed):
            await act_until_it_fails(environment)
        if blow == "driver":
            with pytest.raises(EnvironmentFailed):
                await act_until_it_fails(beside)
        else:
            assert "sent" in (await act(beside, ("click", {"ref": 6})))[1]
        await asyncio.gather(*(one.reset({"url": f"http://{pages.host}/"}) for one in (environment, beside)))
        assert "sent" in (await act(environment, ("click", {"ref": 6})))[1]
        assert shared_driver().starts == (2 if blow == "driver" else 1)


CLIPBOARD = """<input id=i autofocus><script>
window.read = async () => { try { return await navigator.clipboard.readText(); } catch (error) { return "refused"; } };
window.paste = () => { i.focus(); document.execCommand("paste"); return i.value; };
</script>"""


@pytest.mark.parametrize("when", ["at the same time", "afterwards"])
async def test_no_episode_pastes_what_another_has_copied(visit, when):
    with site({"/": CLIPBOARD}) as pages:
        first, second = visit([pages.host]), visit([pages.host])
        await first.setup()
        await second.setup()
        await first.reset({"url": f"http://{pages.host}/"})
        await act(first, ("type", {"ref": 1, "text": "secret"}), ("key", {"key": "Control+a"}))
        await act(first, ("key", {"key": "Control+c"}), ("key", {"key": "End"}))
        assert "secretsecret" in (await act(first, ("key", {"key": "Control+v"})))[1]  # it has a clipboard of its own
        if when == "afterwards":
            await first.close()
        await second.reset({"url": f"http://{pages.host}/"})
        await act(second, ("click", {"ref": 1}), ("key", {"key": "Control+v"}), ("key", {"key": "Shift+Insert"}))
        assert await second.opened().evaluate("i.value") == ""
        assert await second.opened().evaluate("paste()") == ""
        assert await second.opened().evaluate("read()") in ("refused", "")


async def test_episodes_share_no_process_and_no_folder(visit):
    """So nothing that a browser keeps (permissions, HSTS, handlers of protocols, open files) is another episode's."""
    with site({"/": FORM}) as pages:
        environments = [visit([pages.host]) for _ in range(2)]
        families, profiles = [], []
        for one in environments:
            await one.setup()
            await one.reset({"url": f"http://{pages.host}/"})
            main = psutil.Process(one._browser._process)
            families.append({main.pid, *(child.pid for child in main.children(recursive=True))})
            profiles.append(one._browser._profile)
        assert not families[0] & families[1]
        assert len(families[0]) > 2
        assert len(set(profiles)) == 2
        opened = {name for pid in families[1] for name in open_files(pid)}
        assert not [name for name in opened if name.startswith(f"{profiles[0]}/")]
        await environments[0].reset({"url": f"http://{pages.host}/"})
        assert not [pid for pid in families[0] if command_of(pid)]  # a later episode has a new one
        assert not profiles[0].exists()


def open_files(pid: int) -> list[str]:
    return [one.path for one in psutil.Process(pid).open_files()]


def command_of(pid: int) -> str:
    try:
        return command(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return ""


FILL = {
    "arrays": "k.push(new Uint8Array(1e8).fill(7))",
    "blobs": "k.push(new Blob([new Uint8Array(1e8).fill(k.length)]))",
    "canvases": "const c = document.createElement('canvas'); c.width = c.height = 5000; "
    "c.getContext('2d').fillRect(0, 0, 5000, 5000); k.push(c)",
}


@pytest.mark.parametrize("what", FILL)
async def test_a_page_that_takes_more_memory_than_the_limit_is_a_forfeit(visit, what):
    script = f"k = []; go = () => setInterval(() => {{ {FILL[what]} }}, 50)"
    page = f"<button onclick='go()'>x</button><script>{script}</script>"
    with site({"/": page, "/form": FORM}) as pages:
        environment, beside = visit([pages.host], max_steps=60), visit([pages.host])
        for one, path in ((environment, "/"), (beside, "/form")):
            await one.setup()
            await one.reset({"url": f"http://{pages.host}{path}"})
        with pytest.raises(EpisodeForfeited, match="512 MiB"):
            await act_until_it_fails(environment, ref=1)
        assert "sent" in (await act(beside, ("click", {"ref": 6})))[1]


async def test_profiles_of_processes_that_were_killed_go_at_the_next_start(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, living, other = (tmp_path / f"playwright_chromiumdev_profile-{name}" for name in ("dead", "living", "other"))
    for profile, owner in (
        (dead, f"{os.getpid()} 1"),
        (living, f"{os.getpid()} {process_start(os.getpid())}"),
        (other, None),
    ):
        profile.mkdir()
        if owner is not None:
            (profile / "palestra-owner").write_text(owner)
    await visit(["example.org"]).setup()
    assert {one for one in tmp_path.iterdir() if one.name.startswith("playwright_chromiumdev")} == {living, other}


@pytest.mark.parametrize(
    "key", ["Control+w", "Alt+F4", "Control+Shift+q", "Meta+l", "a+b", "Control+Control+a", "+" * 50]
)
async def test_keys_are_of_a_list(visit, key):
    with site({"/": FORM}) as pages:
        environment = visit([pages.host])
        await environment.setup()
        await environment.reset({"url": f"http://{pages.host}/"})
        assert "there is no key" in (await act(environment, ("key", {"key": key})))[0]


ICON = '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><rect width="10" height="10"/></svg>'
SLOW = """<style>#late {content: url(late.svg?after=0.2); cursor: pointer} #slides {transition: opacity 0.2s}</style>
<button id=go>go</button><p id=slides style="opacity: 0">there</p>
<img loading=lazy src="far.svg?after=9" style="margin-top: 9000px">
<script>go.onclick = () => {
  const late = Object.assign(document.createElement("span"), { id: "late" });
  const icon = Object.assign(new Image(), { src: "icon.svg?after=0.3", onclick: () => 0, className: "icon" });
  document.body.prepend(late, icon); slides.style.opacity = 1;
  slides.addEventListener("transitionend", () => { slides.textContent = "arrived"; });
}</script>"""


async def test_a_page_is_looked_at_when_what_was_done_to_it_can_be_seen(visit):
    """Pictures without a size yet would be missing from the description, and what moves would be where it was."""
    with site({"/": SLOW, "/late.svg": ICON, "/icon.svg": ICON, "/far.svg": ICON}) as pages:
        environment = visit([pages.host])
        await environment.setup()
        await environment.reset({"url": f"http://{pages.host}/"})
        _, seen = await act(environment, ("click", {"ref": 1}))
        assert seen == "[1] span#late\n[2] image\n[3] button go\narrived\n[4] image"


async def test_a_page_that_never_comes_to_rest_is_looked_at_all_the_same(visit):
    again = "const again = () => x.animate([{opacity: 0}, {opacity: 1}], 90).finished.then(again); again()"
    with site({"/": f"<p id=x>moves</p><script>{again}</script>"}) as pages:
        environment = visit([pages.host])
        await environment.setup()
        seen, _ = await environment.reset({"url": f"http://{pages.host}/"})
        assert seen == "Read the page.\n\nmoves"


async def test_a_page_that_hangs_fails_its_episode_and_no_other(visit):
    with site({"/": FORM, "/hang": "<button onclick='for (;;) {}'>x</button>"}) as pages:
        environment, beside = visit([pages.host], timeout_seconds=2), visit([pages.host])
        await environment.setup()
        await beside.setup()
        await environment.reset({"url": f"http://{pages.host}/hang"})
        await beside.reset({"url": f"http://{pages.host}/"})
        with pytest.raises(EpisodeForfeited, match=r"within.*2"):
            await act(environment, ("click", {"ref": 1}))
        assert "sent" in (await act(beside, ("click", {"ref": 6})))[1]
        await environment.reset({"url": f"http://{pages.host}/"})


async def test_a_browser_ends_with_its_episode_and_the_driver_with_its_last_user(visit):
    with site({"/": FORM}) as pages:
        environments = [Visit(hosts=[pages.host]) for _ in range(2)]
        for one in environments:
            await one.setup()
            await one.reset({"url": f"http://{pages.host}/"})
        profiles = [one._browser._profile for one in environments]
        processes = psutil.Process().children(recursive=True)
        drivers = [one for one in processes if "run-driver" in command(one)]
        await environments[0].close()
        assert [one.exists() for one in profiles] == [False, True]
        assert [command(one) for one in drivers] != [""]
        await environments[1].close()
        assert not profiles[1].exists()
        _, alive = psutil.wait_procs([one for one in processes if "chrom" in command(one)] + drivers, timeout=10)
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_hosts_have_a_form():
    assert checked_hosts(["example.org", "*.example.org:8080"]) == {"example.org", "*.example.org:8080"}
    for wrong in ("a;b", "http://a", "a/b", "", "<local>", "*", "a b"):
        with pytest.raises(ValueError, match="no host"):
            checked_hosts([wrong])


def test_what_is_missing_is_said_in_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"install chromium$"):
        Visit()
