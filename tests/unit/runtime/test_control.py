from __future__ import annotations

import stat
import sys
import types

import pytest

from palestra.control.jobs.scheduler import JobScheduler
from palestra.errors import StoreError
from palestra.runtime.ray import serve
from unit.control.launching import FakeLauncher


async def test_a_scheduler_that_can_not_go_on_ends_the_server_with_the_reason(tmp_path, monkeypatch):
    fake = types.ModuleType("palestra.runtime.ray.servers")
    fake.RayServers = lambda *_: FakeLauncher()
    monkeypatch.setitem(sys.modules, "palestra.runtime.ray.servers", fake)
    monkeypatch.setattr(serve, "connect", lambda *_: "fake")
    place, rounds = JobScheduler._place, []

    async def breaks(self):
        rounds.append(1)
        if len(rounds) > 1:
            raise StoreError("the control store is damaged")
        await place(self)
        return self._store.clock.now()

    monkeypatch.setattr(JobScheduler, "_place", breaks)
    served = []
    state = tmp_path / "state"
    with pytest.raises(StoreError, match="damaged"):
        await serve.serve_control(
            serve.ServeOptions(state_dir=state, port=0), lambda url, first: served.append((url, first))
        )
    assert len(served) == 1
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
