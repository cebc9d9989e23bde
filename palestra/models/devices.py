"""Which device arithmetic runs on."""

from __future__ import annotations

from typing import Literal

import torch

from palestra.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]


def device_of(name: DeviceName, setting: str) -> torch.device:
    """The device; `auto` is the GPU where there is one.

    Raises:
        ConfigError: `cuda`, and there is none; `setting` names the key.
    """
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError(f"{setting} is 'cuda', and torch sees no CUDA device here; use 'cpu' or 'auto'")
    return torch.device("cuda" if there and name != "cpu" else "cpu")
