"""The driver of `kind = "vllm"`."""

from __future__ import annotations

from palestra.engine.vllm.config import VllmEngineConfig


class VllmDriver:
    """What Palestra has to know of this kind of engine."""

    section = VllmEngineConfig
