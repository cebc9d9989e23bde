"""The driver of `kind = "sglang"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from palestra_engines.external.driver import ServerDriver
from palestra_engines.sglang.config import SglangEngineConfig

if TYPE_CHECKING:
    from palestra_engines.external.connection import Address
    from palestra_engines.external.served_models import ServedModel
    from palestra_engines.sglang.api import SglangApi


class SglangDriver(ServerDriver[SglangEngineConfig]):
    """Running SGLang servers."""

    section = SglangEngineConfig

    def api(
        self, table: SglangEngineConfig, model: ServedModel, address: Address, rounds: Any, *, is_started: bool
    ) -> SglangApi:
        """Return the routes of a policy's server; see `ServerDriver`."""
        from palestra_engines.external.connection import EngineConnection
        from palestra_engines.external.sample_text import tokenized
        from palestra_engines.sglang.api import SglangApi

        sample = tokenized(model.tokenizer)
        return SglangApi(EngineConnection(address), model.bounds, model.bounds.stop_ids, model.files.folder, sample)
