"""Parses and validates vLLM's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.engine.shown import problem
from palestra.errors import EngineFailure
from palestra.types.calls import PolicyVersion, VersionSpan
from palestra_engines.external.api import Chunk


def list_of(event: Any, key: str) -> list[Any]:
    """Return the list under a key of an answer.

    Raises:
        EngineFailure: it is missing.
    """
    found = event.get(key) if isinstance(event, dict) else None
    if not isinstance(found, list):
        raise EngineFailure(f"the engine answered without {key}")
    return found


def chunk_of(choice: Mapping[str, Any], top: int, owner: str | None) -> Chunk:
    """Return a choice of vLLM's answer as a chunk.

    Args:
        top: requested number of most probable tokens.
        owner: whose weights the server must have; None: vLLM's versions are not the policy's.

    Raises:
        EngineFailure: its logprobs and ids do not match, or a part is missing.
    """
    try:
        ids = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        if [each["token_id"] for each in content] != ids:
            raise EngineFailure("the engine sent logprobs of other tokens than those that it has sampled")
        finish, spans = choice["finish_reason"], choice.get("weight_versions")
        return Chunk(
            ids=tuple(ids),
            logprobs=tuple(float(each["logprob"]) for each in content),
            top=tuple(_most_probable(each["top_logprobs"], top) for each in content) if top else (),
            finish=finish,
            versions=None if spans is None or finish is None or owner is None else _spans(spans, owner),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineFailure(f"the engine sent a reply that can't be read: {problem(error)}") from error


def _most_probable(said: Sequence[Mapping[str, Any]], top: int) -> tuple[tuple[int, float], ...]:
    """Return the most probable tokens of a position, best first; the sampled one comes first in vLLM's list."""
    pairs = sorted(((int(each["token_id"]), float(each["logprob"])) for each in said), key=lambda pair: -pair[1])
    return tuple(pairs[:top])


def _spans(said: Sequence[Mapping[str, Any]], owner: str) -> tuple[VersionSpan, ...]:
    """Return which versions sampled a reply, from its first token to its last without a gap."""
    spans, at = [], 0
    for each in said:
        version, _, whose = str(each["version"]).rpartition("-")
        if whose != owner:
            raise EngineFailure(
                "the engine's server has weights that this job has not sent; another job uses the same engine.url, and "
                "a server can have one at a time"
            )
        incarnation, number = map(int, version.split("."))
        if each["start"] != at or each["end"] < at:
            raise EngineFailure("the engine names versions for parts of a reply that overlap or leave gaps")
        at = int(each["end"])
        spans.append(VersionSpan(PolicyVersion(incarnation, number), at - int(each["start"])))
    return tuple(spans)
