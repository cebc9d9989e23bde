"""From recorded model calls to token rows for a trainer: calls are merged in a trie, and its paths become rows."""

from palestra.tokens.rows import calls_of_final_answers, choice_rows, part_scale, rows_of, token_weights
from palestra.tokens.token_run import TokenRun, common_prefix, common_tokens
from palestra.tokens.trie import TokenTrie, TrieNode

__all__ = [
    "TokenRun",
    "TokenTrie",
    "TrieNode",
    "calls_of_final_answers",
    "choice_rows",
    "common_prefix",
    "common_tokens",
    "part_scale",
    "rows_of",
    "token_weights",
]
