"""What each embedded worker has of its machine; no machine of these tests has a card."""

from __future__ import annotations

import os

import pytest

from palestra.config import parse_config
from palestra.engine.cards import Card
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.driver import worker_cards, worker_settings
from palestra.models import device

GIB = 2**30


def shares(cards: int, job=None, free: float | None = 60, **engine):
    """The cards of a job's workers, and what each of them has."""
    config = parse_config({"engine": {"replicas": 2} | engine} | (job or {}))
    memory = {} if free is None else {"memory_bytes": 80 * GIB, "free_bytes": int(free * GIB)}
    found = worker_cards(config, config.engine, lambda: [Card(name=str(n), **memory) for n in range(cards)])
    return [share.visible for share in found], worker_settings(config.engine, found)


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.parametrize(
    ("cards", "job", "expected"),
    [
        (1, {}, ["0", "0"]),
        (2, {}, ["1", "1"]),
        (3, {}, ["1", "2"]),
        (2, {"trainer": {"device": "cpu"}}, ["0", "1"]),
        (2, {"kind": "inference"}, ["0", "1"]),
        (8, {"trainer": {"devices": 4}}, ["4", "5", "6", "7"]),  # two of them for workers that are added
    ],
)
def test_each_worker_has_a_card_of_its_own_and_the_trainer_keeps_its_own(cuda, cards, job, expected):
    assert shares(cards, job)[0] == expected


def test_workers_that_share_a_card_divide_half_of_what_is_free(cuda):
    assert shares(2)[1].cache_gib == 15  # of 60 GiB: 30 for keys and values, of two workers
    assert shares(1)[1].cache_gib == 10  # and the trainer
    assert shares(1, cache_gib=4)[1].cache_gib == 4
    assert shares(1, free=None)[1].cache_gib is None  # each looks itself
    assert shares(3)[1].cache_gib is None, "with a card of its own each looks itself"


def test_workers_on_cpus_divide_cores_and_memory(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(device, "memory_bytes", lambda: 32 * GIB)
    cards, found = shares(0)
    assert (cards, found.threads, found.cache_gib) == ([], 4, 4)
    assert shares(0, threads=3)[1].threads == 3


def test_an_engine_on_cpus_of_a_machine_with_cards_has_none(cuda):
    cards, found = shares(2, device="cpu")
    assert cards == []
    assert isinstance(found, EmbeddedEngineConfig)
