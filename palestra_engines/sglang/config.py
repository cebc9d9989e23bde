"""The `[engine]` table of SGLang."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from palestra.config.engine import OF_KIND
from palestra_engines.external.config import ServerEngineConfig, Urls


class SglangEngineConfig(ServerEngineConfig):
    """`kind = "sglang"`: a running SGLang server."""

    reads_images: ClassVar[bool] = False
    product: ClassVar[str] = "SGLang"

    kind: Literal["sglang"] = Field("sglang", description=OF_KIND)
    url: Urls = Field(
        description="URL of an SGLang server that runs already, for a job of one policy, such as "
        "`http://127.0.0.1:30000`. A list of several, on any machines: each is an inference worker.",
    )
