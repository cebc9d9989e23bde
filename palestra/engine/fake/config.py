"""The `[engine]` table of the fake engine."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from palestra.config.engine import OF_KIND, PooledEngineConfig
from palestra.config.section import Positive


class FakeEngineConfig(PooledEngineConfig):
    """`kind = "fake"`: digits that follow from the seed, without a model; for tests."""

    has_model: ClassVar[bool] = False

    kind: Literal["fake"] = Field("fake", description=OF_KIND)
    delay_seconds: float = Field(0.0, ge=0, description="Time that the engine takes for a reply, in seconds.")
    reply_tokens: Positive = Field(32, description="Longest reply, in tokens.")
