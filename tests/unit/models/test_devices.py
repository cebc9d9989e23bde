from __future__ import annotations

import pytest
import torch

from palestra.errors import ConfigError
from palestra.models.device import device_of


@pytest.mark.parametrize("there", [False, True])
def test_auto_is_the_gpu_where_there_is_one(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert device_of("auto", "engine.device").type == ("cuda" if there else "cpu")
    assert device_of("cpu", "engine.device").type == "cpu"


def test_a_gpu_that_is_not_there_is_an_error_that_names_the_key(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.device.*no CUDA"):
        device_of("cuda", "trainer.device")
