"""A browser, pages whose requests are all noted, and runs to look at. Without a browser all tests skip."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api as playwright
from servers import KEY, PALESTRA, SCRIPTED, Job, Process, run_through, until

HERE = Path(__file__).parent
SEEN_SECONDS = 30.0


# Of a module, not of the session: until it ends, playwright's event loop counts as running, and no other can be run.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Chromium of the machine; nothing is downloaded."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Seen:
    """What a page did beside showing something."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture
def open_page(chromium) -> Iterator[Callable[..., Any]]:
    """Returns a function that opens a page; at the end none may have asked elsewhere, or raised anything."""
    opened: list[tuple[str, Seen]] = []
    with contextlib.ExitStack() as stack:

        def open_it(
            url: str, key: str | None = None, width: int = 1280, height: int = 900, scheme: str = "light"
        ) -> Any:
            context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            stack.callback(context.close)
            context.set_default_timeout(SEEN_SECONDS * 1000)
            page = context.new_page()
            seen = Seen()
            page.on("request", lambda request: seen.requests.append(request.url))
            page.on("pageerror", lambda error: seen.errors.append(str(error)))
            page.goto(url)
            if key is not None:
                page.fill("#key", key)
                page.click("form.login button")
            page.wait_for_selector("html[data-ready]", state="attached")
            opened.append((re.match(r"https?://[^/]+", url)[0], seen))  # type: ignore[index]
            return page

        yield open_it
    for origin, seen in opened:
        sent = [url.partition("#")[0] for url in seen.requests]
        assert [url for url in sent if not url.startswith((f"{origin}/", "data:", "blob:"))] == []
        assert not [url for url in sent if KEY in url or "pv-" in url or "once-" in url]
        assert seen.errors == []


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Iterator[Job]:
    """A run of a real server and a real worker."""
    with Job(tmp_path_factory.mktemp("finished"), SCRIPTED) as job:
        run_through(job, [])
        yield job


@pytest.fixture
def dashboard(tmp_path) -> Iterator[Callable[..., tuple[str, Process]]]:
    """Returns a function that starts `palestra dashboard`, and gives its link."""
    started: list[Process] = []

    def start(*folders: Path) -> tuple[str, Process]:
        log = tmp_path / f"dashboard-{len(started)}.log"
        process = Process.start([PALESTRA, "dashboard", *folders, "--port", "0", "--no-browser"], log)
        started.append(process)
        until(lambda: "#once-" in process.output or process.popen.poll() is not None, "the page is served")
        found = re.search(r"http\S+#once-\w+", process.output)
        assert found is not None, process.output
        return found[0], process

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core, which finds what keeps people from using a page."""
    return (HERE / "axe.min.js").read_text()
