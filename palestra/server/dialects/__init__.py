"""The dialects of a server. To add one, add a file to this folder and a line to `DIALECTS`."""

from __future__ import annotations

from typing import Any

from palestra.server.dialects.anthropic import Messages
from palestra.server.dialects.base import Dialect
from palestra.server.dialects.chat import ChatCompletions
from palestra.server.dialects.completions import Completions
from palestra.server.dialects.responses import Responses

DIALECTS: tuple[Dialect[Any], ...] = (
    ChatCompletions(),
    Completions(),
    Responses(),
    Messages(),
)

__all__ = ["DIALECTS", "Dialect"]
