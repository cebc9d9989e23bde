"""What a call has from its request beside the body: the calling agent, its step, and whether it is a retry."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from palestra.config import MAX_AGENT, is_agent_name
from palestra.errors import InvalidRequest

SOLE_AGENT = "agent"  # name of an agent that does not say its name
MAX_STEP = 1_000_000


def call_fields(body: bytes, headers: Mapping[str, str], path: str) -> dict[str, Any]:
    """Return the fields of a `GenerationRequest` that do not depend on the dialect.

    Args:
        body: body of the request. Together with the path it identifies a retry.
        headers: headers of the request.
        path: path of the route.

    Raises:
        InvalidRequest: one of Palestra's headers has a value that can't be used.
    """
    return {
        "agent": agent_of(headers),
        "time_step": time_step_of(headers),
        "digest": hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).hexdigest(),
        "retry": headers.get("x-stainless-retry-count", "0") not in ("", "0"),
    }


def agent_of(headers: Mapping[str, str]) -> str:
    """Return the name of the calling agent; a subagent's starts with its parent's: `planner/search`.

    Raises:
        InvalidRequest: the header is not a valid name.
    """
    name = headers.get("x-palestra-agent", SOLE_AGENT)
    if not is_agent_name(name):
        raise InvalidRequest(f"an agent's name has 1 to {MAX_AGENT} printable characters: {name!r}", "x-palestra-agent")
    return name


def time_step_of(headers: Mapping[str, str]) -> int | None:
    """Return the TimeStep that the call belongs to, or None: the call is a TimeStep of its own.

    Raises:
        InvalidRequest: the header is not a number, or too large.
    """
    step = headers.get("x-palestra-step")
    if step is None:
        return None
    if not step.isascii() or not step.isdigit() or len(step) > len(str(MAX_STEP)) or int(step) > MAX_STEP:
        raise InvalidRequest(f"a TimeStep is a number from 0 to {MAX_STEP}: {step[:20]!r}", "x-palestra-step")
    return int(step)
