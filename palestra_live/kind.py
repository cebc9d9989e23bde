"""`kind = "live"` of `palestra run`: what the package adds to a job."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from palestra.config import JobConfig, JudgeConfig
from palestra.http.app import GuardedApp
from palestra.learner import OpenRun
from palestra.runtime.terms import JobExtension, JobTerms
from palestra.server import DataPlane
from palestra.store.key_files import write_private
from palestra.waiting import cancelled
from palestra_live.config import LiveConfig, read_live
from palestra_live.gating import open_gate
from palestra_live.judged import session_judge
from palestra_live.privacy import Redaction
from palestra_live.routes import LiveApp, add_live_routes, live_key
from palestra_live.sessions import LiveSessions, Versions
from palestra_live.store import LiveStore

KEY_FILE = "live_key"  # in the folder of a run, beside `api_key`


def live_job(tables: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> tuple[JobConfig, JobTerms]:
    """Return the job of a configuration with `kind = "live"`, and how it is started; see `read_live`."""
    config, live, judge = read_live(tables, settings, source)
    redaction = Redaction(live.redact)

    def extend(run: OpenRun, plane: DataPlane, app: GuardedApp) -> AbstractAsyncContextManager[JobExtension]:
        return _extended(live, judge, redaction, run, plane, app)

    return config, JobTerms(plays=False, extension=extend)


@asynccontextmanager
async def _extended(
    live: LiveConfig, judge: JudgeConfig | None, redaction: Redaction, run: OpenRun, plane: DataPlane, app: GuardedApp
) -> AsyncIterator[JobExtension]:
    """Serve sessions in front of a job's application while the block is open."""
    import asyncio

    folder = run.folder.path
    store = LiveStore(folder, live.wait_seconds)
    try:
        async with AsyncExitStack() as stack:
            compares = judge is not None and judge.compares is not None
            versions: Versions = (
                Versions(run)
                if live.gate is None
                else await stack.enter_async_context(
                    open_gate(run, plane, store, live.gate, judge if compares else None)
                )
            )
            scoring = (
                None
                if judge is None or compares
                else await stack.enter_async_context(session_judge(run, plane, judge, live.judged))
            )
            sessions = LiveSessions(run, plane, store, live, versions, redaction, scoring)
            await sessions.load()
            write_private(folder / KEY_FILE, live_key(plane))
            ends = f"a session ends after {live.idle_seconds:g} s of silence"
            await run.event("live_serving", {"text": f"the application's key is in {folder / KEY_FILE}; {ends}"})
            add_live_routes(app, plane, sessions)
            watching = asyncio.create_task(sessions.run())
            stack.push_async_callback(cancelled, watching)
            yield LiveApp(app, plane, sessions)
    finally:
        store.close()
