"""The driver of `kind = "sglang"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from palestra.engine.external.driver import ServerDriver
from palestra.engine.sglang.config import SglangEngineConfig

if TYPE_CHECKING:
    from palestra.engine.external.connection import Address
    from palestra.engine.external.served_models import ServedModel
    from palestra.engine.sglang.api import SglangApi


class SglangDriver(ServerDriver[SglangEngineConfig]):
    """SGLang servers that run already."""

    section = SglangEngineConfig

    def api(
        self, table: SglangEngineConfig, model: ServedModel, address: Address, rounds: Any, *, is_started: bool
    ) -> SglangApi:
        """Return the routes of a policy's server; see `ServerDriver`."""
        from palestra.engine.external.connection import EngineConnection
        from palestra.engine.external.sample_text import tokenized
        from palestra.engine.sglang.api import SglangApi

        sample = tokenized(model.tokenizer)
        return SglangApi(EngineConnection(address), model.bounds, model.bounds.stop_ids, model.files.folder, sample)
