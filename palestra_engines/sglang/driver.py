"""The driver of `kind = "sglang"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from palestra.config.engine import OF_KIND
from palestra_engines.external.config import ServerEngineConfig, Urls
from palestra_engines.external.driver import ServerDriver

if TYPE_CHECKING:
    from palestra_engines.external.connection import Address
    from palestra_engines.external.served_models import ServedModel
    from palestra_engines.sglang.api import SglangApi


class SglangEngineConfig(ServerEngineConfig):
    """`kind = "sglang"`: a running SGLang server."""

    reads_images: ClassVar[bool] = False
    product: ClassVar[str] = "SGLang"

    kind: Literal["sglang"] = Field("sglang", description=OF_KIND)
    url: Urls = Field(
        description="URL of an SGLang server that runs already, for a job of one policy, such as "
        "`http://127.0.0.1:30000`. A list of several, on any machines: each is an inference worker.",
    )


class SglangDriver(ServerDriver[SglangEngineConfig]):
    """Running SGLang servers."""

    section = SglangEngineConfig

    def api(
        self, table: SglangEngineConfig, model: ServedModel, address: Address, rounds: Any, *, is_started: bool
    ) -> SglangApi:
        """Return the routes of a policy's server; see `ServerDriver`."""
        from palestra_engines.external.connection import EngineConnection, tokenized
        from palestra_engines.sglang.api import SglangApi

        sample = tokenized(model.tokenizer)
        return SglangApi(EngineConnection(address), model.bounds, model.bounds.stop_ids, model.files.folder, sample)
