from __future__ import annotations

import stat
import subprocess
import sys
import types

import pytest

from palestra.errors import ConfigError, Superseded
from palestra_service.jobs.scheduler import JobScheduler
from palestra_service.ray import serve
from unit.control.launching import FakeLauncher


def test_ray_is_imported_after_its_environment_is_set_and_missed_in_words():
    """So nothing that `palestra serve` imports before `connect` needs it."""
    code = """
import sys
sys.modules["ray"] = None  # as where it is not installed
from pathlib import Path
from palestra.errors import ConfigError
from palestra_service.ray import serve
try:
    serve.connect(None, Path("/nowhere"), serve.LocalRay())
except ConfigError as error:
    print("palestra[cluster]" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


async def test_a_scheduler_that_is_superseded_ends_the_server_with_the_reason(tmp_path, monkeypatch):
    fake = types.ModuleType("palestra_service.ray.servers")
    fake.RayServers = lambda *_: FakeLauncher()
    monkeypatch.setitem(sys.modules, "palestra_service.ray.servers", fake)
    monkeypatch.setattr(serve, "connect", lambda *_: "fake")
    place, rounds = JobScheduler._place, []

    async def breaks(self):
        rounds.append(1)
        if len(rounds) > 1:
            raise Superseded("taken over")
        await place(self)
        return self._store.clock.now()

    monkeypatch.setattr(JobScheduler, "_place", breaks)
    served = []
    state = tmp_path / "state"
    with pytest.raises(Superseded):
        await serve.serve_control(
            serve.ServeOptions(state_dir=state, port=0), served.append, lambda key, unused: served.append(key)
        )
    key, url = served
    assert (key.record.user, url[:7]) == ("admin", "http://")
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


async def test_the_first_key_is_shown_before_anything_else_can_fail(tmp_path, monkeypatch):
    def no_ray(*_):
        raise ConfigError("no Ray")

    monkeypatch.setattr(serve, "connect", no_ray)
    shown = []
    for _ in range(2):
        with pytest.raises(ConfigError):
            await serve.serve_control(
                serve.ServeOptions(state_dir=tmp_path, port=0), shown.append, lambda *said: shown.append(said)
            )
    (first, unused), again = shown
    assert (first.record.user, unused) == ("admin", True)
    assert again == (None, True)  # so that the operator is told how to make another one
