"""Tiny models of Qwen's families."""

from __future__ import annotations

import pytest

from palestra.config import TINY_QWEN_VL
from palestra.models.vision.tiny import make_tiny_qwen


@pytest.fixture(scope="session", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def qwen(request, tmp_path_factory) -> str:
    """The name of a tiny model of each family; that of the first is built in."""
    if request.param == "qwen2_vl":
        return TINY_QWEN_VL
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_qwen(folder, request.param)
    return str(folder)
