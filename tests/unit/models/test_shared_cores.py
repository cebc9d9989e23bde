from __future__ import annotations

import threading

import pytest
import torch

from palestra.models import shared_cores
from palestra.models.shared_cores import SharedCores, _Look, _look


@pytest.fixture(autouse=True)
def threads():
    """Leave the number of threads of this process as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def after(monkeypatch, cores: SharedCores, seconds: float, busy: float, own: float) -> int | None:
    """The threads that are chosen after a piece of work beside others."""
    looks = iter([_Look(100.0, 7.0, 3.0), _Look(100.0 + seconds, 7.0 + busy, 3.0 + own), _Look(0.0, 0.0, 0.0)])
    monkeypatch.setattr(shared_cores, "_look", lambda: next(looks))
    monkeypatch.setattr(shared_cores.time, "monotonic", lambda: 100.0 + seconds)
    cores.begin()
    cores.note(0.5)
    return cores.threads


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(shared_cores, "_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(shared_cores, "available_cores", lambda: 4)
    torch.set_num_threads(4)


@pytest.mark.parametrize(
    ("busy", "own", "chosen"),
    [
        (8.0, 8.0, 4),  # nothing beside it
        (7.9, 7.2, 4),  # 0.35 of a core
        (8.0, 6.0, 3),
        (8.0, 4.7, 2),
        (8.0, 0.1, 1),  # never none
        (2.0, 2.1, 4),  # clocks that do not agree
    ],
)
def test_others_have_as_many_cores_as_they_used(monkeypatch, four_cores, busy, own, chosen):
    assert after(monkeypatch, SharedCores(None, fixed=False), 2.0, busy, own) == chosen
    assert torch.get_num_threads() == chosen


def test_a_process_that_may_use_some_cores_of_a_machine_has_them_while_as_many_are_free(monkeypatch):
    """Other jobs of a service run on the same cores; this one may use two of eight."""
    monkeypatch.setattr(shared_cores, "_cores", lambda: set(range(8)))
    monkeypatch.setattr(shared_cores, "available_cores", lambda: 2)
    torch.set_num_threads(8)
    assert after(monkeypatch, SharedCores(None, fixed=False), 2.0, 16.0, 4.0) == 2
    assert after(monkeypatch, SharedCores(None, fixed=False), 2.0, 16.0, 2.0) == 1


def test_short_work_says_nothing(monkeypatch, four_cores):
    assert after(monkeypatch, SharedCores(None, fixed=False), 0.4, 1.6, 0.1) is None


@pytest.mark.parametrize(("given", "fixed"), [(3, False), (None, True)])
def test_a_number_that_is_set_or_that_results_depend_on_stays(monkeypatch, four_cores, given, fixed):
    assert after(monkeypatch, SharedCores(given, fixed=fixed), 2.0, 8.0, 0.1) == given


def test_the_cores_come_back_when_others_end(monkeypatch, four_cores):
    cores = SharedCores(None, fixed=False)
    assert after(monkeypatch, cores, 2.0, 8.0, 2.0) == 1
    assert after(monkeypatch, cores, 2.0, 2.0, 2.0) == 4


def test_what_this_process_uses_is_told_apart():
    """A thread of this process that computes counts as its own, not as another process."""
    begin, stop = _look(), threading.Event()
    worker = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    worker.start()
    while _look().own - begin.own < 0.3:
        pass
    stop.set()
    worker.join()
    now = _look()
    assert now.own - begin.own >= 0.3
    assert now.busy - begin.busy >= 0.2  # in hundredths of a second, by core
