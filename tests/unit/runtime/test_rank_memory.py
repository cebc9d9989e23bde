"""A job whose ranks would not fit is refused before they are started, with what is missing."""

from __future__ import annotations

import pytest

from palestra.config import parse_config
from palestra.errors import ConfigError
from palestra.models.catalog import model_folder
from palestra.runtime import rank_memory
from palestra.runtime.checking import model_facts

GIB = 2**30


def test_what_is_missing_is_said(monkeypatch):
    parameters = model_facts(model_folder("tiny-random")).parameters
    full = parse_config({"model": "tiny-random", "trainer": {"devices": 8}})
    # Eight ranks load torch, and float32 weights: more than weights, gradient and moments take.
    needed = 8 * rank_memory.RANK_BYTES + parameters * 8 * 4
    monkeypatch.setattr(rank_memory, "available_bytes", lambda: needed)
    rank_memory.check_memory(full, {"policy": "tiny-random"})
    monkeypatch.setattr(rank_memory, "GIB", 1)
    monkeypatch.setattr(rank_memory, "available_bytes", lambda: needed - 100)
    with pytest.raises(ConfigError, match=r"trainer\.devices is 8, .* 100\.0 GiB are missing"):
        rank_memory.check_memory(full, {"policy": "tiny-random"})
    adapter = {"policies": {"policy": {"model": "tiny-random", "adapter": {"rank": 4}}}, "trainer": {"devices": 8}}
    rank_memory.check_memory(parse_config(adapter), {"policy": "tiny-random"})  # bfloat16, and no gradient of the base


def test_many_ranks_of_a_tiny_model_are_refused_too(monkeypatch):
    config = parse_config({"model": "tiny-random", "trainer": {"devices": 64}})
    monkeypatch.setattr(rank_memory, "available_bytes", lambda: 24 * GIB)
    with pytest.raises(ConfigError, match=r"trainer\.devices is 64, .* take 25\.\d GiB .* 24\.0 GiB are free"):
        rank_memory.check_memory(config, {"policy": "tiny-random"})


def test_a_rank_that_does_not_fit_into_its_bundle_is_refused_with_what_is_missing():
    config = parse_config({"model": "tiny-random", "trainer": {"devices": 2}})
    rank_memory.check_memory(config, {"policy": "tiny-random"}, rank_memory_gib=1.0)
    with pytest.raises(ConfigError, match=r"a rank .* takes 0\.4 GiB .* has 0\.25 GiB, so that 0\.1 GiB are "):
        rank_memory.check_memory(config, {"policy": "tiny-random"}, rank_memory_gib=0.25)
