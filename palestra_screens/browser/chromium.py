"""A Chromium process for each episode, and the driver that starts them: shared, and replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from palestra.disk import write_whole
from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited, PalestraError
from palestra.process.keeper import process_start
from palestra.threads import in_thread
from palestra_sandboxes.bubblewrap.program import family_of, own_memory

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
_PROFILE = "--user-data-dir="
_OWNER = "palestra-owner"  # file of a profile: the process that has started the browser, and when that was started
_MIB, _WATCH_SECONDS, _LOOKS = 1024 * 1024, 0.25, 4
_drivers: WeakKeyDictionary[asyncio.AbstractEventLoop, BrowserDriver] = WeakKeyDictionary()


def chromium_path() -> str:
    """Return the path of the machine's Chromium."""
    try:
        import playwright  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError("this environment needs playwright; run: pip install 'palestra[browser]'") from None
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        raise ConfigError("this environment needs Chromium; run: apt-get install chromium")
    return str(_PROGRAM) if Path(path).name == _PROGRAM.name and _PROGRAM.exists() else path


def checked_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Return the hosts that pages may be loaded from. `hosts`: each `example.org`, `example.org:8080` or
    `*.example.org`.
    """
    found = frozenset(hosts)
    for host in found:
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host!r} is no host, such as example.org, example.org:8080 or *.example.org")
    return found


def shared_driver() -> BrowserDriver:
    """Return the driver of this event loop, started on first use."""
    return _drivers.setdefault(asyncio.get_running_loop(), BrowserDriver())


class BrowserDriver:
    """Playwright's driver, a process that starts and controls the browsers of all environments of an event loop.

    Attributes:
        starts: number of driver starts; each after the first replaced a dead one.
    """

    def __init__(self) -> None:
        self.starts = 0
        self._users, self._changing = 0, asyncio.Lock()
        self._driver: Playwright | None = None

    async def enter(self) -> None:
        """Count one more user, and start the driver if it is not running."""
        chromium_path()
        async with self._changing:
            self._users += 1
            try:
                await self._ensure()
            except BaseException:
                await self._leave()
                raise

    async def leave(self) -> None:
        """Count one user less; the driver ends after the last."""
        async with self._changing:
            await self._leave()

    async def launch(self, hosts: frozenset[str], memory_mib: int) -> EpisodeBrowser:
        """Start a browser for an episode, with a new driver if the last one has died.

        Args:
            hosts: that it may connect to; no other name is resolved.
            memory_mib: limit for its memory, without shared memory of its processes.
        """
        path, refuses, mark = chromium_path(), socket.socket(), f"--palestra-episode={secrets.token_hex(8)}"
        # Bound and not listening, so that no other program can answer at the proxy's address.
        refuses.bind(("127.0.0.1", 0))
        for attempt in range(2):
            async with self._changing:
                driver = await self._ensure()
            try:
                async with asyncio.timeout(START_SECONDS):
                    browser = await driver.chromium.launch(
                        executable_path=path,
                        args=[mark, *_arguments(hosts, refuses.getsockname()[1])],
                        chromium_sandbox=os.geteuid() != 0,  # as root, Chromium can't use its own sandbox
                        handle_sigint=False,
                        handle_sigterm=False,
                        handle_sighup=False,
                    )
                process, profile = await in_thread(lambda: _main_process(mark))
                return EpisodeBrowser(browser, process, profile, refuses, memory_mib)
            except Exception as error:
                if attempt:
                    refuses.close()
                    raise EnvironmentFailed(f"Chromium ({path}) does not start: {first_line(error)}") from error
                async with self._changing:  # the driver, a process of its own, may be what died
                    if self._driver is driver:
                        await self._stop()
        raise AssertionError("the second attempt returns or raises")

    async def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            await self._stop()

    async def _ensure(self) -> Playwright:
        """Return the running driver, started if it is needed; the caller holds the lock."""
        if self._driver is None:
            from playwright.async_api import async_playwright

            await in_thread(_remove_left)
            try:
                async with asyncio.timeout(START_SECONDS):
                    self._driver = await async_playwright().start()
            except Exception as error:
                raise EnvironmentFailed(f"playwright does not start: {first_line(error)}") from error
            self.starts += 1
        return self._driver

    async def _stop(self) -> None:
        """End the driver, also if it is dead or hangs."""
        driver, self._driver = self._driver, None
        if driver is not None:
            await _ended(driver.stop)


class EpisodeBrowser:
    """The Chromium of one episode: its memory and its profile are isolated from other episodes.

    Its network service enforces the allowed hosts: all traffic of pages, workers and sockets to other hosts goes to a
    proxy that refuses it.

    Attributes:
        ended_for: limit that ended it; None: it was not ended.
    """

    def __init__(self, browser: Browser, process: int, profile: Path, refuses: socket.socket, memory_mib: int) -> None:
        """Take a started browser; `BrowserDriver.launch` starts one."""
        self.ended_for: str | None = None
        self._browser, self._process, self._profile, self._refuses = browser, process, profile, refuses
        self._watching = asyncio.ensure_future(self._watch(memory_mib))

    async def new_context(self, **settings: Any) -> BrowserContext:
        """Return a new context."""
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._browser.new_context(accept_downloads=False, service_workers="block", **settings)
        except Exception as error:
            raise EnvironmentFailed(f"the browser opened no context: {first_line(error)}") from error

    async def verdict(self, reason: str, seconds: float) -> PalestraError:
        """Return the kind of a page's failure: a forfeit, unless the browser was killed from outside."""
        if self.ended_for is None:
            try:
                async with asyncio.timeout(seconds):
                    await (await self._browser.new_context()).close()
            except Exception as error:  # noqa: BLE001 - whatever it is, the browser does not answer
                if self.ended_for is None:
                    return EnvironmentFailed(f"the browser has died: {first_line(error)}")
        return EpisodeForfeited(self.ended_for or reason)

    async def close(self) -> None:
        """End the browser, even if it is dead or hangs, and remove its profile."""
        self._watching.cancel()
        await _ended(self._browser.close)
        if _is_of(self._process, self._profile):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
        self._refuses.close()
        await _remove(self._profile)  # a driver that is ended early, or dies, does not remove it

    async def _watch(self, memory_mib: int) -> None:
        """End the browser when its processes together have more memory than the limit."""
        for look in itertools.count():
            if look % _LOOKS == 0:  # finding them takes longer than asking them
                processes = [*family_of(self._process)]
                if not _is_of(self._process, self._profile):
                    return
            if own_memory(processes) > memory_mib * _MIB:
                self.ended_for = f"the browser has taken more than {memory_mib} MiB of memory"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process, signal.SIGKILL)
                return
            await asyncio.sleep(_WATCH_SECONDS)


def _arguments(hosts: frozenset[str], refusing_port: int) -> list[str]:
    """Return the flags that keep a browser from connecting to any host that is not allowed."""
    names = {host.partition(":")[0] for host in hosts}
    resolved = "".join(f", EXCLUDE {name}" for name in sorted(names))
    return [
        f"--proxy-server=http://127.0.0.1:{refusing_port}",
        "--proxy-bypass-list=" + ";".join(["<-loopback>", *sorted(hosts)]),
        f"--host-resolver-rules=MAP * ~NOTFOUND{resolved}",
        "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--disable-quic",
        "--disable-gpu",
    ]


async def _ended(end: Callable[[], Awaitable[None]]) -> None:
    """End a browser or a driver, which may be dead already."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await end()


def _main_process(mark: str) -> tuple[int, Path]:
    """Return the process and the profile of the browser that was started with an argument that no other has."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = _words(path)
        if mark in words:
            for word in words:
                if word.startswith(_PROFILE):
                    profile = Path(word.removeprefix(_PROFILE))
                    write_whole(profile / _OWNER, f"{os.getpid()} {process_start(os.getpid())}".encode())
                    return int(path.parent.name), profile
    raise EnvironmentFailed("the browser has ended as soon as it was started")


def _words(path: Path) -> list[str]:
    """Return the words of a command in `/proc`; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return os.fsdecode(path.read_bytes()).split("\0")
    return []


def _is_of(process: int, profile: Path) -> bool:
    """Return whether a process is the browser with this profile: a number may be another process's by now."""
    return f"{_PROFILE}{profile}" in _words(Path(f"/proc/{process}/cmdline"))


def _remove_left() -> None:
    """Remove the profiles of this user's processes that were killed together with their drivers."""
    for profile in Path(tempfile.gettempdir()).glob("playwright_chromiumdev_profile-*"):
        with contextlib.suppress(OSError, ValueError):
            process, started = (profile / _OWNER).read_text(encoding="utf-8").split()
            if profile.lstat().st_uid == os.geteuid() and process_start(int(process)) != int(started):
                shutil.rmtree(profile, ignore_errors=True)


async def _remove(profile: Path) -> None:
    """Remove the profile of a browser that has ended; its last processes may write into it for a moment."""

    def remove() -> None:
        until = time.monotonic() + _CLOSE_SECONDS
        while profile.exists() and time.monotonic() < until:
            shutil.rmtree(profile, ignore_errors=True)
            time.sleep(0.05)

    await in_thread(remove)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without playwright's log, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
