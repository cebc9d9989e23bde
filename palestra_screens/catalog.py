"""The environments of this package for the catalogue and `palestra environments`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from palestra.envs.catalog import CatalogEntry, settings_checked
from palestra_sandboxes.bubblewrap.program import check_bubblewrap
from palestra_screens.browser.chromium import chromium_path
from palestra_screens.browser.miniwob import MiniWoB, miniwob_tasks, pages_folder
from palestra_screens.desktop.display import check_desktop
from palestra_screens.desktop.environment import DesktopEnvironment, desktop_tasks
from palestra_screens.terminal.environment import TerminalEnvironment
from palestra_screens.terminal.tasks import terminal_tasks


def _check_miniwob() -> None:
    chromium_path()
    pages_folder()


def _page(name: str) -> CatalogEntry:
    return replace(MINIWOB, summary=f"the page {name} of MiniWoB++", generate=partial(miniwob_tasks, name), part=None)


MINIWOB = CatalogEntry(
    summary="small tasks on web pages, in a browser (MiniWoB++); miniwob/PAGE has the tasks of one page",
    make=settings_checked("miniwob", MiniWoB),
    generate=partial(miniwob_tasks, None),
    check_installed=_check_miniwob,
    starts_programs=True,
    part=_page,
)

TERMINAL = CatalogEntry(
    summary="small tasks in a shell: find, count, edit, git, mend a function; in a sandbox",
    make=settings_checked("terminal", TerminalEnvironment),
    generate=terminal_tasks,
    check_installed=check_bubblewrap,
    starts_programs=True,
)

DESKTOP = CatalogEntry(
    summary="a window with fields, boxes and buttons, acted on by mouse and keyboard",
    make=settings_checked("desktop", DesktopEnvironment),
    generate=desktop_tasks,
    check_installed=check_desktop,
    starts_programs=True,
)
