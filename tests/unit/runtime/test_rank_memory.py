"""A job whose ranks would not fit is refused before they are started, with what is missing."""

from __future__ import annotations

import pytest

from palestra.config import parse_config
from palestra.errors import ConfigError
from palestra.models.catalog import model_folder
from palestra.runtime import rank_memory
from palestra.runtime.model_facts import ModelFacts, model_facts

GIB = 2**30


@pytest.mark.parametrize(
    ("policy", "bytes_each"),
    [
        ({"model": "tiny-random"}, 16),  # weights, gradient and moments, of which each rank has and reads an eighth
        ({"model": "tiny-random-vision"}, 8 * 4),  # each rank loads the whole, in float32
        ({"model": "tiny-random", "adapter": {"rank": 4}}, 2),  # a base in bfloat16, without a gradient
    ],
)
def test_what_is_missing_is_said(policy, bytes_each, monkeypatch):
    parameters = model_facts(model_folder(policy["model"])).parameters
    config = parse_config({"policies": {"policy": policy}, "trainer": {"devices": 8, "device": "cpu"}})
    needed = 8 * rank_memory.RANK_BYTES + parameters * bytes_each
    monkeypatch.setattr(rank_memory, "available_bytes", lambda: needed)
    rank_memory.check_memory(config, {"policy": policy["model"]})
    monkeypatch.setattr(rank_memory, "GIB", 1)
    monkeypatch.setattr(rank_memory, "available_bytes", lambda: needed - 100)
    with pytest.raises(ConfigError, match=r"trainer\.devices is 8, .* 100\.0 GiB are missing"):
        rank_memory.check_memory(config, {"policy": policy["model"]})


def test_an_adapter_that_is_merged_into_its_base_is_loaded_whole_by_every_rank(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny-random", "r": 4}')
    parameters = model_facts(model_folder("tiny-random")).parameters
    config = parse_config({"model": str(tmp_path), "trainer": {"devices": 8, "device": "cpu"}})
    needed = 8 * rank_memory.RANK_BYTES + parameters * 8 * 4
    monkeypatch.setattr(rank_memory, "available_bytes", lambda: needed)
    rank_memory.check_memory(config, {"policy": str(tmp_path)})
    monkeypatch.setattr(rank_memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"trainer\.devices is 8"):
        rank_memory.check_memory(config, {"policy": str(tmp_path)})


def test_a_model_may_be_larger_than_the_memory_of_a_rank(monkeypatch):
    config = parse_config({"model": "tiny-random", "trainer": {"devices": 8, "device": "cpu"}})
    facts = ModelFacts(parameters=GIB, context=None)  # 4 GiB of weights
    monkeypatch.setattr(rank_memory, "model_facts", lambda folder: facts)
    rank_memory.check_memory(config, {"policy": "tiny-random"}, rank_memory_gib=2.5)


def test_weights_on_graphics_cards_take_no_other_memory(monkeypatch):
    cards = parse_config({"model": "tiny-random", "trainer": {"devices": 2, "device": "cuda"}})
    offloaded = parse_config({"model": "tiny-random", "trainer": {"devices": 2, "device": "cuda", "cpu_offload": True}})
    monkeypatch.setattr(rank_memory, "available_bytes", lambda: 2 * rank_memory.RANK_BYTES)
    rank_memory.check_memory(cards, {"policy": "tiny-random"})
    with pytest.raises(ConfigError, match=r"trainer\.devices is 2"):
        rank_memory.check_memory(offloaded, {"policy": "tiny-random"})


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
