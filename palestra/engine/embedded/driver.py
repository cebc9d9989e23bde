"""The driver of `kind = "embedded"`."""

from __future__ import annotations

from palestra.engine.embedded.config import EmbeddedEngineConfig


class EmbeddedDriver:
    """What Palestra has to know of this kind of engine."""

    section = EmbeddedEngineConfig
