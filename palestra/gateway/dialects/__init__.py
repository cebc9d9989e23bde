"""The dialects that a server speaks. To add one, add a file to this folder and a line to `DIALECTS`."""

from __future__ import annotations

from typing import Any

from palestra.gateway.dialects.anthropic import Messages
from palestra.gateway.dialects.base import Dialect
from palestra.gateway.dialects.chat import ChatCompletions
from palestra.gateway.dialects.completions import Completions
from palestra.gateway.dialects.responses import Responses

DIALECTS: tuple[Dialect[Any], ...] = (
    ChatCompletions(),
    Completions(),
    Responses(),
    Messages(),
)

__all__ = ["DIALECTS", "Dialect"]
