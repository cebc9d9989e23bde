"""The driver of `kind = "fake"`."""

from __future__ import annotations

from palestra.engine.fake.config import FakeEngineConfig


class FakeDriver:
    """What Palestra has to know of this kind of engine."""

    section = FakeEngineConfig
