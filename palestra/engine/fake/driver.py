"""The driver of `kind = "fake"`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from palestra.config.engine import OF_KIND, PooledEngineConfig
from palestra.config.section import Positive
from palestra.engine.driver import EngineDriver, EngineJob, LoadedEngine, byte_policies


class FakeEngineConfig(PooledEngineConfig):
    """`kind = "fake"`: digits that follow from the seed, without a model; for tests."""

    has_model: ClassVar[bool] = False

    kind: Literal["fake"] = Field("fake", description=OF_KIND)
    delay_seconds: float = Field(0.0, ge=0, description="Time that the engine takes for a reply, in seconds.")
    reply_tokens: Positive = Field(32, description="Longest reply, in tokens.")


class FakeDriver(EngineDriver[FakeEngineConfig]):
    """An engine without a model, for tests: neither torch nor transformers is imported."""

    section = FakeEngineConfig

    def load(self, job: EngineJob, table: FakeEngineConfig) -> LoadedEngine:
        """Return an engine that replies with digits."""
        from palestra.engine.fake.engine import FakeEngine, digits_script
        from palestra.renderers import ByteTokenizer

        script = digits_script(table.reply_tokens, ByteTokenizer().eos_token_id)
        return LoadedEngine(FakeEngine(script, table.delay_seconds), byte_policies(job.config))
