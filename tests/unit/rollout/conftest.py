from __future__ import annotations

import pytest

from unit.building import TASK, FakeClock, open_store
from unit.session.conftest import STOP, Bench


@pytest.fixture
async def bench(tmp_path):
    bench = Bench(tmp_path, FakeClock())
    bench.script = lambda prompt, sampling: [*b"go", STOP]
    await bench.store.groups.register("train", 0, 1, TASK, 1)
    yield bench
    bench.grammars.close()
    bench.store.close()


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path, FakeClock(), max_attempts=1) as opened:
        yield opened
