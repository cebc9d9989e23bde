"""The conversations that `merging` gives to Palestra's trie and to its peers, and the rows that a perfect merge makes.

Ids are drawn from a seed; text is four characters a token. Standard library only: the peers' environments import it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Literal, NamedTuple

SEED = 0
SYSTEM_TOKENS = 200
TOKENS_A_TURN = 500  # of the scaling series
VOCABULARY = 150_000
CHARACTERS = 4  # of text for a token

Row = tuple[Sequence[int], Sequence[bool]]  # [N] ids; [N] whether sampled


class Message(NamedTuple):
    """One message, and where its tokens stand in every prompt that has it."""

    role: Literal["system", "user", "assistant"]
    text: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One call of a model, as what it adds to the call before it."""

    parent: int | None  # the call before it in its thread, by its place in the episode; None: the first
    seen: list[int]  # new prompt ids
    said: list[int]  # sampled ids
    messages: tuple[Message, ...]  # new in the request, after the parent's reply
    reply: Message


class Call(NamedTuple):
    """One call with its whole prompt, as a model server gets it."""

    number: int  # of the call in the episode, from 0
    turn: Turn
    prompt: list[int]
    messages: list[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ideal:
    """What a perfect merge makes of an episode: one row for each conversation that is no beginning of another."""

    rows: int
    row_tokens: int
    trained: int  # sampled tokens, over all rows
    distinct: int  # tokens when common beginnings are counted once
    digest: str


def threads(count: int, turns: int, tokens: int) -> list[Turn]:
    """`count` conversations of `turns` calls under one system prompt, call by call in turn; `tokens` new in each."""
    draw = random.Random(SEED)
    said = tokens - tokens * 3 // 4
    system = _ids(draw, SYSTEM_TOKENS)
    first = Message("system", "s" * CHARACTERS * SYSTEM_TOKENS, 0, SYSTEM_TOKENS)
    episode: list[Turn] = []
    for number in range(turns):
        for thread in range(count):
            start = SYSTEM_TOKENS + number * tokens
            stop = start + tokens - said
            name = f"{thread}-{number} "
            question = Message("user", name + "u" * CHARACTERS * (stop - start), start, stop)
            new = _ids(draw, tokens - said)
            episode.append(
                Turn(
                    parent=len(episode) - count if number else None,
                    seen=new if number else system + new,
                    said=_ids(draw, said),
                    messages=(question,) if number else (first, question),
                    reply=Message("assistant", name + "a" * CHARACTERS * said, stop, stop + said),
                )
            )
    return episode


def linear(turns: int, total: int) -> list[Turn]:
    """One conversation of `turns` calls and about `total` tokens."""
    return threads(1, turns, (total - SYSTEM_TOKENS) // turns)


def subagents() -> list[Turn]:
    """Four subagents under one system prompt, eight calls each, in turn."""
    return threads(4, 8, 400)


CASES: dict[str, Callable[[], list[Turn]]] = {
    "50 turns, 20k tokens": partial(linear, 50, 20_000),
    "100 turns, 50k tokens": partial(linear, 100, 50_000),
    "200 turns, 100k tokens": partial(linear, 200, 100_000),
    "400 turns, 200k tokens": partial(linear, 400, 200_000),
    "4 subagents x 8 turns": subagents,
}
SCALING: dict[str, Callable[[], list[Turn]]] = {
    f"10^{power} tokens": partial(linear, 10**power // TOKENS_A_TURN, 10**power) for power in (3, 4, 5, 6)
}


def calls(turns: Sequence[Turn]) -> Iterator[Call]:
    """The calls with their whole prompts, made one at a time: together they are quadratic in the turns."""
    known: dict[int, tuple[list[int], list[Message]]] = {}
    for index, turn in enumerate(turns):
        ids, messages = ([], []) if turn.parent is None else known.pop(turn.parent)
        ids += turn.seen
        messages += turn.messages
        yield Call(index, turn, ids.copy(), messages.copy())
        ids += turn.said
        messages.append(turn.reply)
        known[index] = ids, messages


def fresh(text: str) -> str:
    """An equal string of its own, as parsing a request makes one: Python keeps the hash of one that it has seen."""
    return text.encode().decode()


def ideal(turns: Sequence[Turn]) -> Ideal:
    """The rows, from the conversations alone: every thread's own tokens, one after another."""
    ids: dict[int, list[int]] = {}
    sampled: dict[int, list[bool]] = {}
    for index, turn in enumerate(turns):
        ids[index] = ([] if turn.parent is None else ids.pop(turn.parent)) + turn.seen + turn.said
        mask = [] if turn.parent is None else sampled.pop(turn.parent)
        sampled[index] = mask + [False] * len(turn.seen) + [True] * len(turn.said)
    paths = sorted(ids.values())
    shared = sum(_common(path, other) for path, other in pairwise(paths))
    tokens = sum(map(len, paths))
    return Ideal(
        rows=len(paths),
        row_tokens=tokens,
        trained=sum(map(sum, sampled.values())),
        distinct=tokens - shared,
        digest=digest((ids[index], sampled[index]) for index in ids),
    )


def digest(rows: Iterable[Row]) -> str:
    """Equal for equal rows, in whatever order."""
    known = sorted(array("i", ids).tobytes() + bytes(map(bool, sampled)) for ids, sampled in rows)
    return blake2b(b"".join(blake2b(row).digest() for row in known), digest_size=16).hexdigest()


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def _common(path: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(path, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(path), len(other)))
