"""Tests of the compiled kernels, which skip where torch is another version than theirs."""

from __future__ import annotations

import pytest
import torch

from palestra_cpu.extension import TORCH_VERSION


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.__version__.partition("+")[0] != TORCH_VERSION:
        for item in items:
            if "unit/cpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=f"the kernels are written for torch {TORCH_VERSION}"))
