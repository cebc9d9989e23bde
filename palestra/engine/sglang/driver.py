"""The driver of `kind = "sglang"`."""

from __future__ import annotations

from palestra.engine.sglang.config import SglangEngineConfig


class SglangDriver:
    """What Palestra has to know of this kind of engine."""

    section = SglangEngineConfig
