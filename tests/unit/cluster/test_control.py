from __future__ import annotations

import stat
import sys
import types

import pytest

from palestra.cluster import control
from palestra.errors import StoreError
from palestra.scheduler.scheduler import Scheduler
from unit.scheduler.launching import FakeLauncher


async def test_a_scheduler_that_can_not_go_on_ends_the_server_with_the_reason(tmp_path, monkeypatch):
    fake = types.ModuleType("palestra.cluster.ray_servers")
    fake.RayServers = lambda *_: FakeLauncher()
    monkeypatch.setitem(sys.modules, "palestra.cluster.ray_servers", fake)
    monkeypatch.setattr(control, "connect", lambda *_: "fake")
    place, rounds = Scheduler._place, []

    async def breaks(self):
        rounds.append(1)
        if len(rounds) > 1:
            raise StoreError("the control store is damaged")
        await place(self)
        return self._store.clock.now()

    monkeypatch.setattr(Scheduler, "_place", breaks)
    served = []
    state = tmp_path / "state"
    with pytest.raises(StoreError, match="damaged"):
        await control.serve_control(
            control.ServeOptions(state_dir=state, port=0), lambda url, first: served.append((url, first))
        )
    assert len(served) == 1
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
