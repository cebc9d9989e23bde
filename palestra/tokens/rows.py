"""Turns the token trie of an episode into rows for the trainer.

There are as few rows as possible, and each sampled token has its loss in exactly one of them. `token_weights` gives the
token's share of that loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from palestra.config import LossAggMode
from palestra.tokens.trie import Sampled, TokenTrie, TrieNode
from palestra.types.calls import Chat, GrammarSpan, Ids, MediaSpan
from palestra.types.records import TrainSample


def rows_of(trie: TokenTrie, trained: Collection[int] | None = None, episode_id: str = "") -> list[TrainSample]:
    """Return rows for the trainer, in an order that depends on the tokens alone.

    For each policy, each path to a last trained token is a row; tokens that an earlier row has trained are only context
    in it. A token that several calls sampled after the same prompt, as retries do, counts once per call: in another row
    that passes it or, if there is none, in an additional row. The trainer computes common prefixes of rows once.
    `trained` are indices of the calls whose tokens are trained, None: all; tokens of other calls are context.
    Advantages and loss weights of the rows are 0.
    """
    nodes = list(trie.nodes())
    rows: list[TrainSample] = []
    for policy in sorted({s.chat.policy for node in nodes for s in node.samplings}):
        left = {node: _wanted(node, policy, trained) for node in nodes}
        while left := {node: samplings for node, samplings in left.items() if samplings}:
            rows += [_row(trie, episode_id, path, _take(trie, left, path)) for path in _longest_paths(left)]
    return rows


def calls_of_final_answers(trie: TokenTrie, chats: Sequence[Chat]) -> frozenset[int]:
    """Return the indices of the calls whose tokens are part of an agent's last call, including that call.

    Attempts that no later call continued are left out, and so are calls before a history was rewritten.
    """
    last = {chat.agent: chat.index for chat in sorted(chats, key=lambda chat: chat.index)}
    kept = {id(node) for index in last.values() for node in trie.end(index).path()}
    return frozenset(chat.index for chat in chats if id(trie.end(chat.index)) in kept)


def _wanted(node: TrieNode, policy: str, trained: Collection[int] | None) -> list[Sampled]:
    """Return a node's samplings to train on, sorted by seed: order of arrival is not reproducible."""
    found = [s for s in node.samplings if s.chat.policy == policy and (trained is None or s.chat.index in trained)]
    return sorted(found, key=lambda s: (s.chat.sampling.seed, s.chat.index))


def _longest_paths(nodes: Collection[TrieNode]) -> list[list[TrieNode]]:
    """Return the fewest paths from the root that contain all of `nodes`, in the order of the nodes."""
    above: set[TrieNode] = set()
    for node in nodes:
        parent = node.parent
        while parent is not None and parent not in above:
            above.add(parent)
            parent = parent.parent
    return [node.path() for node in nodes if node not in above]


def _take(
    trie: TokenTrie, left: Mapping[TrieNode, list[Sampled]], path: Sequence[TrieNode]
) -> list[tuple[TrieNode, Sampled]]:
    """Take one sampling from each node of a path out of `left`, preferably of a call that ends on this path."""
    on_path = set(path)
    taken = []
    for node in path:
        samplings = left.get(node)
        if samplings:
            own = (k for k, s in enumerate(samplings) if trie.end(s.chat.index) in on_path)
            taken.append((node, samplings.pop(next(own, 0))))
    return taken


def empty_row(episode_id: str, policy: str, ids: Ids) -> TrainSample:
    """Return a row of N tokens, int32 [N], none of which was sampled."""
    length = len(ids)
    return TrainSample(
        episode_id=episode_id,
        policy=policy,
        ids=ids,
        loss_mask=np.zeros(length, np.bool_),
        logprobs=np.full(length, np.nan, np.float32),
        versions=np.full((length, 2), -1, np.int32),
        calls=np.full(length, -1, np.int32),
        advantages=np.zeros(length, np.float32),
        loss_weights=np.zeros(length, np.float32),
        temperatures=np.ones(length, np.float32),
    )


def _row(
    trie: TokenTrie, episode_id: str, path: Sequence[TrieNode], trained: Sequence[tuple[TrieNode, Sampled]]
) -> TrainSample:
    row = empty_row(episode_id, trained[0][1].chat.policy, np.concatenate([node.ids for node in path]))
    for node, (chat, start) in trained:
        here, there = slice(node.start, node.stop), slice(start, start + len(node))
        row.loss_mask[here] = True
        row.logprobs[here] = chat.logprobs[there]
        row.versions[here] = chat.versions[0].version if len(chat.versions) == 1 else token_versions(chat)[there]
        row.temperatures[here] = chat.sampling.temperature
        row.calls[here] = chat.index
    media, grammars = _media(trie, path) if trie.has_media else (), _grammars(trained)
    return replace(row, media=media, grammars=grammars) if media or grammars else row


def _grammars(trained: Sequence[tuple[TrieNode, Sampled]]) -> tuple[GrammarSpan, ...]:
    """Return a span for each constrained call, up to its last token that the row trains.

    The row may leave the reply there: an agent that sends the reply back truncated or reformatted continues with other
    tokens, which need not match the grammar.
    """
    last = {sampled.chat.index: (sampled.chat, node.stop) for node, sampled in trained if sampled.chat.sampling.grammar}
    return tuple(
        GrammarSpan(chat.prompt_tokens, stop - chat.prompt_tokens, chat.sampling.grammar)
        for chat, stop in last.values()
    )


def token_versions(chat: Chat) -> NDArray[np.int32]:
    """Return the version of the weights that sampled each of a call's C completion tokens, int32 [C, 2]."""
    return np.repeat(
        np.array([span.version for span in chat.versions], np.int32), [span.tokens for span in chat.versions], axis=0
    )


def _media(trie: TokenTrie, path: Sequence[TrieNode]) -> tuple[MediaSpan, ...]:
    """Return the spans of media on a path. Two adjacent images of the same bytes are one span."""
    spans: list[MediaSpan] = []
    for node in path:
        for position, digest in enumerate(trie.digests(node), node.start):
            if digest is None:
                continue
            if spans and spans[-1].digest == digest and spans[-1].start + spans[-1].tokens == position:
                spans[-1] = MediaSpan(spans[-1].start, spans[-1].tokens + 1, digest)
            else:
                spans.append(MediaSpan(position, 1, digest))
    return tuple(spans)


def token_weights(tokens_R: Sequence[int], mode: LossAggMode, max_tokens: int) -> list[float]:
    """Return the loss weight of each trained token of each rollout, which combines token losses into one number.

    Only a rollout's number of trained tokens counts, however it is split into calls or rows. The modes have verl's
    names (`loss_agg_mode`); a sequence is a rollout. There is one weight per rollout, for each of its tokens; 0 without
    tokens.

    Args:
        tokens_R: trained tokens of each of R rollouts (episodes) of the batch, including those with advantage 0.
        mode: `seq-mean-token-mean`: rollouts have equal weights, which their tokens share (GRPO, DeepSeekMath equation
            3); `token-mean`: tokens have equal weights (DAPO, Yu et al. 2025, equation 8); `seq-mean-token-sum-norm`:
            each token weighs 1 / (rollouts with trained tokens x max_tokens) (Dr. GRPO, Liu et al. 2025).
    """
    rollouts = sum(1 for tokens in tokens_R if tokens)
    total = sum(tokens_R)
    if mode == "seq-mean-token-mean":
        return [1.0 / (rollouts * tokens) if tokens else 0.0 for tokens in tokens_R]
    each = (1.0 / total if total else 0.0) if mode == "token-mean" else 1.0 / (max(rollouts, 1) * max_tokens)
    return [each if tokens else 0.0 for tokens in tokens_R]


def part_scale(tokens_part: Sequence[int], tokens_R: Sequence[int], mode: LossAggMode) -> float:
    """Return the factor that turns a batch's loss weights into those of a part trained as its own batch. `tokens_part`
    and `tokens_R` are the trained tokens of each rollout of the part, not all 0, and of the whole batch.
    """
    if mode == "token-mean":
        return sum(tokens_R) / sum(tokens_part)
    return sum(1 for tokens in tokens_R if tokens) / sum(1 for tokens in tokens_part if tokens)


def choice_rows(chat: Chat, choices: Sequence[tuple[int, ...]], episode_id: str = "") -> list[TrainSample]:
    """Return a row for each reply that a call could have given, in the order of `choices`.

    A row ends with the token that tells its reply from all others: what follows is certain, and adds nothing to the
    reply's probability. All tokens of the replies are marked as sampled ones, because all are trained.
    Log-probabilities and versions are those of the sampling in the row of the reply that was given, and NaN and -1 in
    the others. The trainer computes the prompt, which all rows share, once. `choices` is every reply that could have
    been sampled, token by token.
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
    """Return for each choice the number of its tokens up to the first unique one (at least one); sorted neighbours."""
    order = sorted(range(len(choices)), key=lambda place: choices[place])
    shared = [0] * len(choices)
    for one, other in itertools.pairwise(order):
        pairs = zip(choices[one], choices[other], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared[one], shared[other] = max(shared[one], common), max(shared[other], common)
    return [min(common + 1, len(choice)) for common, choice in zip(shared, choices, strict=True)]
