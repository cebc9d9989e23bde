"""From recorded model calls to token rows for a trainer: calls are merged in a trie, and its paths become rows."""

from palestra.trajectory.rows import TokenRow, calls_of_final_answers, rows_of
from palestra.trajectory.token_run import TokenRun, common_prefix, common_tokens
from palestra.trajectory.trie import Node, TokenTrie

__all__ = [
    "Node",
    "TokenRow",
    "TokenRun",
    "TokenTrie",
    "calls_of_final_answers",
    "common_prefix",
    "common_tokens",
    "rows_of",
]
