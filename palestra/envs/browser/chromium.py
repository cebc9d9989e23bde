"""One Chromium process for many episodes: started, shared, replaced when it dies, and closed after the last user."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from palestra.errors import ConfigError, EnvironmentFailed
from palestra.threads import in_thread

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright

# The headless shell is preferred: a whole browser opens a window, with renderers of its own, for each context, which
# takes about three times as much of the processor.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Debian's command of that name is a shell script that waits for this program: what is watched is the browser itself.
_PROGRAM = Path("/usr/lib/chromium/chromium-headless-shell")
START_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9.-]+(:\d{1,5})?")
_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[frozenset[str], SharedBrowser]] = WeakKeyDictionary()


def chromium_path() -> str:
    """Return the path of the machine's Chromium.

    Raises:
        ConfigError: there is none, or playwright, which drives it, is not installed.
    """
    try:
        import playwright  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError("this environment needs playwright; run: pip install 'palestra[browser]'") from None
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        raise ConfigError("this environment needs Chromium; run: apt-get install chromium")
    return str(_PROGRAM) if Path(path).name == _PROGRAM.name and _PROGRAM.exists() else path


def checked_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Return the hosts that pages may be loaded from.

    Args:
        hosts: each `example.org`, `example.org:8080` or `*.example.org`.

    Raises:
        ValueError: one has another form.
    """
    found = frozenset(hosts)
    for host in found:
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host!r} is no host, such as example.org, example.org:8080 or *.example.org")
    return found


def shared_browser(hosts: frozenset[str]) -> SharedBrowser:
    """Return the browser of this event loop that reaches exactly these hosts; it is started when it is first used."""
    browsers = _shared.setdefault(asyncio.get_running_loop(), {})
    if hosts not in browsers:
        browsers[hosts] = SharedBrowser(hosts)
    return browsers[hosts]


class SharedBrowser:
    """A Chromium process that several environments use at the same time, each with contexts of its own.

    A context shares no cookie, storage, cache, service worker, permission or history with any other, and ends with its
    episode. What the browser may connect to is decided in its network service: all traffic, of pages, workers and
    sockets, goes to a proxy that refuses it, unless its host is allowed.

    Attributes:
        starts: number of times a browser was started; each after the first replaced one that had died.
    """

    def __init__(self, hosts: frozenset[str]) -> None:
        """Describe a browser, which is not started yet.

        Args:
            hosts: hosts that it may connect to; no other name is resolved.
        """
        self.hosts, self.starts = hosts, 0
        self._users, self._changing = 0, asyncio.Lock()
        self._broken = False  # whether it has opened no context, although it counts as connected
        self._driver: Playwright | None = None
        self._browser: Browser | None = None
        self._refuses: socket.socket | None = None
        self._profile: Path | None = None  # of the running browser, where it is known

    @property
    def alive(self) -> bool:
        """Return whether the browser runs."""
        return self._browser is not None and self._browser.is_connected()

    async def enter(self) -> None:
        """Count one more user, and start the browser if it does not run.

        Raises:
            ConfigError: Chromium or playwright is not installed.
            EnvironmentFailed: the browser does not start.
        """
        async with self._changing:
            self._users += 1
            try:
                await self._ensure()
            except BaseException:
                await self._leave()
                raise

    async def leave(self) -> None:
        """Count one user less; after the last, the browser and its driver end."""
        async with self._changing:
            await self._leave()

    async def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            await self._stop()

    async def new_context(self, **settings: Any) -> BrowserContext:
        """Return a new context, in a new browser if the last one has died.

        Args:
            **settings: of playwright's `new_context`.

        Raises:
            EnvironmentFailed: the browser does not start, or died at this moment.
        """
        for attempt in range(2):
            async with self._changing:
                browser = await self._ensure()
            try:
                async with asyncio.timeout(START_SECONDS):
                    return await browser.new_context(accept_downloads=False, service_workers="block", **settings)
            except Exception as error:
                # A browser counts as connected until its driver says otherwise, which a driver that has died does not.
                if self._browser is browser:
                    self._broken = True
                if attempt:
                    raise EnvironmentFailed(f"the browser opened no context: {first_line(error)}") from error
        raise AssertionError("the second attempt returns or raises")

    async def _ensure(self) -> Browser:
        """Return the running browser, started if it is needed; the caller holds the lock."""
        if self._browser is not None and self._browser.is_connected() and not self._broken:
            return self._browser
        path = chromium_path()
        from playwright.async_api import async_playwright

        # The driver, a process of its own, is replaced as well: it may be what died.
        await self._stop()
        try:
            async with asyncio.timeout(START_SECONDS):
                self._driver = await async_playwright().start()
                arguments = self._arguments()
                self._browser = await self._driver.chromium.launch(
                    executable_path=path,
                    args=arguments,
                    chromium_sandbox=os.geteuid() != 0,  # as root, Chromium can't use its own sandbox
                    handle_sigint=False,
                    handle_sigterm=False,
                    handle_sighup=False,
                )
        except Exception as error:
            await self._stop()
            raise EnvironmentFailed(f"Chromium ({path}) does not start: {first_line(error)}") from error
        self.starts, self._broken = self.starts + 1, False
        self._profile = await in_thread(lambda: _profile_of(arguments[0]))
        return self._browser

    def _arguments(self) -> list[str]:
        """Return the flags that keep the browser from connecting to any host that is not allowed."""
        if self._refuses is None:
            # Bound and not listening, so that no other program can answer at the proxy's address.
            self._refuses = socket.socket()
            self._refuses.bind(("127.0.0.1", 0))
        names = {host.partition(":")[0] for host in self.hosts}
        resolved = "".join(f", EXCLUDE {name}" for name in sorted(names))
        return [
            f"--proxy-server=http://127.0.0.1:{self._refuses.getsockname()[1]}",
            "--proxy-bypass-list=" + ";".join(["<-loopback>", *sorted(self.hosts)]),
            f"--host-resolver-rules=MAP * ~NOTFOUND{resolved}",
            "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
            "--disable-quic",
            "--disable-gpu",
        ]

    async def _stop(self) -> None:
        """End the browser and the driver, also if one of them is dead or hangs."""
        browser, driver = self._browser, self._driver
        self._browser = self._driver = None
        ends = [*([browser.close] if browser else []), *([driver.stop] if driver else [])]
        for end in ends:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await end()
            except Exception:  # noqa: BLE001, S110 - it is dead already, which is what was wanted
                pass
        if self._refuses is not None:
            self._refuses.close()
            self._refuses = None
        profile, self._profile = self._profile, None
        if profile is not None:  # a driver that is ended early, or dies, does not remove it
            await _remove(profile)


def _profile_of(argument: str) -> Path | None:
    """Return the profile of the browser that was started with an argument that no other has; None: it is not found."""
    option = b"--user-data-dir="
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # the process has ended
            continue
        if argument.encode() in words:
            for word in words:
                if word.startswith(option):
                    return Path(os.fsdecode(word.removeprefix(option)))
    return None


async def _remove(profile: Path) -> None:
    """Remove the profile of a browser that has ended; its last processes may write into it for a moment."""

    def remove() -> None:
        until = time.monotonic() + _CLOSE_SECONDS
        while profile.exists() and time.monotonic() < until:
            shutil.rmtree(profile, ignore_errors=True)
            time.sleep(0.05)

    await in_thread(remove)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without playwright's log of what it tried; or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
