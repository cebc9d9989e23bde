"""Which graphics cards the processes of an engine have; no machine of these tests has a card."""

from __future__ import annotations

import pytest

from palestra.config import parse_config
from palestra.engine.cards import Card, CardTurns, deal_cards, trainer_cards, visible_cards
from palestra.errors import ConfigError
from palestra.models.gpus import GpuReader
from unit.models.scripted_nvml import GIB, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_NO_PERMISSION, Nvml
from unit.models.scripted_nvml import Card as Scripted


def dealt(cards: int, processes: int, each: int = 1, trainer: int = 1) -> list[tuple[str, int]]:
    found = deal_cards([Card(name=str(number)) for number in range(cards)], processes, each, trainer)
    return [(share.visible, share.sharers) for share in found]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cards": 1, "processes": 1}, [("0", 2)]),  # beside the trainer
        ({"cards": 1, "processes": 1, "trainer": 0}, [("0", 1)]),
        ({"cards": 2, "processes": 1}, [("1", 1)]),
        ({"cards": 2, "processes": 2}, [("1", 2), ("1", 2)]),
        ({"cards": 2, "processes": 2, "trainer": 0}, [("0", 1), ("1", 1)]),
        ({"cards": 8, "processes": 4}, [("1", 1), ("2", 1), ("3", 1), ("4", 1)]),
        ({"cards": 8, "processes": 4, "trainer": 4}, [("4", 1), ("5", 1), ("6", 1), ("7", 1)]),
        ({"cards": 8, "processes": 3, "each": 2}, [("1,2", 1), ("3,4", 1), ("5,6", 1)]),
        ({"cards": 8, "processes": 4, "each": 2, "trainer": 4}, [("4,5", 2), ("6,7", 2), ("4,5", 2), ("6,7", 2)]),
        ({"cards": 4, "processes": 1, "each": 4}, [("0,1,2,3", 2)]),  # there are no others
        ({"cards": 4, "processes": 1, "each": 3, "trainer": 2}, [("1,2,3", 2)]),  # one of the trainer's two
        ({"cards": 2, "processes": 1, "trainer": 2}, [("1", 2)]),
    ],
)
def test_processes_have_cards_of_their_own_and_the_trainers_are_left_to_the_trainer(given, expected):
    assert dealt(**given) == expected


def test_one_process_that_needs_more_cards_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"4.*graphics.*3.*engine\.t"):
        dealt(3, 1, each=4)


def read(*cards: Scripted, visible: str | None = None, refusal: int = 0) -> GpuReader:
    library = Nvml(*cards)
    library.refusal = refusal
    return GpuReader(visible, lambda: library)


def test_cards_are_counted_with_the_memory_that_is_free(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = visible_cards(read(Scripted(0), Scripted(1, memory=NVML_ERROR_NO_PERMISSION)))
    assert found == [Card(name="0", memory_bytes=80 * GIB, free_bytes=79 * GIB), Card(name="1")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,0")
    found = visible_cards(read(Scripted(0), Scripted(1), visible="GPU-1,0"))
    assert [(card.name, card.free_bytes) for card in found] == [("GPU-1", 78 * GIB), ("0", 79 * GIB)]


def test_without_the_driver_the_variable_or_torch_counts_the_cards(monkeypatch):
    silent = read(refusal=NVML_ERROR_DRIVER_NOT_LOADED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert visible_cards(silent) == [Card(name="4"), Card(name="5")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert [card.name for card in visible_cards(silent)] == ["0", "1", "2"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"NVML.*9.*CUDA_VIS"):
        visible_cards(silent)


@pytest.mark.parametrize(
    ("job", "there", "expected"),
    [
        ({}, True, 1),
        ({}, False, 0),
        ({"trainer": {"devices": 4}}, True, 4),
        ({"trainer": {"device": "cpu"}}, True, 0),
        ({"kind": "inference"}, True, 0),
    ],
)
def test_the_trainer_has_the_first_cards(monkeypatch, job, there, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert trainer_cards(parse_config({"name": "n", **job}), is_here=True) == expected
    assert trainer_cards(parse_config({"name": "n", **job}), is_here=False) == 0


def test_a_process_gets_the_cards_that_the_fewest_others_have():
    turns = CardTurns(deal_cards([Card(name=str(number)) for number in range(3)], 3, 1, 1))
    assert [turns.take() for _ in range(3)] == ["1", "2", "1"]
    turns.give_back("2")
    assert turns.take() == "2"
    none = CardTurns(())
    assert none.take() is None
    none.give_back(None)
