"""What all runners of `engine` share: the pieces of work, the clock, the check of the replies, and the conversation.

A runner is started once and then asked, line by line on its standard input, for one piece of work at a time, so that
contestants can take turns without loading their model again. Prompts are made from the piece's name and the round's
number: equal for all contestants, and new in every round, so that nothing of an earlier round is of use to a cache.

Standard library only: the peers' environments import it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

PROMPT_TOKENS, NEW_TOKENS, TURNS = 40, 24, 8
MAX_CONTEXT = 1024
LONG_REPLY = 640  # tokens: so that the others are still running when the last probe is answered
LEAST_ID, MOST_ID = 1000, 40000  # ids of ordinary tokens
DISTINCT_SHARE = 0.9  # of the replies at temperature 1, at least
READY = "ready"

Prompt = list[int]


class Sampler(Protocol):
    """A contestant. Everything at temperature 1, from the whole distribution."""

    def sample(self, prompts: Sequence[Prompt], samples: int, tokens: int) -> list[Prompt]:
        """`samples` replies of exactly `tokens` tokens to each prompt; all prompts of a call have one length."""
        ...


class Interruptible(Sampler, Protocol):
    """A contestant that takes new prompts while others run."""

    def first_tokens(self, others: Sequence[Prompt], probes: Sequence[tuple[float, Prompt]]) -> list[float]:
        """Seconds from each probe's arrival to its first token, while long replies to `others` are being made.

        A probe is (seconds to wait after the one before was answered, prompt): it arrives in the middle of whatever
        the engine is doing then.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One piece of work, and what the arithmetic floor needs to know of it."""

    prompts: int
    samples: int = 1
    turns: int = 1
    repeats: int = 1  # in a round: short pieces are repeated
    probed: bool = False  # the time to the first token, while `prompts` others run

    @property
    def sampled(self) -> int:
        """Tokens that are sampled in one repeat."""
        return self.prompts * self.samples * self.turns * NEW_TOKENS


REPLIES = {
    "8 prompts x 8 samples": Work(prompts=8, samples=8),
    "64 different prompts": Work(prompts=64),
    "batch 1": Work(prompts=1, repeats=3),
}
CONVERSATIONS = {
    "8 turns, 1 conversation": Work(prompts=1, turns=TURNS),
    "8 turns, 8 conversations": Work(prompts=8, turns=TURNS),
}
FIRST_TOKENS = {
    "1 other running": Work(prompts=1, repeats=12, probed=True),
    "32 others running": Work(prompts=32, repeats=12, probed=True),
}
WORKS = REPLIES | CONVERSATIONS | FIRST_TOKENS


def make_prompts(count: int, draw: Random) -> list[Prompt]:
    """Different prompts of `PROMPT_TOKENS` ids."""
    return [[draw.randrange(LEAST_ID, MOST_ID) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def run(sampler: Sampler, name: str, number: int) -> list[float]:
    """Seconds of each repeat of a piece of work."""
    work, draw = WORKS[name], Random(f"{name} {number}")
    if work.probed:
        assert hasattr(sampler, "first_tokens"), f"{name} is for contestants that take prompts at any time"
        gaps = [draw.uniform(0.0, 0.1) for _ in range(work.repeats)]
        probes = list(zip(gaps, make_prompts(work.repeats, draw), strict=True))
        return sampler.first_tokens(make_prompts(work.prompts, draw), probes)
    return [converse(sampler, work, draw) for _ in range(work.repeats)]


def converse(sampler: Sampler, work: Work, draw: Random) -> float:
    """Seconds of all turns; a turn's prompt is the whole history and `PROMPT_TOKENS` new tokens."""
    seconds, histories = 0.0, [Prompt() for _ in range(work.prompts)]
    for _ in range(work.turns):
        prompts = [old + new for old, new in zip(histories, make_prompts(work.prompts, draw), strict=True)]
        begin = time.perf_counter()
        replies = sampler.sample(prompts, work.samples, NEW_TOKENS)
        seconds += time.perf_counter() - begin
        check(replies, work)
        if work.turns > 1:
            histories = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    return seconds


def check(replies: Sequence[Prompt], work: Work) -> None:
    """Every reply has all its tokens, and they were drawn.

    Raises:
        ValueError: a contestant did less than was asked.
    """
    lengths = {len(reply) for reply in replies}
    if len(replies) != work.prompts * work.samples or lengths != {NEW_TOKENS}:
        raise ValueError(f"{len(replies)} replies of {lengths} tokens instead of {work} of {NEW_TOKENS}")
    if len({tuple(reply) for reply in replies}) < DISTINCT_SHARE * len(replies):
        raise ValueError("replies are alike: they were not sampled")


def main(make: Callable[[str, int], Sampler]) -> None:
    """Make the sampler from (model folder, threads) and do what is asked for, a JSON line for each piece of work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    sampler = make(arguments.model, arguments.threads)
    print(json.dumps({READY: True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"seconds": run(sampler, asked["work"], asked["round"])}), file=answers)
