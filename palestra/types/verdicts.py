"""`Verdict`: what a judge has said of episodes, and the key by which the store knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from palestra.types.records import EpisodeKind


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictKey:
    """What a judge was asked; the store has one verdict of a key.

    Attributes:
        members: episodes that are judged together, each with the fence under which it was played.
        rubric: digest of what is asked.
        judge: who is asked, with its version.
        ordering: number of the order in which the judge sees the members.
    """

    kind: EpisodeKind
    group_index: int
    members: tuple[tuple[str, int], ...]
    rubric: str
    judge: str
    ordering: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a judge has said.

    Attributes:
        reasons: by episode, by name; without the names for which the judge gave none.
        calls: requests that it took, failed ones included.
        tokens: of the answered requests, prompts and replies.
    """

    scores: Mapping[str, Mapping[str, float]]
    reasons: Mapping[str, Mapping[str, str]]
    calls: int = 1
    tokens: int = 0
    seconds: float = 0.0
