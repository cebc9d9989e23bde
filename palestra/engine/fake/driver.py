"""The driver of `kind = "fake"`."""

from __future__ import annotations

from palestra.engine.driver import EngineDriver, EngineJob, LoadedEngine, byte_policies
from palestra.engine.fake.config import FakeEngineConfig


class FakeDriver(EngineDriver[FakeEngineConfig]):
    """An engine without a model, for tests: neither torch nor transformers is imported."""

    section = FakeEngineConfig

    def load(self, job: EngineJob, table: FakeEngineConfig) -> LoadedEngine:
        """Return an engine that replies with digits."""
        from palestra.engine.fake.engine import FakeEngine, digits_script
        from palestra.renderers import ByteTokenizer

        script = digits_script(table.reply_tokens, ByteTokenizer().eos_token_id)
        return LoadedEngine(FakeEngine(script, table.delay_seconds), byte_policies(job.config))
