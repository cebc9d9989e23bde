"""Choose the device on which arithmetic runs: the CPU or one GPU."""

from __future__ import annotations

from typing import Literal

import torch

from palestra.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]


def device_of(name: DeviceName, setting: str) -> torch.device:
    """Return the torch device for a configured name; `auto` is the GPU if there is one.

    Args:
        name: the configured value.
        setting: the configuration key, for the error.

    Raises:
        ConfigError: `cuda` on a machine without a CUDA device.
    """
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError(f"{setting} is 'cuda', and torch sees no CUDA device here; use 'cpu' or 'auto'")
    return torch.device("cuda" if there and name != "cpu" else "cpu")
