"""Looking at a run costs the same in a long run as in a short one: every query of every reader is tested.

The queries are collected where SQLite executes them, so that a new one of a known reader is looked at, too; a new route
of the page is read as the others are.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from palestra.cli.main import main
from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.routes import Search, create_page_app
from palestra.dashboard.runs import Run
from palestra.store import RunStore
from palestra_inspect.folder_run import FolderRun
from palestra_inspect.top_view import WatchedRun, view_of
from unit.building import open_store

GROWING = ("tasks", "groups", "episodes", "chats", "manifests", "trained_tokens", "metric_rows", "events")
SCAN = re.compile(rf"SCAN ({'|'.join(GROWING)})\b")
EVERY = 100  # instructions of SQLite's machine between two counts
STEPS = (100, 400)  # of the runs; both have more of everything than one page shows
EPISODE = "train-000003-01"
VALUES = {"run": "run", "step": "7", "kind": "train", "group": "3", "episode": EPISODE, "row": "0", "call": "0"}
VALUES |= {"digest": "0" * 64, "policy": "policy"}
FILTERS = {"kind": "validation&limit=7", "state": "discarded", "step": 7, "group": 3, "before": "20-0", "limit": 7}
# These read for as long as a page may take, or all that a browser does not have yet.
OF_ALL = ("metrics", "events", *(f"{name}=" for name in Search.model_fields if name not in FILTERS))


pytestmark = pytest.mark.slow


class Watch:
    """The statements that SQLite executes, and how long each of its connections computes."""

    def __init__(self) -> None:
        self.statements: set[str] = set()
        self.counts = 0

    def connection(self) -> type[sqlite3.Connection]:
        watch = self

        class Watched(sqlite3.Connection):
            def __init__(self, *arguments, **named) -> None:
                super().__init__(*arguments, **named)
                self.set_trace_callback(watch.statements.add)
                super().set_progress_handler(watch.count, EVERY)

            def set_progress_handler(self, handler, every) -> None:
                """Leave out limits of time, so that nothing ends a reading but its end."""

        return Watched

    def count(self) -> int:
        self.counts += 1
        return 0


@pytest.fixture(scope="module")
def large_run():
    path = Path(__file__).parents[3] / "bench" / "large_run.py"
    spec = importlib.util.spec_from_file_location("large_run", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.GROUPS, module.SIZE, module.CALLS, module.VALIDATE, module.HELD_OUT = 2, 3, 2, 5, 2
    module.PROMPT, module.LONG = 20, 30
    return module


@pytest.fixture(scope="module")
def folders(large_run, tmp_path_factory) -> dict[int, Path]:
    found = {steps: tmp_path_factory.mktemp("run") / "run" for steps in STEPS}
    for steps, folder in found.items():
        folder.mkdir()
        large_run.make_run(folder, steps * large_run.GROUPS * large_run.SIZE * large_run.CALLS)
    return found


@pytest.fixture
def watch(monkeypatch) -> Watch:
    watch, connect = Watch(), sqlite3.connect
    watched = watch.connection()
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **named: connect(*a, **({"factory": watched} | named)))
    return watch


def addresses(app) -> list[str]:
    found = [path for path in app.openapi()["paths"] if path.startswith("/dashboard/api/")]
    found = [re.sub(r"\{(\w+)\}", lambda match: VALUES[match[1]], path) for path in found]
    runs = "/dashboard/api/runs/run"
    texts = {"termination": "x", "text": "zzz", "tool": "x", "forked": "true"}
    filters = FILTERS | {name: texts.get(name, "2") for name in Search.model_fields if name not in FILTERS}
    found += [f"{runs}/episodes?{name}={value}" for name, value in filters.items()]
    found += [f"{runs}/history?before=9", f"{runs}/groups/validation/3"]
    return [path + ("?follow=false&after=run:3" if path.endswith("/events") else "") for path in found]


@contextlib.contextmanager
def readers(folder: Path, newest: int) -> Iterator[dict[str, Callable[[], None]]]:
    """Everything that people look at: by name what reads it."""
    run, link = Run(name="run", folder=folder), OneTimeLink()
    app = create_page_app([run], link, asyncio.Event())
    headers = {"authorization": f"Bearer {link._key}"}

    with asyncio.Runner() as runner, open_store(folder) as store:

        def get(path: str) -> None:
            async def ask() -> None:
                transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
                async with httpx2.AsyncClient(transport=transport, base_url="http://page", headers=headers) as http:
                    found = await http.get(path)
                    assert found.status_code == 200 or "pictures" in path, (path, found.text)

            runner.run(ask())

        paths = [*addresses(app), f"/dashboard/api/runs/run/metrics?after={newest - 1}"]
        found = {path: (lambda path=path: get(path)) for path in paths}
        watched = [WatchedRun(FolderRun(run))]
        found["top"] = lambda: view_of(watched, 100, 2e9)
        for options in ([], ["--claimed"], ["--state", "discarded"], ["--kind", "train"], ["--json", "--limit", "9"]):
            found[f"episodes {options}"] = lambda options=options: main(["episodes", str(folder), *options])
        for options in ([], ["--text"], ["--json"]):
            found[f"episode {options}"] = lambda options=options: main(["episodes", str(folder), EPISODE, *options])
        found["status"] = lambda: runner.run(status(store, newest))
        yield found


async def status(store: RunStore, newest: int) -> None:
    """What `/status` and `/metrics` of a job read, and the learner once at a start."""
    await store.episodes.counts()
    await store.groups.settled_of_step("train", newest)
    await store.groups.replies_of_step("validation", newest)
    await store.groups.discard_reasons("train", newest)
    await store.groups.sampled_tokens(range(newest, newest + 1), ["policy"])
    await store.log.last_manifest()
    await store.log.metrics_of(newest)


def scans(store: Path, statements: set[str]) -> list[tuple[str, str]]:
    """The statements that read a whole table; one that a LIMIT ends does not."""
    found = []
    with sqlite3.connect(store) as plain:
        for statement in statements:
            if statement.lstrip("( ").startswith(("SELECT", "WITH")):
                plan = [row[3] for row in plain.execute(f"EXPLAIN QUERY PLAN {statement}")]
                ends = "LIMIT" in statement and not any("TEMP B-TREE" in line for line in plan)
                found += [(line, statement) for line in plan if SCAN.search(line) and not ends]
    return found


@pytest.mark.parametrize("statistics", [False, True])
def test_no_query_reads_a_whole_table(folders, watch, statistics, tmp_path, capsys):
    folder = folders[STEPS[1]]
    with readers(folder, STEPS[1]) as found:
        for read in found.values():
            read()
    main(["doctor", str(folder)])
    copy = tmp_path / "run.db"
    with sqlite3.connect(folder / "run.db") as source, sqlite3.connect(copy) as target:
        source.backup(target)
        if statistics:
            target.execute("ANALYZE")
    assert len(watch.statements) > 100
    assert scans(copy, watch.statements) == []


def test_a_second_look_costs_the_same_in_a_long_run(folders, watch, capsys):
    costs: dict[int, dict[str, int]] = {}
    for steps, folder in folders.items():
        with readers(folder, steps) as found:
            for name, read in found.items():
                read()
                before = watch.counts
                read()
                costs.setdefault(steps, {})[name.replace(f"after={steps - 1}", "newest")] = watch.counts - before
    short, long = costs.values()
    assert short.keys() == long.keys()
    kept = {name for name in short if not any(part in name for part in OF_ALL) or "newest" in name}
    grown = {name: (short[name], long[name]) for name in kept if long[name] > 1.5 * short[name] + 20}
    assert grown == {}
