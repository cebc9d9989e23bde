"""From recorded calls to the token rows that a trainer takes."""

from palestra.trajectory.final import calls_of_final_answers
from palestra.trajectory.prefix import common_prefix, starts_with
from palestra.trajectory.rows import TokenRow, rows_of
from palestra.trajectory.trie import Node, TokenTrie

__all__ = [
    "Node",
    "TokenRow",
    "TokenTrie",
    "calls_of_final_answers",
    "common_prefix",
    "rows_of",
    "starts_with",
]
