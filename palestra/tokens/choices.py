"""Turns a call restricted to finitely many choices into rows, one for each possible reply."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from palestra.tokens.rows import empty_row, token_versions
from palestra.types.calls import Chat, GrammarSpan
from palestra.types.records import TrainSample


def choice_rows(chat: Chat, choices: Sequence[tuple[int, ...]], episode_id: str = "") -> list[TrainSample]:
    """Return a row for each reply that a call could have given, in the order of `choices`.

    A row ends with the token that tells its reply from all others: what follows is certain, and adds nothing to the
    reply's probability. All tokens of the replies are marked as sampled ones, because all are trained.
    Log-probabilities and versions are those of the sampling in the row of the reply that was given, and NaN and -1 in
    the others. The trainer computes the prompt, which all rows share, once.

    Args:
        choices: every reply that could have been sampled, token by token.
        episode_id: what the rows say of their episode.

    Raises:
        ValueError: the reply that was given is none of them.
    """
    prompt, given = chat.prompt_ids, tuple(chat.completion_ids.tolist())
    if given not in choices:
        raise ValueError(f"the reply of call {chat.index} is none of the {len(choices)} that its grammar allows")
    rows = []
    for whole, decided in zip(choices, _lengths(choices), strict=True):
        choice = whole[:decided]
        reply = slice(len(prompt), len(prompt) + len(choice))
        row = empty_row(episode_id, chat.policy, np.concatenate([prompt, np.array(choice, np.int32)]))
        row.loss_mask[reply], row.temperatures[reply], row.calls[reply] = True, chat.sampling.temperature, chat.index
        if whole == given:
            row.logprobs[reply], row.versions[reply] = chat.logprobs[:decided], token_versions(chat)[:decided]
        grammar = GrammarSpan(len(prompt), len(choice), chat.sampling.grammar)
        rows.append(replace(row, media=chat.all_media, grammars=(grammar,)))
    return rows


def _lengths(choices: Sequence[tuple[int, ...]]) -> list[int]:
    """Return for each choice the number of its tokens up to the first unique one; at least one.

    Sorted by ids, the most similar choices are neighbours.
    """
    order = sorted(range(len(choices)), key=lambda place: choices[place])
    shared = [0] * len(choices)
    for one, other in itertools.pairwise(order):
        pairs = zip(choices[one], choices[other], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared[one], shared[other] = max(shared[one], common), max(shared[other], common)
    return [min(common + 1, len(choice)) for common, choice in zip(shared, choices, strict=True)]
