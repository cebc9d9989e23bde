"""Kernels are found by their entry point; without any that can be used, torch computes, and the reason is known."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from palestra.models import kernels as module
from palestra.models.kernels import GROUP, TORCH, Kernels, kernels
from palestra.models.numerics import KERNELS, PROBLEM, numerics
from palestra_cpu import extension
from unit.models.test_causal_lm import two_of


@pytest.fixture
def installed(monkeypatch):
    """Installs packages: name of the entry point -> what it refers to."""

    def install(**values: str) -> Kernels:
        points = [EntryPoint(name, value, GROUP) for name, value in values.items()]
        monkeypatch.setattr(
            "palestra.extensions.entry_points", lambda group: [one for one in points if one.group == group]
        )
        kernels.cache_clear()
        return kernels()

    yield install
    kernels.cache_clear()


class Loud(Kernels):
    def numerics(self):
        return "compiled in a test", ""


def test_without_a_package_torch_computes(installed):
    assert installed().numerics() == (TORCH, "")
    assert numerics(kernels=True)[KERNELS] == TORCH
    assert module._by_torch(0, *[torch.empty(0)] * 3, 1.0, None) is None


def test_a_package_is_found_by_its_entry_point(installed):
    assert installed(other=f"{__name__}:Loud").numerics() == ("compiled in a test", "")
    assert numerics(kernels=True)[KERNELS] == "compiled in a test"


def test_a_package_that_can_not_be_imported_is_named(installed):
    installed(cpu="palestra_that_is_not_there:load")
    found = numerics(kernels=True)
    assert found[KERNELS] == TORCH
    assert "palestra_that_is_not_there" in found[PROBLEM]


def test_kernels_for_another_torch_are_not_used_and_say_why(installed, monkeypatch):
    monkeypatch.setattr(extension.torch, "__version__", "2.9.0+cpu")
    installed(cpu="palestra_cpu.extension:load")
    computes, problem = kernels().numerics()
    assert computes == TORCH
    assert extension.TORCH_VERSION in problem
    assert "2.9.0" in problem
    assert "\n" not in problem


def test_a_model_without_kernels_keeps_transformers_layers(installed):
    installed()
    _, model = two_of("llama")
    kernels().shorten_layers(model)
    assert all("forward" not in vars(layer) for layer in model.modules())
